"""A folder of kept tunings as servers leave it: whole entries, an unfinished one, and files that are none."""

from __future__ import annotations

import os
import time
from pathlib import Path

import triton

from smart_autotune.store import Store
from smart_autotune.verdict import Outcome, TuningRecord, Verdict
from support import stored

DAY = 86_400.0


def entry(root: Path, kernel: str = "decode", n: int = 512, age_days: float = 0.0, complete: bool = True) -> Path:
    """One entry, written by the store itself."""
    key = stored.key(n)._replace(kernel=f"package.module.{kernel}@0123456789abcdef")
    won = Verdict(stored.CONFIGS[0], Outcome.WON, 65_536, 232_448, "bytes", "", 12.5, (12.0, 13.25), 64, 0, 0.5)
    over = Verdict(stored.CONFIGS[1], Outcome.OVER_SHARED_MEMORY, 262_144, 232_448, "bytes", "29,696 bytes over")
    failed = Verdict(triton.Config({"BLOCK": 7}), Outcome.COMPILE_FAILED, detail="CompilationError: power of 2")
    record = TuningRecord(kernel, key, (won, over, failed), "tuned", 1.5, 0.25, "q -> bucket 16", ("a note",))
    store = Store(root)
    store.save(record, complete)
    path = store.path(key)
    assert path is not None and path.is_file()
    age(path, age_days)
    return path


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))
