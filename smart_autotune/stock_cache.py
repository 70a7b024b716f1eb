"""Stock's own results cache, for kernels that ask for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from smart_autotune.errors import one_line
from smart_autotune.key import TuningKey
from smart_autotune.prefilter import Candidate

log = logging.getLogger("smart_autotune")
Timing = Callable[[Sequence[Candidate]], list[Candidate]]


def through_stock_cache(
    tuner: Any, kernel: str, key: TuningKey, candidates: Sequence[Candidate], timing: Timing
) -> list[Candidate]:
    """``cache_results=True`` (or ``TRITON_CACHE_AUTOTUNING=1``): timings from stock's disk entry, else timed now.

    The key holds the device's limits, so entries are not shared between caps. Anything odd about the entry is a miss
    with one warning.
    """
    configs = [candidate.config for candidate in candidates if candidate.fits]
    if not tuner.cache_results or any(config.pre_hook for config in configs):
        return timing(candidates)
    done: list[Candidate] = []
    failure: list[Exception] = []

    def time_them() -> None:
        try:
            done.extend(timing(candidates))
        except Exception as error:
            failure.append(error)
            raise
        tuner.configs_timings = {c.config: _stock_timings(c) for c in done if c.verdict.median_us is not None}

    try:
        if tuner.check_disk_cache(key, configs, time_them):
            return _restored(candidates, tuner.configs_timings)
    except Exception as error:
        if failure:
            raise
        what = "timings were not written to" if done else "timings are not usable from"
        log.warning("%s: %s Triton's cache: %s", kernel, what, one_line(error))
    return done or timing(candidates)


def _restored(candidates: Sequence[Candidate], timings: dict[Any, Any]) -> list[Candidate]:
    """The entry's timings on our own candidates (restored configs are copies without hooks)."""
    found = []
    for candidate in candidates:
        quantiles_ms = timings.get(candidate.config) if candidate.fits else None
        if quantiles_ms is not None:
            median, low, high = (float(value) * 1e3 for value in quantiles_ms)
            if not 0.0 <= median < math.inf:
                raise ValueError(f"a time of {median / 1e3} ms")
            verdict = replace(candidate.verdict, median_us=median, spread_us=(low, high), detail="from Triton's cache")
            candidate = replace(candidate, verdict=verdict)
        found.append(candidate)
    if not any(candidate.verdict.median_us is not None for candidate in found):
        raise ValueError("the entry has none of today's configs")
    return found


def _stock_timings(candidate: Candidate) -> list[float]:
    verdict = candidate.verdict
    median = verdict.median_us or 0.0
    low, high = verdict.spread_us or (median, median)
    return [median / 1e3, low / 1e3, high / 1e3]
