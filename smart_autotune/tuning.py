"""One tuning, start to end: user prune, compile, judge, time, rank, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton

from smart_autotune import bench, prefilter
from smart_autotune.batch import BatchRule
from smart_autotune.errors import mark_not_ours, not_ours, one_line
from smart_autotune.history import Records, no_config_fits
from smart_autotune.key import TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate
from smart_autotune.store import through_stock_cache
from smart_autotune.verdict import OVER_LIMIT, Outcome, TuningRecord, Verdict
from smart_autotune.view import AutotunerView

log = logging.getLogger("smart_autotune")


class NotNow(Exception):
    """The key cannot be tuned at present; it is served without."""


@dataclass(frozen=True)
class Tuning:
    """What a kernel's tunings share: whom they work for and the author's say in how they are timed."""

    view: AutotunerView
    batch: BatchRule
    records: Records
    tune_args: Callable[..., Any] | None = None
    timed_call: Callable[..., Any] | None = None

    def run(self, call: Call, key: TuningKey, device: DeviceLimits) -> tuple[TuningRecord, tuple[triton.Config, ...]]:
        """Tunes ``key`` on ``call``: the record and the configs that fit, best first. Raises when none does."""
        kept, pruned = self.pruned(call)
        timed_as = bench.representative(self.view, call, self.tune_args)
        begin = time.monotonic()
        candidates, origin = self._compiled(call, key, kept, pruned, device)
        if (
            timed_as is not call
        ):  # another specialisation perhaps: compiled in parallel too, not one by one while timing
            fitting = [c.config for c in candidates if c.fits]
            prefilter.compile_candidates(timed_as, fitting, device, current_device_setter())
        compiled = time.monotonic()
        candidates = self._timed(timed_as, key, candidates)
        compile_secs, timing_secs = compiled - begin, time.monotonic() - compiled
        ranked = bench.ranked(candidates)
        if not ranked:
            if any(c.verdict.outcome is Outcome.OUT_OF_DEVICE_MEMORY for c in candidates):
                raise NotNow("there is no device memory to time anything in")
            raise nothing_fits(self.view.kernel_name, key, candidates, pruned, device)
        with not_ours():  # stock resets ``reset_to_zero`` arguments once more before the winner's own launch
            self.view.pre_hook(call.hook_arguments(ranked[0].config), reset_only=True)
        record = self._record(key, ranked, candidates, pruned, origin, compile_secs, timing_secs)
        return record, tuple(c.config for c in ranked)

    def pruned(self, call: Call) -> tuple[list[triton.Config], list[Verdict]]:
        """The configs the author's prune keeps, each once, and verdicts of those it dropped."""
        with not_ours():
            kept = self.view.prune(call)
        unique: list[triton.Config] = []
        for config in kept:
            if config not in unique:
                unique.append(config)
        dropped = [config for config in self.view.configs if config not in unique]
        return unique, [Verdict(config, Outcome.PRUNED_BY_USER) for config in dropped]

    def _compiled(
        self,
        call: Call,
        key: TuningKey,
        configs: Sequence[triton.Config],
        pruned: Sequence[Verdict],
        device: DeviceLimits,
    ) -> tuple[list[Candidate], str]:
        """All candidates compiled and judged, those that fit loaded; rescued ones where none fits."""
        prepare = current_device_setter()

        def compile_all(these: Sequence[triton.Config]) -> list[Candidate]:
            return prefilter.compile_candidates(call, these, device, prepare)

        candidates, origin = compile_all(configs), "tuned"
        if not any(candidate.fits for candidate in candidates):
            rescued = prefilter.rescue([c.config for c in candidates if over_limit(c)], compile_all)
            if not rescued:
                raise nothing_fits(self.view.kernel_name, key, candidates, pruned, device)
            self.records.rescued(key, rescued, candidates)
            candidates, origin = [*rescued, *candidates], "rescue"
        return [prefilter.load_candidate(c) if c.fits else c for c in candidates], origin

    def _timed(self, call: Call, key: TuningKey, candidates: Sequence[Candidate]) -> list[Candidate]:
        fitting = [c for c in candidates if c.fits]
        if len(fitting) == 1:  # nothing to compare it with
            only = replace(fitting[0].verdict, outcome=Outcome.WON, detail="the only one that fits: not timed")
            return [replace(c, verdict=only) if c is fitting[0] else c for c in candidates]

        def timing(these: Sequence[Candidate]) -> list[Candidate]:
            return bench.time_candidates(self.view, call, these, self.timed_call)

        return through_stock_cache(self.view.autotuner, self.view.kernel_name, key, candidates, timing)

    def _record(
        self,
        key: TuningKey,
        ranked: Sequence[Candidate],
        candidates: Sequence[Candidate],
        pruned: Sequence[Verdict],
        origin: str,
        compile_secs: float,
        timing_secs: float,
    ) -> TuningRecord:
        rest = [c.verdict for c in candidates if all(c.config is not best.config for best in ranked)]
        verdicts = (*(c.verdict for c in ranked), *rest, *pruned)
        off = self.batch.off_because()
        batch = f"off: {off}" if off else (f"{key.batch[0]} -> bucket {key.bucket}" if key.batch else "no batch found")
        return TuningRecord(self.view.kernel_name, key, verdicts, origin, compile_secs, timing_secs, batch)


def nothing_fits(
    kernel: str, key: TuningKey, candidates: Sequence[Candidate], pruned: Sequence[Verdict], device: DeviceLimits
) -> BaseException:
    """The error to raise: how close it was; or, when every config failed otherwise, the first failure itself."""
    first = next((c.error for c in candidates if c.error is not None), None)
    if first is not None and not any(over_limit(c) for c in candidates):
        log.error("%s: every config failed for [%s]: %s", kernel, key.describe(), one_line(first))
        mark_not_ours(first)
        return first
    return no_config_fits(kernel, key, [c.verdict for c in candidates], pruned, device)


def over_limit(candidate: Candidate) -> bool:
    return candidate.verdict.outcome in OVER_LIMIT


def current_device_setter() -> Callable[[], None]:
    """Makes this thread's device another thread's; does nothing where there is no driver."""
    try:
        driver = triton.runtime.driver.active
        choose, device = driver.set_current_device, driver.get_current_device()
    except (RuntimeError, AttributeError):
        return lambda: None
    return lambda: choose(device)
