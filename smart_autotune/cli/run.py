"""``smart-autotune run -- COMMAND …``: a command, and every Python it starts, with the patch turned on."""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
from collections.abc import Mapping

import click


def environment_for(environ: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: ``SMART_AUTOTUNE=1``, and our ``sitecustomize`` first on ``PYTHONPATH``.

    That reaches what the wheel's ``.pth`` does not: editable installs, folders on ``PYTHONPATH``.
    """
    patches = importlib.import_module("smart_autotune.patches")
    hook = str(pathlib.Path(str(patches.__file__)).parent / "site")
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != hook]
    return {**environ, "SMART_AUTOTUNE": "1", "PYTHONPATH": os.pathsep.join([hook, *paths])}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Run COMMAND with every triton.autotune kernel tuned by us; its children inherit it.

    Example: smart-autotune run -- python -m sglang.launch_server --model-path …
    """
    program = shutil.which(command[0])
    if program is None:
        raise click.BadParameter(f"no such command: {command[0]}", param_hint="COMMAND")
    try:
        os.execve(program, list(command), environment_for(os.environ))
    except OSError as error:
        raise click.ClickException(f"{program}: {error.strerror}") from None
