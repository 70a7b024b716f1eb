"""The ``smart-autotune`` command."""

from __future__ import annotations

import importlib

import click

COMMANDS = ("audit", "cache", "doctor", "report", "run")


class Commands(click.Group):
    """Imports a command when it is asked for, so that ``doctor`` and ``run`` work where Triton cannot be imported."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        try:
            found: click.Command = getattr(importlib.import_module(f"smart_autotune.cli.{name}"), name)
        except ImportError as error:
            return _unusable(name, f"{type(error).__name__}: {error}")
        return found


def _unusable(name: str, reason: str) -> click.Command:
    def refuse() -> None:
        raise click.ClickException(
            f"{name} cannot be used here: {reason}; `smart-autotune doctor` says what is missing"
        )

    return click.Command(name, callback=refuse, help=f"Cannot be used here: {reason}",
                         context_settings={"ignore_unknown_options": True, "allow_extra_args": True})  # fmt: skip


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="smart-autotune")
def main() -> None:
    """Autotuned Triton kernels: what fits which GPU, and why a config was dropped."""
