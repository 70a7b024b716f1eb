"""Serving without tuning: nearest bucket, first config that fits; and when tuning is not allowed at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton

from smart_autotune import settings
from smart_autotune.capture import relaxed
from smart_autotune.key import TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate, compile_one, load_candidate
from smart_autotune.verdict import TuningRecord

log = logging.getLogger("smart_autotune")


FIRST_THAT_FITS = "first that fits"


@dataclass
class Ranking:
    """The configs that fit, best first. ``contested``: some specialisation of the key did not take the best one."""

    key: TuningKey
    configs: tuple[triton.Config, ...]
    origin: str  # "tuned" | "rescue" | "nearest bucket …" | "first that fits"
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


def why_not_tune() -> str:
    """Why nothing may be tuned until somebody changes that; empty when tuning is allowed."""
    if _frozen:
        return "tuning is frozen"
    mode = settings.current().mode
    return "" if mode == "tune" else f"SMART_AUTOTUNE_MODE={mode}"


def nearest(key: TuningKey, tuned: Iterable[TuningKey]) -> TuningKey | None:
    """The tuned key equal in all but the bucket whose bucket is nearest by ratio; the larger of two as near."""
    if key.bucket is None:
        return None
    rest = key.rest
    neighbours = [other for other in tuned if other.bucket is not None and other.rest == rest]
    size = max(key.bucket, 1)

    def distance(other: TuningKey) -> tuple[float, int]:
        bucket = max(other.bucket or 1, 1)
        return abs(math.log2(bucket / size)), -bucket

    return min(neighbours, key=distance, default=None)


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


def arguments_of(calls: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise TypeError(f"pretune: call {index} is {type(call).__name__}; allowed: a dict of arguments by name")
        yield call


def pretune(kernel: Any, calls: Iterable[Mapping[str, Any]]) -> int:
    """Tunes ``kernel`` for each of ``calls`` (argument dicts, ``grid`` included) before traffic; returns how many."""
    count = 0
    for call in arguments_of(calls):
        kernel.config_for(**call)
        count += 1
    return count
