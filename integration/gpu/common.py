"""What every GPU script shares: where it ran, and how its results are kept and shown."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
from typing import Any

import torch
import triton


def environment() -> dict[str, str]:
    """Date, GPU and versions: what a figure is worth nothing without."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name(),
        "capability": "sm_{}{}".format(*torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def write_json(path: str | None, content: dict[str, Any]) -> None:
    if path:
        target = pathlib.Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"environment": environment(), **content}, indent=1, default=str) + "\n")


def print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    print(f"\n== {title} ==")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
