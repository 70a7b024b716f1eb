"""One tuning, start to end: user prune, compile, judge, time, rank, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import triton

from smart_autotune import bench, prefilter, recorder, settings
from smart_autotune.batch import BatchRule
from smart_autotune.errors import mark_not_ours, not_ours, one_line
from smart_autotune.history import Records, no_config_fits
from smart_autotune.key import TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate
from smart_autotune.progress import watching
from smart_autotune.stock_cache import through_stock_cache
from smart_autotune.verdict import OVER_LIMIT, Outcome, TuningRecord, Verdict, describe, distinct, without
from smart_autotune.view import AutotunerView

log = logging.getLogger("smart_autotune")


LATE = "not compiled within SMART_AUTOTUNE_BUDGET_SECS"
MARGIN = 1.1  # for noise, where growth with the batch bounds what a config can do
CLEARLY_SLOWER = 1.5  # times the winner, in two neighbouring buckets: not worth a look in between


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

    def run(
        self,
        call: Call,
        key: TuningKey,
        device: DeviceLimits,
        settled: Sequence[Verdict] = (),
        checkpoint: Callable[[TuningRecord], None] = lambda record: None,
    ) -> TuningRecord:
        """Tunes ``key`` on ``call``. Raises when no config fits.

        ``settled``: verdicts that need no finding out (stored ones, what neighbouring buckets make clear).
        ``checkpoint`` gets what is known so far, every few seconds of a long sweep.
        """
        kept, pruned = self.pruned(call)
        timed_as = bench.representative(self.view, call, self.tune_args)
        notes = () if self.tune_args else self._degenerate_lengths(call)
        begin = time.monotonic()
        deadline = begin + (settings.current().budget_secs or float("inf"))
        with bench.opened(self.view, timed_as, self.timed_call, deadline) as timing:
            sweep = Sweep(self, call, timed_as, key, device, timing, deadline, checkpoint)
            candidates, origin = sweep.compiled(kept, settled, pruned)
            compiled = time.monotonic()
            candidates = self._timed(timing, key, candidates)
        compile_secs, timing_secs = compiled - begin, time.monotonic() - compiled
        ranked = bench.ranked(candidates)
        if not ranked:
            self._raise_nothing_ranked(key, candidates, pruned, device)
        with not_ours():  # stock resets ``reset_to_zero`` arguments once more before the winner's own launch
            self.view.pre_hook(call.hook_arguments(ranked[0].config), reset_only=True)
        record = self._record(key, ranked, candidates, pruned, origin, compile_secs, timing_secs)
        return replace(record, notes=notes)

    def _degenerate_lengths(self, call: Call) -> tuple[str, ...]:
        """A warning, once a kernel, where what looks like lengths is 1 or 0 throughout: a warm-up's dummy input."""
        found = [name for name, value in call.named.items() if _is_degenerate_length(name, value)]
        if not found:
            return ()
        note = f"tuned while {', '.join(found)} held only 0 or 1: a warm-up's dummy input? give tune_args="
        self.records.warn_once(note)
        return (note,)

    def _raise_nothing_ranked(
        self, key: TuningKey, candidates: Sequence[Candidate], pruned: Sequence[Verdict], device: DeviceLimits
    ) -> NoReturn:
        if any(c.verdict.outcome is Outcome.OUT_OF_DEVICE_MEMORY for c in candidates):
            raise NotNow("there is no device memory to time anything in")
        if any(c.fits for c in candidates):
            raise NotNow("SMART_AUTOTUNE_BUDGET_SECS was spent before anything was timed")
        raise nothing_fits(self.view.kernel_name, key, candidates, pruned, device)

    def pruned(self, call: Call) -> tuple[list[triton.Config], list[Verdict]]:
        """The configs the author's prune keeps, each once, and verdicts of those it dropped."""
        with not_ours():
            kept = self.view.prune(call)
        unique = distinct(kept)
        dropped = without(self.view.configs, unique)
        recorder.met(self.view, self.batch, call, unique)
        return unique, [Verdict(config, Outcome.PRUNED_BY_USER) for config in dropped]

    def _timed(self, timing: bench.Bench, key: TuningKey, candidates: Sequence[Candidate]) -> list[Candidate]:
        open_ones = [c for c in candidates if bench.is_open(c)]
        if len(open_ones) == 1 and sum(c.fits for c in candidates) == 1:  # nothing to compare it with
            only = replace(open_ones[0].verdict, outcome=Outcome.WON, detail="the only one that fits: not timed")
            return [replace(c, verdict=only) if c is open_ones[0] else c for c in candidates]
        if not open_ones:
            return list(candidates)
        return through_stock_cache(self.view.autotuner, self.view.kernel_name, key, candidates, timing.finish)

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


@dataclass(frozen=True)
class Sweep:
    """One tuning's way through its candidates: compiled in parallel, judged, loaded, sampled as they are ready."""

    tuning: Tuning
    call: Call
    timed_as: Call
    key: TuningKey
    device: DeviceLimits
    timing: bench.Bench
    deadline: float
    checkpoint: Callable[[TuningRecord], None]

    def compiled(
        self, configs: Sequence[triton.Config], settled: Sequence[Verdict], pruned: Sequence[Verdict]
    ) -> tuple[list[Candidate], str]:
        """All candidates in declared order, those that fit loaded; rescued ones first where none fits."""
        known = {
            index: verdict for index, config in enumerate(configs) for verdict in settled if verdict.config == config
        }
        candidates = self._compile(configs, known)
        if known and not any(candidate.fits and can_win(candidate) for candidate in candidates):
            candidates = self._compile(configs, {})  # what was settled elsewhere leaves nothing to choose here
        if any(candidate.fits for candidate in candidates):
            return candidates, "tuned"
        over = [c.config for c in candidates if over_limit(c)]
        rescued = prefilter.rescue(over, lambda fewer: self._compile(fewer, {}))
        if not rescued:
            raise nothing_fits(self.tuning.view.kernel_name, self.key, candidates, pruned, self.device)
        self.tuning.records.rescued(self.key, rescued, candidates)
        return [*rescued, *candidates], "rescue"

    def _compile(self, configs: Sequence[triton.Config], known: Mapping[int, Verdict]) -> list[Candidate]:
        candidates = {index: Candidate(configs[index], verdict) for index, verdict in known.items()}
        rest = [index for index in range(len(configs)) if index not in candidates]
        alone = len(configs) == 1 or self.tuning.view.autotuner.cache_results
        with watching(self.tuning.view.kernel_name, len(rest)) as watch:
            for position, ready in prefilter.compiling(
                self.call,
                [configs[i] for i in rest],
                self.device,
                current_device_setter(),
                self.timed_as,
                self.deadline,
            ):
                candidate = prefilter.load_candidate(ready) if ready.fits else ready
                if candidate.fits and not alone:
                    candidate = self.timing.screen(candidate)
                candidates[rest[position]] = candidate
                if watch.is_due(describe(candidate.config)):
                    so_far = tuple(candidates[index].verdict for index in sorted(candidates))
                    self.checkpoint(TuningRecord(self.tuning.view.kernel_name, self.key, so_far, "unfinished"))
        return [
            candidates.get(index) or Candidate(config, Verdict(config, Outcome.COMPILE_TIMEOUT, detail=LATE))
            for index, config in enumerate(configs)
        ]


def order_of(record: TuningRecord) -> tuple[triton.Config, ...]:
    """The configs of a record that fit: the ranking, then what was not timed."""
    timed = [v.config for v in record.verdicts if v.outcome in (Outcome.WON, Outcome.SLOWER)]
    return (*timed, *(v.config for v in record.verdicts if v.outcome is Outcome.NOT_TIMED))


def settled_by(bucket: int | None, neighbours: Sequence[TuningRecord]) -> list[Verdict]:
    """What the tunings of neighbouring buckets settle for ``bucket``: who failed to compile, who cannot win.

    ``neighbours``: the nearest smaller and the nearest larger bucket's records, as far as there are any. A kernel's
    time grows with the batch, and at most in proportion to it. So a config slower than a neighbour's winner by more
    than the ratio of the two buckets cannot win here; clearly slower on both sides, it will not.
    """
    settled: list[Verdict] = []
    slower: list[list[triton.Config]] = []
    for record in neighbours:
        here = f"in bucket {record.key.bucket}"
        failed = (Outcome.COMPILE_FAILED, Outcome.ASSEMBLER_FAILED, Outcome.COMPILE_TIMEOUT)
        settled += [
            replace(v, detail=f"{v.detail} ({here})")
            for v in record.verdicts
            if v.outcome in failed and v.detail != LATE
        ]
        slower.append(_slower_by(CLEARLY_SLOWER, record))
        ratio = max(bucket or 1, record.key.bucket or 1) / max(1, min(bucket or 1, record.key.bucket or 1))
        cannot = _slower_by(ratio * MARGIN, record)
        settled += [Verdict(config, Outcome.NOT_TIMED, detail=f"cannot win: too slow {here}") for config in cannot]
    if len(neighbours) == 2:
        both = [config for config in slower[0] if config in slower[1]]
        detail = f"clearly slower in buckets {neighbours[0].key.bucket} and {neighbours[1].key.bucket}: not timed"
        settled += [Verdict(config, Outcome.NOT_TIMED, detail=detail) for config in both]
    return settled


def _slower_by(factor: float, record: TuningRecord) -> list[triton.Config]:
    best_us = record.winner.median_us if record.winner else None
    if best_us is None:
        return []
    return [v.config for v in record.verdicts if v.median_us is not None and v.median_us > factor * best_us]


def nothing_fits(
    kernel: str, key: TuningKey, candidates: Sequence[Candidate], pruned: Sequence[Verdict], device: DeviceLimits
) -> BaseException:
    """The error to raise: how close it was; or, when every config failed otherwise, the first failure itself."""
    recorder.nothing_fits(kernel, key, [*(c.verdict for c in candidates), *pruned])
    first = next((c.error for c in candidates if c.error is not None), None)
    if first is not None and not any(over_limit(c) for c in candidates):
        log.error("%s: every config failed for [%s]: %s", kernel, key.describe(), one_line(first))
        mark_not_ours(first)
        return first
    error = no_config_fits(kernel, key, [c.verdict for c in candidates], pruned, device)
    error.__cause__ = first
    return error


def _is_degenerate_length(name: str, value: Any) -> bool:
    looks_like_lengths = any(fragment in name.lower() for fragment in ("len", "num_tokens", "seqused"))
    if not looks_like_lengths or "prefix" in name.lower():  # cached prefixes are empty in real calls, too
        return False
    if str(getattr(value, "dtype", "")) != "torch.int32":
        return False
    if value.dim() != 1 or not 0 < value.numel() <= 1 << 16 or value.is_meta:
        return False
    return bool((value == value[0]).all()) and int(value[0]) in (0, 1)


def can_win(candidate: Candidate) -> bool:
    return candidate.verdict.median_us is not None or bench.is_open(candidate)


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
