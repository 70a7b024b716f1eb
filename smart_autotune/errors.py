"""Errors we raise on purpose, and the line between the user's failures and ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.compiler.errors import CompilationError
from triton.runtime.errors import AutotunerError, OutOfResources, PTXASError

_MARK = "_smart_autotune_not_ours"

_COMPLAINT = re.compile(r"^\s*ptxas\b.*\b(error|fatal)\b")
# After one of these the CUDA context is lost: nothing measured later would mean anything (driver error texts).
_STICKY = (
    "illegal memory access",
    "illegal address",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "illegal instruction",
    "hardware stack error",
)


class SmartAutotuneError(Exception):
    """Something the caller must mend: its text names the kernel, the argument, what was given, what is allowed."""


class BadType(SmartAutotuneError, TypeError):
    """An argument of a wrong type."""


class BadValue(SmartAutotuneError, ValueError):
    """An argument of the right type with a value that is not allowed."""


class NoConfigFits(SmartAutotuneError, AutotunerError, OutOfResources):  # type: ignore[misc]  # triton is untyped
    """No config can run for this key on this device. Nothing was cached.

    ``required`` and ``limit`` are the closest miss (in ``name``'s unit), as Triton's ``OutOfResources`` names them.
    """

    def __init__(self, message: str, required: int | None = None, limit: int | None = None, name: str = "") -> None:
        AutotunerError.__init__(self, message)
        self.required = required
        self.limit = limit
        self.name = name

    def __str__(self) -> str:
        return str(self.error_message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.error_message, self.required, self.limit, self.name))


@contextmanager
def not_ours() -> Iterator[None]:
    """Code of the user or of Triton: what it raises reaches the caller as it is, never as a fault of ours."""
    try:
        yield
    except Exception as error:
        mark_not_ours(error)
        raise


def mark_not_ours(error: BaseException) -> None:
    setattr(error, _MARK, True)


def is_ours(error: BaseException) -> bool:
    """Whether an exception is a fault of this package (so that stock Triton should take over)."""
    return not isinstance(error, SmartAutotuneError) and not getattr(error, _MARK, False)


def one_line(error: BaseException, width: int = 300) -> str:
    """An exception's type and its most telling line."""
    line = _message(error)
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text if len(text) <= width else text[: width - 1] + "…"


def _message(error: BaseException) -> str:
    """Triton's compiler keeps its message apart from the source it quotes; assemblers say "error" or "fatal"."""
    if isinstance(error, CompilationError):
        inner = error.__cause__
        if error.error_message is None and inner is not None:  # the caller of a device function that failed
            return _message(inner)
        return _last_line(str(error.error_message or ""))
    lines = str(error).splitlines()
    telling = [line for line in lines if _COMPLAINT.search(line)]
    if telling:
        return telling[0].strip()
    return str(error).strip().partition("\n")[0] if isinstance(error, PTXASError) else _last_line(str(error))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def bare(error: BaseException) -> BaseException:
    """The error without its tracebacks, whose frames would keep tensors alive."""
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error


def is_sticky(error: BaseException) -> bool:
    """Whether an error means that the CUDA context is lost."""
    text = str(error).lower()
    return any(telling in text for telling in _STICKY)


def raise_if_sticky(error: BaseException) -> None:
    if is_sticky(error):
        mark_not_ours(error)
        raise error
