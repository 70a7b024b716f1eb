"""The ``smart-autotune`` command."""

from __future__ import annotations

import click

from smart_autotune.cli.audit import audit
from smart_autotune.cli.run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="smart-autotune")
def main() -> None:
    """Autotuned Triton kernels: what fits which GPU, and why a config was dropped."""


main.add_command(audit)
main.add_command(run)
