"""How the commands print: tables for people, JSON for programs, colour only where a person watches."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS = 120  # what a log or a file gets when nothing says how wide it is


def color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), styles: Sequence[str] = ()
) -> None:
    """``right``: headings of columns of numbers. ``styles``: of each row's first cell. Cells are text, never markup."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for index, row in enumerate(rows):
        first, *rest = row
        table.add_row(Text(first, style=styles[index] if styles else ""), *(Text(cell) for cell in rest))
    colored = color()
    console = Console(
        file=io.StringIO(), width=shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns, force_terminal=colored,
        color_system="standard" if colored else None,
    )  # fmt: skip
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO from above
    click.echo("\n".join(line.rstrip() for line in text.splitlines() if line.strip()), color=colored)
