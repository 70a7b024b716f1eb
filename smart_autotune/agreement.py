"""One tuner for each key: of any number of threads or processes that meet a cold key, one tunes, the others wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from smart_autotune import settings
from smart_autotune.errors import one_line
from smart_autotune.once import warn_once

log = logging.getLogger("smart_autotune")


class SingleFlight:
    """A lock for each key, there only while somebody tunes or waits."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[Hashable, tuple[threading.Lock, int]] = {}

    @contextmanager
    def claim(self, key: Hashable, wait_secs: float) -> Iterator[bool]:
        """True once this thread holds ``key`` (after waiting for the former holder); False after ``wait_secs``.

        With ``wait_secs`` 0 it never blocks: for calls made by a hook of a tuning, where waiting could deadlock.
        """
        with self._mutex:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, users + 1)
        held = False
        try:
            if wait_secs > 0:
                held = lock.acquire(timeout=min(wait_secs, threading.TIMEOUT_MAX))
            else:
                held = lock.acquire(blocking=False)
            yield held
        finally:
            if held:
                lock.release()
            with self._mutex:
                lock, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, users - 1)


@contextmanager
def one_process(path: Path | None, wait_secs: float) -> Iterator[bool]:
    """True once this process holds the entry at ``path`` (after waiting for the former holder); False after
    ``wait_secs``. With 0 it never blocks.

    The lock is the operating system's, on ``path`` + ``.lock``: it ends with its holder, however that ends. Where
    there is none to be had (no ``path``, ``SMART_AUTOTUNE_SHARE=off``, a folder that takes none) each process goes on.
    """
    lock, held = _lock(path, wait_secs)
    try:
        yield held
    finally:
        if lock is not None:
            try:
                lock.release()
            except OSError as error:  # what was done under it is done
                log.debug("%s.lock: %s", path, one_line(error))


def _lock(path: Path | None, wait_secs: float) -> tuple[filelock.BaseFileLock | None, bool]:
    if path is None or settings.current().share == "off":
        return None, True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{path}.lock")
        lock.acquire(timeout=min(max(wait_secs, 0.0), threading.TIMEOUT_MAX))
    except filelock.Timeout:
        return None, False
    except (OSError, RuntimeError) as error:
        warn_once("no lock", "%s.lock: processes may tune the same key side by side: %s", path, one_line(error))
        return None, True
    return lock, True
