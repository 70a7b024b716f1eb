"""``python -m smart_autotune.cli``: the command without its installed script."""

from smart_autotune.cli import main

main(prog_name="smart-autotune")
