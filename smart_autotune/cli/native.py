"""What the compiler's native code writes to stderr, kept from the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

MOST_ERRORS = 5


class NotCaught:
    """The same interface with nothing caught: for ``--verbose``."""

    def __enter__(self) -> NotCaught:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def errors(self) -> list[str]:
        """The distinct error lines so far."""
        return []


class NativeOutput(NotCaught):
    """For its scope, the process's file descriptor 2 is a file; Python's own ``sys.stderr`` still reaches the terminal.

    A failed MLIR pass dumps the whole module, thousands of lines; one of them says what was wrong.
    """

    def __enter__(self) -> NativeOutput:
        self._stack = contextlib.ExitStack()
        self._text: Any = self._stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        sys.stderr.flush()
        terminal = self._stack.enter_context(os.fdopen(os.dup(2), "w", buffering=1, errors="replace"))
        if _descriptor(sys.stderr) == 2:
            self._stack.enter_context(contextlib.redirect_stderr(terminal))
        os.dup2(self._text.fileno(), 2)
        self._stack.callback(os.dup2, terminal.fileno(), 2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def errors(self) -> list[str]:
        self._text.seek(0)
        lines = [line.strip() for line in self._text if ": error: " in line]
        found = dict.fromkeys("compiler: " + line.rpartition(os.sep)[2] for line in lines)
        return [line for line in found if "pass pipeline" not in line][:MOST_ERRORS]


def _descriptor(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1
