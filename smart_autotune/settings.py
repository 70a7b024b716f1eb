"""Every setting, in one place: type, default, unit, one line of meaning.

The environment is read once, at first use; nothing on the launch path reads it again. A value that cannot be
used raises :class:`SettingsError`, which names the variable, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

log = logging.getLogger("smart_autotune")

PREFIX = "SMART_AUTOTUNE_"
T = TypeVar("T")


class SettingsError(ValueError):
    """A setting has a value that is not allowed."""


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("1 or 0")


def _switch(text: str) -> str:
    """Off, on, or on wherever it is: "0", "1", "force"."""
    if text.strip().lower() == "force":
        return "force"
    try:
        return str(int(_boolean(text)))
    except ValueError:
        raise ValueError("1 or 0 or force") from None


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        lowered = text.strip().lower()
        if lowered not in names:
            raise ValueError(" | ".join(names))
        return lowered

    return parse


def _text(text: str) -> str:
    return text.strip()


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"an integer >= {minimum}")
        return number

    return parse


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ValueError("a number of seconds > 0")
    return number


def _seconds_or_none(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError("a number of seconds >= 0")
    return number


def _setting(default: T, parse: Callable[[str], T], meaning: str) -> T:
    value: T = field(default=default, metadata={"parse": parse, "meaning": meaning})
    return value


@dataclass(frozen=True)
class Settings:
    """One process's settings; each field is the variable ``SMART_AUTOTUNE_<FIELD>``."""

    mode: str = _setting(
        "tune",
        _one_of("tune", "first_fit", "pinned", "off", "stock"),
        "tune | first_fit (never time) | pinned (what is known, else first fit) | off (config 0 that fits) | stock",
    )
    batch: str = _setting("auto", _one_of("auto", "off"), "auto: a batch bucket joins the key | off: it never does")
    max_buckets: int = _setting(12, _integer(1), "buckets tuned per rest of the key; beyond, the nearest serves")
    cache: bool = _setting(True, _boolean, "what tunings find out is kept on disk and read back")
    cache_dir: str = _setting("", _text, "where it is kept; empty: $XDG_CACHE_HOME or ~/.cache, smart_autotune in it")
    share: str = _setting(
        "host",
        _one_of("off", "host", "ranks"),
        "who tunes a key only once: off (each process for itself) | host (its processes) | ranks (torch.distributed)",
    )
    wait_secs: float = _setting(300.0, _seconds, "how long a thread waits for another's tuning before serving cold")
    compile_workers: int = _setting(0, _integer(0), "threads compiling candidates; 0: one for each usable core")
    compile_timeout_secs: float = _setting(180.0, _seconds, "one candidate's compile budget")
    budget_secs: float = _setting(0.0, _seconds_or_none, "one tuning's budget, compiling included; 0: none")
    bench: str = _setting(
        "events",
        _one_of("events", "graph"),
        "events: single launches, L2 flushed | graph: replays, no host cost in it",
    )
    rescue: bool = _setting(True, _boolean, "when nothing fits, try the same configs with fewer pipeline stages")
    deterministic: bool = _setting(False, _boolean, "the batch size never selects a config (batch-invariant results)")
    log: str = _setting(
        "", _text, "a line of JSON for each settled key goes to this file (%p: process number) or folder; empty: none"
    )
    sparse_decode: str = _setting(
        "0",
        _switch,
        "1: SGLang's SM120 sparse decode is our op | force: the GPU is not asked (for tests) | 0: SGLang's own",
    )
    freeze_after_capture: bool = _setting(
        False, _boolean, "tuning is frozen once SGLang has captured its CUDA graphs, before its first request"
    )
    shared_bytes_cap: int = _setting(0, _integer(0), "what-if shared-memory cap per block in bytes; 0: the device's")
    strict: bool = _setting(False, _boolean, "raise our own internal errors instead of falling back to stock Triton")


def _from_environment(environ: Mapping[str, str]) -> Settings:
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        variable = PREFIX + setting.name.upper()
        text = environ.get(variable)
        if text is None:
            continue
        try:
            values[setting.name] = setting.metadata["parse"](text)
        except ValueError as error:
            raise SettingsError(f"{variable}={text!r} is not allowed: expected {error}") from None
    _warn_of_unknown(environ)
    return Settings(**values)


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    for variable, near in unknown_variables(environ):
        log.warning("%s is not a setting and has no effect%s", variable, f"; did you mean {near}?" if near else "")


def unknown_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables with our prefix that are no settings, each with the setting it is nearest to, or ""."""
    known = [PREFIX + setting.name.upper() for setting in fields(Settings)]
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            yield variable, ", ".join(difflib.get_close_matches(variable, known, n=1))


def requested() -> bool:
    """``SMART_AUTOTUNE=1``: this process is to be patched when it imports Triton. SettingsError for a bad value."""
    text = os.environ.get("SMART_AUTOTUNE", "")
    try:
        return _boolean(text)
    except ValueError as error:
        raise SettingsError(f"SMART_AUTOTUNE={text!r} is not allowed: expected {error}") from None


def strict_requested() -> bool:
    """Whether ``SMART_AUTOTUNE_STRICT`` asks for errors, also where another setting is bad."""
    return os.environ.get(PREFIX + "STRICT", "").strip().lower() in ("1", "true", "yes", "on")


_current: Settings | None = None


def current() -> Settings:
    """The settings in force. Raises :class:`SettingsError` for a bad environment value."""
    global _current
    if _current is None:
        _current = _from_environment(os.environ)
    return _current


def renew() -> None:
    """Makes every launch plan, which holds on to the settings it was made under, be looked at again."""
    global _current
    _current = replace(current())


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Settings changed for a scope (tests, notebooks); the former ones are put back. Not thread-local."""
    global _current
    before = current()
    unknown = sorted(values.keys() - {setting.name for setting in fields(Settings)})
    if unknown:
        raise SettingsError(f"unknown setting {unknown[0]!r}; known: {', '.join(s.name for s in fields(Settings))}")
    _current = replace(before, **values)
    try:
        yield _current
    finally:
        _current = before
