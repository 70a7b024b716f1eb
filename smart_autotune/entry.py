"""One tuning as JSON, and back. Entries are untrusted: what is odd about one is said by :class:`BadEntry`."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import triton

from smart_autotune import settings
from smart_autotune.identity import FORMAT, CannotBeWritten, canonical, differences, identity_parts, plain
from smart_autotune.key import TuningKey
from smart_autotune.limits import DeviceLimits
from smart_autotune.verdict import FITS, LAUNCH_OPTIONS, OVER_LIMIT, Outcome, TuningRecord, Verdict

COUNTS = ("need", "limit", "registers", "spill_bytes")
_TIMES = ("median_us", "compile_secs")
_UNITS = {"bytes": "shared_bytes", "columns": "tensor_columns", "threads": "threads"}  # and the limit in it


class BadEntry(Exception):
    """An entry that does not serve, and why."""


@dataclass(frozen=True)
class Stored:
    """An entry read back, on today's own config objects.

    ``verdicts``: in stored order (ranking first), only of configs that are still offered. ``complete`` False: written
    during a sweep that did not finish.
    """

    verdicts: tuple[Verdict, ...]
    complete: bool
    served_by: str


def encode(record: TuningRecord, complete: bool = True) -> dict[str, Any]:
    """The record as JSON, named parts first. CannotBeWritten when its key is not.

    Left out: verdicts that could not be read back (a config value without a lasting text, a fitting config whose need
    nobody knows). Hooks are not stored.
    """
    verdicts = (_encoded(verdict) for verdict in record.verdicts)
    return {
        **identity_parts(record.key),
        "kernel": record.kernel,
        "complete": complete,
        "served_by": record.served_by,
        "batch": record.batch,
        "notes": list(record.notes),
        "created": record.created,
        "compile_secs": record.compile_secs,
        "timing_secs": record.timing_secs,
        "verdicts": [verdict for verdict in verdicts if verdict is not None],
    }


def _encoded(verdict: Verdict) -> dict[str, Any] | None:
    times = [verdict.median_us, verdict.compile_secs, *(verdict.spread_us or ())]
    if (verdict.fits and verdict.need is None) or not all(time is None or 0 <= time < math.inf for time in times):
        return None
    try:
        config = encoded_config(verdict.config)
    except CannotBeWritten:
        return None
    known = {name: getattr(verdict, name) for name in (*COUNTS, "unit", *_TIMES)}
    found = {"config": config, "outcome": str(verdict.outcome), "detail": verdict.detail, **known}
    found["spread_us"] = None if verdict.spread_us is None else list(verdict.spread_us)
    return {name: value for name, value in found.items() if value not in (None, "")}


def encoded_config(config: triton.Config) -> dict[str, Any]:
    """A config's values and launch options, without its hook."""
    kwargs = {name: plain(value) for name, value in config.kwargs.items()}
    options = {name: plain(getattr(config, name)) for name in LAUNCH_OPTIONS}
    return {"kwargs": kwargs, **{name: value for name, value in options.items() if value is not None}}


def decode(
    entry: Any, key: TuningKey, configs: Sequence[triton.Config], limits: DeviceLimits, text: str | None = None
) -> Stored:
    """An entry on today's ``configs``. Raises BadEntry with the reason when it is not one of ``key``, here, today.

    ``text``: the key's :func:`~smart_autotune.identity.key_text`, where the caller has it already.
    """
    if not isinstance(entry, dict):
        raise BadEntry(f"a {type(entry).__name__}, not an object")
    _check_parts(entry, key, text)
    complete, served_by = _typed(entry, "complete", bool), _typed(entry, "served_by", str)
    offered = Offered(configs, rescued=served_by == "rescue" and settings.current().rescue)
    read = [_numbered(index, raw, limits) for index, raw in enumerate(_typed(entry, "verdicts", list))]
    if sum(fields["outcome"] is Outcome.WON for _, fields in read) > 1:
        raise BadEntry("more than one config WON")
    written = Counter(config for config, _ in read)
    found = []
    for config_text, fields in read:
        config = offered.find(config_text) if written[config_text] == 1 else None
        if config is not None:
            found.append(Verdict(config, **fields))
    return Stored(tuple(found), complete, served_by)


def _check_parts(entry: dict[str, Any], key: TuningKey, text: str | None) -> None:
    found = {name: entry.get(name) for name in ("format", "key", "environment")}
    if canonical_or_bad(found["format"]) != str(FORMAT):
        raise BadEntry(f"format {canonical_or_bad(found['format'])[:40]}, not {FORMAT}")
    try:
        if canonical_or_bad(found) == (text or canonical(identity_parts(key))):
            return
        wanted = identity_parts(key)
    except CannotBeWritten as error:
        raise BadEntry(f"today's key cannot be written down: {error}") from None
    raise BadEntry("; ".join(differences(found, wanted)[:5]) or "other key parts")


def canonical_or_bad(value: Any) -> str:
    try:
        return canonical(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadEntry(f"not JSON: {error}") from None


class Offered:
    """Today's configs by what can be written of them; where hooks alone tell two apart, neither is found."""

    def __init__(self, configs: Iterable[triton.Config], rescued: bool) -> None:
        self._by_text: dict[str, triton.Config | None] = {}
        configs = list(configs)
        self._add(configs)
        if rescued:
            known = set(self._by_text)
            self._add((twin for config in configs for twin in _with_fewer_stages(config)), known)

    def _add(self, configs: Iterable[triton.Config], known: Iterable[str] = ()) -> None:
        for config in configs:
            try:
                text = canonical(encoded_config(config))
            except CannotBeWritten:
                continue
            if text in known:
                continue
            other = self._by_text.setdefault(text, config)
            if other is not None and other.pre_hook != config.pre_hook:
                self._by_text[text] = None

    def find(self, text: str) -> triton.Config | None:
        return self._by_text.get(text)


def _with_fewer_stages(config: triton.Config) -> Iterable[triton.Config]:
    """What the rescue may have made of an offered config."""
    for stages in range(1, config.num_stages or 1):
        twin = copy.copy(config)
        twin.num_stages = stages
        yield twin


def _numbered(index: int, raw: Any, limits: DeviceLimits) -> tuple[str, dict[str, Any]]:
    try:
        return _verdict(raw, limits)
    except BadEntry as error:
        raise BadEntry(f"verdict {index}: {error}") from None


def _verdict(raw: Any, limits: DeviceLimits) -> tuple[str, dict[str, Any]]:
    """One stored verdict: its config's text and the other fields. Checked against itself and today's limits."""
    if not isinstance(raw, dict) or not isinstance(raw.get("config"), dict):
        raise BadEntry("no object with a config")
    text = canonical_or_bad(raw["config"])
    try:
        fields: dict[str, Any] = {"outcome": Outcome(raw.get("outcome"))}
    except (ValueError, TypeError):
        raise BadEntry(f"outcome {ascii(raw.get('outcome'))[:40]} is not known") from None
    fields["detail"] = _typed(raw, "detail", str) if "detail" in raw else ""
    fields["unit"] = _typed(raw, "unit", str) if "unit" in raw else None
    for name in COUNTS:
        if name in raw:
            fields[name] = _count(raw[name], name)
    for name in _TIMES:
        if name in raw:
            fields[name] = _time(raw[name], name)
    if "spread_us" in raw:
        spread = _typed(raw, "spread_us", list)
        if len(spread) != 2:
            raise BadEntry(f"spread_us of {len(spread)} values")
        fields["spread_us"] = (_time(spread[0], "spread_us"), _time(spread[1], "spread_us"))
    _check_need(fields, limits)
    return text, fields


def _check_need(fields: dict[str, Any], limits: DeviceLimits) -> None:
    outcome, need, unit = fields["outcome"], fields.get("need"), fields["unit"]
    if unit is not None and unit not in _UNITS:
        raise BadEntry(f"unit {ascii(unit)[:40]} is not known")
    if outcome in FITS:
        if need is None or unit is None:
            raise BadEntry(f"{outcome} without its need")
        today: int = getattr(limits, _UNITS[unit])
        if need > today:
            raise BadEntry(f"{outcome} with a need of {need} {unit}, over today's limit of {today}")
    elif outcome in OVER_LIMIT and (need is None or fields.get("limit") is None or need <= fields["limit"]):
        raise BadEntry(f"{outcome} without a need over its limit")


def _typed(raw: dict[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    if not isinstance(value, kind):
        raise BadEntry(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadEntry(f"{name} is {ascii(value)[:40]}, not a count")
    return value


def _time(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise BadEntry(f"{name} is {ascii(value)[:40]}, not a time")
    try:
        return float(value)
    except OverflowError:
        raise BadEntry(f"{name} is no time: too large") from None
