"""The file of ``SMART_AUTOTUNE_LOG``: which one this process has, and one line more in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from smart_autotune.errors import one_line
from smart_autotune.once import warn_once


def path_of(configured: str) -> Path:
    """The file for this process: ``%p`` is its number; in a folder each process has a file of its own."""
    path = Path(os.path.expanduser(configured.replace("%p", str(os.getpid()))))
    if configured.endswith(os.sep) or path.is_dir():
        return path / f"smart_autotune-{socket.gethostname()}-{os.getpid()}.jsonl"
    return path


def append(configured: str, text: str) -> None:
    """Appends the line by one write, which other processes' lines never split. Trouble is one warning."""
    path = path_of(configured)
    data = text.encode("ascii") + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: a pipe that nobody reads must not stop the server.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o644)
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                os.write(descriptor, b"\n")  # so that what follows is a line again
                raise OSError(f"{written} of {len(data)} bytes were written")
        finally:
            os.close(descriptor)
    except OSError as error:
        warn_once("log", "SMART_AUTOTUNE_LOG=%s: tunings of this process are not logged: %s", path, one_line(error))
