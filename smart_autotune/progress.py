"""What a person sees of a long sweep: a log line every few seconds, a bar on a terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("smart_autotune")

EVERY_SECS = 5.0
_one_bar = threading.Lock()  # a terminal shows one at a time; another sweep beside it goes without


class Watch:
    """Counts a sweep's candidates. ``is_due`` says when another few seconds have passed."""

    def __init__(self, kernel: str, total: int, bar: Any = None) -> None:
        self._kernel = kernel
        self._total = total
        self._bar = bar
        self._count = 0
        self._next = time.monotonic() + EVERY_SECS

    def is_due(self, last: str) -> bool:
        """Counts ``last``; True when it was time for a log line."""
        self._count += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._count)
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + EVERY_SECS
        log.info("%s: %d of %d configs compiled, last [%s]", self._kernel, self._count, self._total, last)
        return True


@contextmanager
def watching(kernel: str, total: int) -> Iterator[Watch]:
    """A watch for one sweep; with a bar on standard error where that is a terminal."""
    if total < 2 or not _a_person_watches() or not _one_bar.acquire(blocking=False):
        yield Watch(kernel, total)
        return
    try:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            bar.add_task(f"{kernel}: compiling", total=total)
            yield Watch(kernel, total, bar)
    finally:
        _one_bar.release()


def _a_person_watches() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
