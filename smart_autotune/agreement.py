"""One tuner for each key: of any number of threads that meet a cold key, one tunes and the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


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
