"""What the commands say when they cannot do what was asked."""

from __future__ import annotations

import click


class BadArgument(click.ClickException):
    """What was asked cannot be done; one line says why and what would."""

    exit_code = 2
