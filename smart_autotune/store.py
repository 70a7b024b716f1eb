"""Tunings on disk, one JSON file a key: readable, shippable, safe to share; and never in the way of a launch.

Beside the entry ``NAME.json`` of a key that was tuned here lies ``NAME.call``: how its configs compile, one line as
:mod:`smart_autotune.recorder` writes it. Only audits read it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import triton

from smart_autotune import settings
from smart_autotune.entry import BadEntry, Stored, decode, encode
from smart_autotune.errors import one_line
from smart_autotune.identity import environment, file_name_of, key_text, slug
from smart_autotune.key import TuningKey
from smart_autotune.limits import DeviceLimits
from smart_autotune.once import warn_once
from smart_autotune.verdict import TuningRecord

__all__ = ["BadEntry", "Store", "Stored", "call_file", "current", "decode", "encode", "environment", "key_text"]

log = logging.getLogger("smart_autotune")

MOST_BYTES = 16 << 20  # of one entry: 1000 configs take about 0.5 MB
_AT_ONCE = 1 << 16
_SUBFOLDER = slug(f"triton-{triton.__version__}")
_STALE_SECS = 3600.0  # a temporary file this old has no writer any more


class Store:
    """The entries in one folder. Trouble with the disk is a miss, or a tuning not kept, with one warning."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._name = os.fspath(folder)

    @property
    def folder(self) -> Path:
        return Path(self._name)

    def path(self, key: TuningKey) -> Path | None:
        """Where the key's entry is, there or not; None: the key cannot be written down."""
        text = key_text(key)
        return None if text is None else Path(self._file(key, text))

    def _file(self, key: TuningKey, text: str) -> str:
        return os.path.join(self._name, _SUBFOLDER, file_name_of(key, text))

    def load(self, key: TuningKey, configs: Sequence[triton.Config], limits: DeviceLimits) -> Stored | None:
        """What is known of ``key``, on today's ``configs``. None: nothing that can be used."""
        text = key_text(key)
        if text is None:
            return None
        path = self._file(key, text)
        try:
            return decode(_read(path), key, configs, limits, text)
        except FileNotFoundError:
            return None
        except OSError as error:
            folder = os.path.dirname(path)
            about = path if os.access(folder, os.X_OK) else folder  # once for a folder that is closed to us
            warn_once(("unreadable", about), "%s cannot be read, so it is not used: %s", about, one_line(error))
        except (BadEntry, ValueError, RecursionError) as error:
            warn_once(("bad entry", path), "%s is not used: %s", path, one_line(error))
        return None

    def save(self, record: TuningRecord, complete: bool = True) -> bool:
        """Writes the key's entry in place of what was there. False, never an error, when the disk does not take it."""
        path = self.path(record.key)
        if path is None:
            log.debug("%s: the key [%s] cannot be written down", record.kernel, record.key.describe())
            return False
        text = json.dumps(encode(record, complete), indent=1, allow_nan=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text.encode("ascii"))
        except OSError as error:
            warn_once("unwritable", "%s: tunings of this process are not kept: %s", path, one_line(error))
            return False
        _remove_left_behind(path.parent)
        return True

    def save_call(self, key: TuningKey, line: str) -> None:
        """Writes how the key's configs compile beside its entry, in place of what was there. Never raises, as above."""
        entry = self.path(key)
        if entry is None:
            return
        path = call_file(entry)
        try:
            _write(path, line.encode("ascii") + b"\n")
        except OSError as error:
            text = "%s: calls of this process are not kept beside their tunings, so they cannot be audited: %s"
            warn_once("unwritable calls", text, path, one_line(error))


def call_file(entry: Path) -> Path:
    """Where the call of this entry is, there or not."""
    return entry.with_suffix(".call")


def current() -> Store | None:
    """The store that the settings name; None: nothing is kept."""
    configured = settings.current()
    if not configured.cache:
        return None
    folder = configured.cache_dir or os.path.join(_cache_home(), "smart_autotune")
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):
        warn_once("no home", "%s: there is no such home folder, so no tunings are kept or read", folder)
        return None
    return Store(folder)


def _cache_home() -> str:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return named if os.path.isabs(named) else "~/.cache"  # a relative one counts as unset (XDG base directories)


def _read(path: str) -> Any:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise BadEntry("not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe put there since: no wait
    try:
        data = bytearray()
        while len(data) <= MOST_BYTES and (piece := os.read(descriptor, _AT_ONCE)):
            data += piece
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise BadEntry(f"over {MOST_BYTES:,} bytes")
    return json.loads(data, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise BadEntry(f"holds {constant}")


def _write(path: Path, data: bytes) -> None:
    """All or nothing: a reader, or a writer that is killed, sees the former file or this one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@functools.cache
def _remove_left_behind(folder: Path) -> None:
    """Removes what killed writers left in ``folder``, once a process."""
    with suppress(OSError):
        for temporary in folder.glob(".*.tmp"):
            if time.time() - temporary.stat().st_mtime > _STALE_SECS:
                temporary.unlink(missing_ok=True)
