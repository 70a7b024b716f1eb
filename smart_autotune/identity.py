"""What one stored ranking is valid for, written down: the tuning key's parts and the environment, as text."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import numbers
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from smart_autotune import settings
from smart_autotune.key import TuningKey

FORMAT = 1  # of the entry files; another number is another file name
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.+-]+")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_ASSEMBLERS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


class CannotBeWritten(ValueError):
    """A value whose text is not the same in the next process (it holds an address)."""


def plain(value: Any) -> Any:
    """A value as JSON that keeps values and types apart: 1, True, "1" and 1.0 are four. CannotBeWritten if none is."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return {"float": repr(float(value))}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, list):
        return {"list": [plain(item) for item in value]}
    source_hash = getattr(value, "cache_key", None)  # a function given as a value: its source counts, not its name
    text = source_hash if isinstance(source_hash, str) else _text(value)
    return {type(value).__name__: text}


def _text(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        raise CannotBeWritten(f"{type(value).__name__}: {error}") from None
    if _ADDRESS.search(text):
        raise CannotBeWritten(text)
    return text


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> str:
    """JSON text that is equal where, and only where, the values and their types are."""
    return _ENCODER.encode(value)


def key_parts(key: TuningKey) -> dict[str, Any]:
    """The key's parts by name, as JSON. CannotBeWritten when one has no lasting text."""
    kernel, _, source = key.kernel.partition("@")
    return {
        "kernel": kernel,
        "source": source,
        "device": {name: plain(value) for name, value in key.device},
        "values": {name: [kind, plain(value)] for name, kind, value in key.values},
        "dtypes": dict(key.dtypes),
        "batch": None if key.batch is None else list(key.batch),
    }


def environment() -> dict[str, str]:
    """What else a ranking depends on, by name. Initialises neither CUDA nor the Triton driver."""
    import torch

    switches = dict(get_cache_invalidating_env_vars())
    switches.update((name, os.environ[name]) for name in _ASSEMBLERS if name in os.environ)
    configured = settings.current()
    return {
        "triton": str(triton.__version__),
        "torch": str(torch.__version__),
        "driver": driver_version(),
        "triton_switches": " ".join(f"{name}={value}" for name, value in sorted(switches.items())),
        "bench": configured.bench,
        "budget_secs": repr(configured.budget_secs),
        "compile_timeout_secs": repr(configured.compile_timeout_secs),
    }


@functools.cache
def driver_version() -> str:
    """CUDA's version as the driver library says it, and the kernel module's: ``13.0 (580.65.06)``; or ``none``."""
    parts = []
    with suppress(OSError, AttributeError):
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:  # the one call that needs no cuInit
            parts.append(f"{number.value // 1000}.{number.value % 1000 // 10}")
    with suppress(OSError, ValueError):
        parts.append(f"({_first_line('/sys/module/nvidia/version')})")
    return " ".join(parts) or "none"


def _first_line(path: str) -> str:
    """Of a short file. Without ``open(encoding="ascii")``, which imports a codec: a millisecond."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 256).decode("ascii").partition("\n")[0].strip()
    finally:
        os.close(descriptor)


def identity_parts(key: TuningKey) -> dict[str, Any]:
    """What an entry must agree in: format, key, environment. CannotBeWritten when the key is not."""
    return {"format": FORMAT, "key": key_parts(key), "environment": environment()}


def key_text(key: TuningKey) -> str | None:
    """Key and environment as one text, the same in every process that may share a ranking; None: not writable."""
    try:
        return canonical(identity_parts(key))
    except CannotBeWritten:
        return None


def file_name(key: TuningKey) -> str | None:
    """``<kernel>-<20 hex>.json``; None: the key cannot be written down."""
    text = key_text(key)
    return None if text is None else file_name_of(key, text)


def file_name_of(key: TuningKey, text: str) -> str:
    """The same; ``text`` is the key's :func:`key_text`."""
    kernel = key.kernel.partition("@")[0].rpartition(".")[2]
    return f"{slug(kernel)[:80] or 'kernel'}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def slug(text: str) -> str:
    """Only what is a plain part of a file name everywhere."""
    return _NOT_PLAIN.sub("_", text).lstrip(".")


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Each part in which ``found`` is not ``wanted``, by name and with both values."""
    here, today = dict(_leaves(found)), dict(_leaves(wanted))
    names = sorted(here.keys() | today.keys())
    return [
        f"{name} is {here.get(name, 'absent')[:80]}, today {today.get(name, 'absent')[:80]}"
        for name in names
        if here.get(name) != today.get(name)
    ]


def _leaves(parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in parts.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", canonical(value)
