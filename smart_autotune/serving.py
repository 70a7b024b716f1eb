"""Serving without tuning: nearest bucket, first config that fits; and when tuning is not allowed at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton

from smart_autotune import settings
from smart_autotune.batch import batch_invariant
from smart_autotune.capture import relaxed
from smart_autotune.errors import BadType
from smart_autotune.key import TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate, compile_one, load_candidate
from smart_autotune.verdict import TuningRecord

log = logging.getLogger("smart_autotune")


FIRST_THAT_FITS = "first that fits"
FIRST_FIT_MODES = ("first_fit", "off")  # whatever was tuned before; "off" is not listed as cold either


@dataclass
class Ranking:
    """The configs that fit, best first. ``contested``: some specialisation of the key did not take the best one."""

    key: TuningKey
    configs: tuple[triton.Config, ...]
    origin: str  # "tuned" | "rescue" | "nearest …" | "first that fits"
    record: TuningRecord | None = None
    contested: bool = False
    lasting: bool = False  # serves the key's later calls too, so that a plan may be made of it
    refused: set[str] = field(default_factory=set)  # what was already said of this ranking in the log


_frozen = False


def freeze() -> None:
    """From here on nothing is tuned: cold keys are served by the nearest bucket or the first config that fits."""
    global _frozen
    _frozen = True
    settings.renew()


def thaw() -> None:
    """Allows tuning again."""
    global _frozen
    _frozen = False
    settings.renew()


def is_frozen() -> bool:
    return _frozen


def why_not_tune() -> str:
    """Why nothing may be tuned until somebody changes that; empty when tuning is allowed."""
    if _frozen:
        return "tuning is frozen"
    mode = settings.current().mode
    if mode != "tune":
        return f"SMART_AUTOTUNE_MODE={mode}"
    return "deterministic mode" if batch_invariant() else ""


@contextmanager
def warming_up() -> Iterator[None]:
    """Tunes everything met inside it, then freezes: for a server's warm-up. The end says what was covered."""
    thaw()
    try:
        yield
    finally:
        freeze()
        from smart_autotune.history import coverage

        log.info("warm-up is over, tuning is frozen: %s", coverage())


def nearest(key: TuningKey, tuned: Iterable[TuningKey], any_number: bool = False) -> TuningKey | None:
    """The tuned key that is equal in all but its batch bucket, and nearest in that by ratio; the larger of two as near.

    ``any_number``: the author's own int values may differ too (a raw length in the key), measured in the same way.
    """
    candidates = [other for other in tuned if _distance(key, other, any_number) is not None]
    return min(candidates, key=lambda other: _distance(key, other, any_number) or (0.0, 0), default=None)


def _distance(key: TuningKey, other: TuningKey, any_number: bool) -> tuple[float, int] | None:
    """Sum of the log2 ratios of the numbers that differ; None when anything else does."""
    if other[:2] != key[:2] or other.dtypes != key.dtypes or len(other.values) != len(key.values):
        return None
    if (other.batch is None) != (key.batch is None) or (key.batch and other.batch and key.batch[0] != other.batch[0]):
        return None
    total = _octaves(key.bucket or 1, other.bucket or 1)
    for (name, kind, mine), (their_name, their_kind, theirs) in zip(key.values, other.values):
        if (name, kind, mine) == (their_name, their_kind, theirs):
            continue
        if not (any_number and name == their_name and kind == their_kind == "int" and min(mine, theirs) >= 0):
            return None
        total += _octaves(mine + 1, theirs + 1)
    return total, -(other.bucket or 1)


def _octaves(one: int, other: int) -> float:
    return abs(math.log2(max(one, 1) / max(other, 1)))


def first_fitting(
    call: Call, configs: Sequence[triton.Config], limits: DeviceLimits
) -> tuple[Candidate | None, list[Candidate]]:
    """The first of ``configs`` whose compiled kernel fits and is loaded, and those that were refused before it.

    Compiled on the host and loaded under relaxed capture mode, so it is safe inside a capture; never launches.
    """
    refused: list[Candidate] = []
    for config in configs:
        candidate = compile_one(call, config, limits)
        if candidate.fits:
            with relaxed():
                candidate = load_candidate(candidate)
        if candidate.fits:
            return candidate, refused
        refused.append(candidate)
    return None, refused


def pretune(kernel: Any, calls: Iterable[Mapping[str, Any]]) -> int:
    """Tunes ``kernel`` for each of ``calls`` (argument dicts, ``grid`` included) before traffic; returns how many."""
    count = 0
    for count, call in enumerate(calls, 1):
        if not isinstance(call, Mapping):
            raise BadType(f"pretune: call {count - 1} is {type(call).__name__}; allowed: a dict of arguments by name")
        kernel.config_for(**call)
    return count
