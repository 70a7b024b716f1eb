"""The entries of a folder of kept tunings, read to be shown: of any kernel, device and Triton, whole or not."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from smart_autotune import store
from smart_autotune.cli.errors import BadArgument
from smart_autotune.entry import COUNTS
from smart_autotune.errors import one_line
from smart_autotune.identity import FORMAT
from smart_autotune.key import TuningKey
from smart_autotune.report import printable
from smart_autotune.settings import SettingsError
from smart_autotune.store import MOST_BYTES
from smart_autotune.verdict import LAUNCH_OPTIONS, Outcome, TuningRecord, Verdict


class Unreadable(ValueError):
    """A file that is no entry, and why."""


@dataclass(frozen=True)
class Entry:
    """One file of the folder. ``record``: None where it is no entry, and ``reason`` says why.

    ``size``: in bytes, with the recorded call beside it.
    """

    path: Path
    size: int
    modified: float
    record: TuningRecord | None
    complete: bool = False
    reason: str = ""
    environment: Mapping[str, str] | None = None

    @property
    def kernel(self) -> str:
        """The kernel's name; of a file that cannot be read, what its name says."""
        return self.record.kernel if self.record else printable(self.path.name.rpartition("-")[0] or self.path.stem)

    @property
    def age_secs(self) -> float:
        return max(0.0, time.time() - self.modified)


def folder(given: Path | None) -> Path:
    """``given``, or the folder that the settings name."""
    if given is not None:
        if not given.is_dir():
            raise BadArgument(f"{given} is not a folder")
        return given
    try:
        kept = store.current()
    except SettingsError as error:
        raise BadArgument(str(error)) from None
    if kept is None:
        raise BadArgument("nothing is kept here: SMART_AUTOTUNE_CACHE=0, or no home folder; name a folder")
    return kept.folder


def files(root: Path) -> list[Path]:
    """What may be an entry, in the folder itself or in those of each Triton version."""
    found = [path for pattern in ("*.json", "triton-*/*.json") for path in root.glob(pattern)]
    return sorted(path for path in found if not path.name.startswith("."))


def read_all(root: Path, patterns: Sequence[str] = ()) -> list[Entry]:
    """The entries whose kernel or file has one of the names (``*`` and ``?`` match). None given: all."""
    return [entry for entry in _entries(root) if not patterns or any(matches(entry, text) for text in patterns)]


def matches(entry: Entry, pattern: str) -> bool:
    names = [entry.kernel, entry.path.name]
    if entry.record is not None:
        names.append(entry.record.key.kernel.partition("@")[0])
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _entries(root: Path) -> Iterator[Entry]:
    for path in files(root):
        with suppress(FileNotFoundError):  # removed, or put in place anew, while we look
            yield read(path)


def read(path: Path) -> Entry:
    """One file, whatever it holds. FileNotFoundError when it has gone."""
    about = path.stat()
    size = about.st_size
    with suppress(OSError):
        size += store.call_file(path).stat().st_size
    try:
        raw = _json(path, about)
        record, complete = _record(raw)
    except FileNotFoundError:
        raise
    except (Unreadable, OSError, ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, Unreadable) else one_line(error)
        return Entry(path, size, about.st_mtime, None, reason=printable(reason))
    environment = raw.get("environment")
    found = {str(k): printable(str(v)) for k, v in environment.items()} if isinstance(environment, dict) else {}
    return Entry(path, size, about.st_mtime, record, complete, environment=found)


def _json(path: Path, about: os.stat_result) -> Any:
    if not stat.S_ISREG(about.st_mode):
        raise Unreadable("not a regular file")
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Unreadable(f"over {MOST_BYTES:,} bytes")
    raw = json.loads(data)
    if not isinstance(raw, dict) or "verdicts" not in raw or "key" not in raw:
        raise Unreadable("not a kept tuning")
    if raw.get("format") != FORMAT:
        raise Unreadable(f"format {ascii(raw.get('format'))[:20]}, not {FORMAT}")
    return raw


def _record(raw: Mapping[str, Any]) -> tuple[TuningRecord, bool]:
    verdicts = raw["verdicts"]
    if not isinstance(verdicts, list):
        raise Unreadable("its verdicts are no list")
    record = TuningRecord(
        kernel=_text(raw.get("kernel")) or "?",
        key=_key(raw["key"]),
        verdicts=tuple(_verdict(verdict) for verdict in verdicts),
        served_by=_text(raw.get("served_by")) or "?",
        compile_secs=_number(raw.get("compile_secs")) or 0.0,
        timing_secs=_number(raw.get("timing_secs")) or 0.0,
        batch=_text(raw.get("batch")),
        notes=tuple(_text(note) for note in _list(raw.get("notes"))),
        created=_number(raw.get("created")) or 0.0,
    )
    return record, raw.get("complete") is True


def _key(raw: Any) -> TuningKey:
    if not isinstance(raw, dict):
        raise Unreadable("its key is no object")
    values = [(name, _list(pair)) for name, pair in _object(raw.get("values")).items()]
    batch = _list(raw.get("batch"))
    return TuningKey(
        kernel=f"{_text(raw.get('kernel'))}@{_text(raw.get('source'))}",
        device=tuple((printable(name), _shown(value)) for name, value in _object(raw.get("device")).items()),
        values=tuple((printable(n), _text(p[0] if p else ""), _shown(p[1] if len(p) > 1 else None)) for n, p in values),
        dtypes=tuple((printable(name), _text(dtype)) for name, dtype in _object(raw.get("dtypes")).items()),
        batch=(_text(batch[0]), batch[1]) if len(batch) == 2 and isinstance(batch[1], int) else None,
    )


def _verdict(raw: Any) -> Verdict:
    config = _object(_object(raw).get("config"))
    options = {name: config[name] for name in LAUNCH_OPTIONS if type(config.get(name)) in (int, str)}
    values = {printable(name): _shown(value) for name, value in _object(config.get("kwargs")).items()}
    try:
        outcome = Outcome(raw.get("outcome"))
    except (ValueError, TypeError):
        raise Unreadable(f"outcome {ascii(raw.get('outcome'))[:40]} is not known") from None
    spread = [_number(value) for value in _list(raw.get("spread_us"))]
    low, high = spread if len(spread) == 2 else (None, None)
    counts = {name: raw[name] if type(raw.get(name)) is int else None for name in COUNTS}
    return Verdict(
        triton.Config(values, **options),
        outcome,
        unit=_text(raw.get("unit")) or None,
        detail=_text(raw.get("detail")),
        median_us=_number(raw.get("median_us")),
        spread_us=None if low is None or high is None else (low, high),
        compile_secs=_number(raw.get("compile_secs")),
        **counts,
    )


def _shown(value: Any) -> Any:
    """A stored value for people: ``{"float": "0.5"}`` is 0.5."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    if isinstance(value, str):
        return printable(value)
    return value if value is None or isinstance(value, (bool, int)) else printable(json.dumps(value))


def _object(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Unreadable(f"a {type(value).__name__} where an object is expected")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return printable(value) if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e18 or not math.isfinite(value):
        return None
    return float(value)


def age(secs: float) -> str:
    """An age in its largest whole unit: ``3 d``, ``5 h``, ``12 min``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if secs >= length:
            return f"{secs // length:.0f} {unit}"
    return f"{secs:.0f} s"
