"""Warnings that are said once a process: what an operator must act on, not each time it is met."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

log = logging.getLogger("smart_autotune")

_mutex = threading.Lock()
_said: set[Hashable] = set()


def warn_once(about: Hashable, message: str, *values: object) -> None:
    """A WARNING, unless this process already warned ``about`` the same thing."""
    with _mutex:
        if about in _said:
            return
        _said.add(about)
    log.warning(message, *values)


def forget() -> None:
    """Everything may be said again (tests)."""
    with _mutex:
        _said.clear()
