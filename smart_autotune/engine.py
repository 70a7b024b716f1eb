"""What one launch goes through: key, ranking (known, tuned or served cold), the config that fits, the launch.

The decorator owns one engine a kernel; everything about one call lives in locals, so any number of threads may be in
here at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import triton
from triton.runtime.errors import OutOfResources, PTXASError

from smart_autotune import bench, capture, limits, prefilter, serving, settings
from smart_autotune.agreement import SingleFlight
from smart_autotune.batch import BatchRule
from smart_autotune.errors import NoConfigFits, is_ours, mark_not_ours, not_ours, one_line
from smart_autotune.key import ArgumentBinder, KeyReader, TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate
from smart_autotune.records import Records, no_config_fits
from smart_autotune.serving import Ranking
from smart_autotune.store import through_stock_cache
from smart_autotune.verdict import OVER_LIMIT, Outcome, TuningRecord, Verdict

log = logging.getLogger("smart_autotune")

_here = threading.local()  # .tuning: how many tunings this thread is inside of


class Engine:
    """Tuning and serving for one kernel. ``tuner`` is the ``Autotuner`` it works for."""

    def __init__(
        self,
        tuner: Any,
        batch: BatchRule,
        defaults: Mapping[str, Any],
        tune_args: Callable[..., Any] | None = None,
        timed_call: Callable[..., Any] | None = None,
    ) -> None:
        self.tuner = tuner
        self.name: str = tuner.kernel_name
        self.batch = batch
        self.tune_args = tune_args
        self.timed_call = timed_call
        self.records = Records(self.name)
        self._keys = KeyReader(self.name, tuner.arg_names, tuner.keys, batch.part)
        provided = frozenset(name for config in tuner.configs for name in config.kwargs)
        self._bind = ArgumentBinder(tuner.arg_names, defaults, provided)
        self._flight = SingleFlight()
        self._rankings: dict[TuningKey, Ranking] = {}
        self._cold: dict[TuningKey, Ranking] = {}

    # ---- one launch --------------------------------------------------------------------------------------------

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves one call from key to launch; faults of our own become stock behaviour (see ``_fail_open``)."""
        try:
            call = self.call(args, kwargs)
            capturing = capture.is_capturing()
            device = self._device()
            ranking = self.ranking(call, capturing, device)
            config = self._checked_config(call, ranking, capturing, device)
        except Exception as error:
            return self._fail_open(error, args, kwargs)
        if config is not None:
            return self._start(call, config)
        return self._start_first_accepted(call, ranking, device)

    def config_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> triton.Config:
        """The config a launch with these arguments would use now; tunes if that is allowed."""
        call = self.call(args, kwargs)
        capturing = capture.is_capturing()
        device = self._device()
        ranking = self.ranking(call, capturing, device)
        return self._first_that_fits(call, ranking, device)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        launch_kwargs = {name: kwargs[name] for name in ("grid", "warmup") if name in kwargs}
        own = {name: value for name, value in kwargs.items() if name not in launch_kwargs}
        names = tuple(self.tuner.arg_names)
        return Call(self.tuner.fn, names, tuple(args), own, launch_kwargs, self._bind(args, own))

    def key(self, call: Call, device: DeviceLimits) -> TuningKey:
        return self._keys.read(call.named, self.tuner.source_identity, device)

    @property
    def in_use(self) -> bool:
        """Whether this engine has a ranking (for a one-config kernel: that its config had to be rescued)."""
        return bool(self._rankings)

    # ---- which ranking -----------------------------------------------------------------------------------------

    def ranking(self, call: Call, capturing: bool, device: DeviceLimits) -> Ranking:
        """The ranking that serves this call: known, or tuned now, or put together without tuning."""
        with not_ours():  # the user's batch(), bucket and key code
            key = self.key(call, device)
        known = self._known(key)
        if known is not None:
            return known
        reason = serving.why_not_tune(capturing) or self._why_not_time(call)
        if reason:
            return self._serve_cold(call, key, device, reason)
        if self._bucket_is_one_too_many(key):
            return self._serve_cold(call, key, device, "SMART_AUTOTUNE_MAX_BUCKETS buckets are tuned", cold=False)
        return self._tuned_by_one(call, key, device)

    def _known(self, key: TuningKey) -> Ranking | None:
        ranking = self._rankings.get(key)
        return ranking if ranking is not None and key in self.tuner.cache else None

    def _why_not_time(self, call: Call) -> str:
        if call.launch_kwargs.get("warmup"):
            return "this call only compiles"
        if call.launch_kwargs.get("grid") is None and self.timed_call is None:
            return "there is no grid to time a launch with"
        return ""

    def _bucket_is_one_too_many(self, key: TuningKey) -> bool:
        if key.batch is None:
            return False
        buckets = {known.batch for known in list(self._rankings) if known.rest == key.rest}
        return len(buckets) >= settings.current().max_buckets

    def _tuned_by_one(self, call: Call, key: TuningKey, device: DeviceLimits) -> Ranking:
        nested = getattr(_here, "tuning", 0) > 0
        with self._flight.claim(key, 0.0 if nested else settings.current().wait_secs) as mine:
            known = self._known(key)
            if known is not None:
                return known
            if not mine:
                reason = "a hook of its own tuning called it" if nested else "another thread is still tuning it"
                return self._serve_cold(call, key, device, reason)
            _here.tuning = getattr(_here, "tuning", 0) + 1
            try:
                return self._tune(call, key, device)
            finally:
                _here.tuning -= 1

    def _serve_cold(self, call: Call, key: TuningKey, device: DeviceLimits, reason: str, cold: bool = True) -> Ranking:
        served = self._cold.get(key)
        near = serving.nearest(key, list(self._rankings))
        if served is None or (near is not None and not served.origin.startswith("nearest")):
            if near is not None:
                served = Ranking(key, self._rankings[near].configs, f"nearest bucket {near.bucket}")
            else:
                served = Ranking(key, tuple(self._pruned(call)[0]), "first that fits")
                fitting = self._first_that_fits(call, served, device)
                served.configs = (fitting, *(c for c in served.configs if c is not fitting))
            self._cold[key] = served
        self.records.served_cold(key, served, reason, cold)
        return served

    # ---- tuning ------------------------------------------------------------------------------------------------

    def _tune(self, call: Call, key: TuningKey, device: DeviceLimits) -> Ranking:
        """User prune, compile all survivors, time what fits, rank; records and remembers the outcome."""
        kept, pruned = self._pruned(call)
        prepare = _current_device_setter()
        begin = time.monotonic()
        timed_as = bench.representative(self.tuner, call, self.tune_args)

        def compile_all(configs: Sequence[triton.Config]) -> list[Candidate]:
            return prefilter.compile_candidates(call, configs, device, prepare)

        candidates = compile_all(kept)
        origin = "tuned"
        if not any(candidate.fits for candidate in candidates):
            rescued = prefilter.rescue([c.config for c in candidates if _over(c)], compile_all)
            if not rescued:
                raise self._nothing_fits(key, candidates, pruned, device)
            origin = "rescue"
            self.records.rescued(key, rescued, candidates)
            candidates = [*rescued, *candidates]
        candidates = [prefilter.load_candidate(c) if c.fits else c for c in candidates]
        if timed_as is not call:
            fitting = [c.config for c in candidates if c.fits]
            prefilter.compile_candidates(timed_as, fitting, device, prepare)
        compiled = time.monotonic()
        candidates = self._timed(timed_as, key, candidates)
        timed = time.monotonic()
        ranked = bench.ranked(candidates)
        if not ranked:
            raise self._nothing_fits(key, candidates, pruned, device)
        record = self._record(key, ranked, candidates, pruned, origin, compiled - begin, timed - compiled)
        self._after_timing(call, ranked[0].config)
        return self._remember(record, tuple(c.config for c in ranked))

    def _pruned(self, call: Call) -> tuple[list[triton.Config], list[Verdict]]:
        """The configs the author's prune keeps, each once, and verdicts of those it dropped."""
        with not_ours(), self.tuner.calling(call):
            kept = list(self.tuner.prune_configs(call.all_kwargs))
        unique: list[triton.Config] = []
        for config in kept:
            if config not in unique:
                unique.append(config)
        dropped = [config for config in self.tuner.configs if config not in unique]
        return unique, [Verdict(config, Outcome.PRUNED_BY_USER) for config in dropped]

    def _timed(self, call: Call, key: TuningKey, candidates: Sequence[Candidate]) -> list[Candidate]:
        fitting = [c for c in candidates if c.fits]
        if len(fitting) == 1:  # nothing to compare it with
            only = replace(fitting[0], verdict=replace(fitting[0].verdict, outcome=Outcome.WON, detail="the only one"))
            return [only if c is fitting[0] else c for c in candidates]

        def timing(these: Sequence[Candidate]) -> list[Candidate]:
            with self.tuner.calling(call):
                return bench.time_candidates(self.tuner, call, these, self.timed_call)

        return through_stock_cache(self.tuner, key, candidates, timing)

    def _record(
        self, key: TuningKey, ranked: Sequence[Candidate], candidates: Sequence[Candidate],
        pruned: Sequence[Verdict], origin: str, compile_secs: float, timing_secs: float,
    ) -> TuningRecord:  # fmt: skip
        rest = [c.verdict for c in candidates if all(c.config is not best.config for best in ranked)]
        verdicts = (*(c.verdict for c in ranked), *rest, *pruned)
        off = self.batch.off_because()
        batch = f"off: {off}" if off else (f"{key.batch[0]} -> bucket {key.bucket}" if key.batch else "no batch found")
        return TuningRecord(self.name, key, verdicts, origin, compile_secs, timing_secs, batch)

    def _after_timing(self, call: Call, winner: triton.Config) -> None:
        """Stock resets ``reset_to_zero`` arguments once more before the winner's own launch."""
        with not_ours():
            self.tuner.pre_hook(call.hook_arguments(winner), reset_only=True)

    def _remember(self, record: TuningRecord, configs: tuple[triton.Config, ...]) -> Ranking:
        ranking = Ranking(record.key, configs, record.served_by, record)
        self._rankings[record.key] = ranking
        self._cold.pop(record.key, None)
        self.tuner.remember(record, configs[0])
        self.records.tuned(record)
        return ranking

    def _nothing_fits(
        self, key: TuningKey, candidates: Sequence[Candidate], pruned: Sequence[Verdict], device: DeviceLimits
    ) -> BaseException:
        """The error to raise: how close it was; or, when every config failed otherwise, the first failure itself."""
        verdicts = [c.verdict for c in candidates]
        first = next((c.error for c in candidates if c.error is not None), None)
        if first is not None and not any(_over(c) for c in candidates):
            log.error("%s: every config failed for %s: %s", self.name, key.describe(), one_line(first))
            mark_not_ours(first)
            return first
        return no_config_fits(self.name, key, verdicts, pruned, device)

    # ---- which config ------------------------------------------------------------------------------------------

    def _checked_config(
        self, call: Call, ranking: Ranking, capturing: bool, device: DeviceLimits
    ) -> triton.Config | None:
        """The config, when this specialisation must be checked before the launch; None: the load itself checks."""
        if capturing or device.what_if or ranking.contested:
            return self._first_that_fits(call, ranking, device)
        return None

    def _first_that_fits(self, call: Call, ranking: Ranking, device: DeviceLimits) -> triton.Config:
        found, refused = serving.first_fitting(call, ranking.configs, device)
        for candidate in refused:
            self.records.refused(ranking, candidate.verdict)
        if found is None:
            found = self._rescued(call, ranking, refused, device)
        if refused:
            ranking.contested = True
        return found.config

    def _rescued(self, call: Call, ranking: Ranking, refused: Sequence[Candidate], device: DeviceLimits) -> Candidate:
        over = [c.config for c in refused if _over(c)]

        def compile_here(configs: Sequence[triton.Config]) -> list[Candidate]:
            return [prefilter.compile_one(call, config, device) for config in configs]

        for candidate in prefilter.rescue(over, compile_here):
            if candidate.fits:
                self.records.rescued(ranking.key, [candidate], refused)
                ranking.configs = (*ranking.configs, candidate.config)
                return candidate
        raise self._nothing_fits(ranking.key, refused, (), device)

    # ---- the launch --------------------------------------------------------------------------------------------

    def _start(self, call: Call, config: triton.Config) -> Any:
        self.tuner.best_config = config
        return call.start(config)

    def _start_first_accepted(self, call: Call, ranking: Ranking, device: DeviceLimits) -> Any:
        """The best config, unless its load refuses this specialisation (other alignment, other need): then the next."""
        try:
            return self._start(call, ranking.configs[0])
        except (OutOfResources, PTXASError) as error:
            if isinstance(error, NoConfigFits):
                raise
            ranking.contested = True
        return self._start(call, self._first_that_fits(call, ranking, device))

    def _device(self) -> DeviceLimits:
        with not_ours():
            driver = triton.runtime.driver.active
            return limits.of_device(driver, driver.get_current_device())

    def _fail_open(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_ours(error) or settings.current().strict:
            raise error
        log.error("%s: internal error, stock Triton takes over: %s", self.name, one_line(error), exc_info=error)
        return self.tuner.stock_run(*args, **kwargs)


def _over(candidate: Candidate) -> bool:
    return candidate.verdict.outcome in OVER_LIMIT


def _current_device_setter() -> Callable[[], None]:
    driver = triton.runtime.driver.active
    choose = getattr(driver, "set_current_device", None)
    device = driver.get_current_device()
    return (lambda: choose(device)) if choose is not None else (lambda: None)
