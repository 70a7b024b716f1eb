"""What one launch goes through: key, ranking (known, tuned or served cold), the config that fits, the launch.

One engine for each ``Autotuner``; everything about one call lives in locals, so any number of threads may be in here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

from smart_autotune import capture, limits, prefilter, serving, settings
from smart_autotune.batch import BatchRule, BatchSpec
from smart_autotune.checks import defaults, innermost
from smart_autotune.errors import BadType, BadValue, NoConfigFits, is_ours, not_ours, one_line
from smart_autotune.history import Records
from smart_autotune.key import ArgumentBinder, KeyReader, TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.plan import Plans, Watched
from smart_autotune.plan_source import NOT_PLANNED
from smart_autotune.prefilter import Candidate
from smart_autotune.rankings import Rankings
from smart_autotune.serving import Ranking
from smart_autotune.tuning import Tuning, nothing_fits, over_limit
from smart_autotune.view import AutotunerView

log = logging.getLogger("smart_autotune")


class Engine:
    """Tuning and serving for one kernel."""

    not_planned = NOT_PLANNED  # what ``plans.launch`` returns when this call has to come through ``run``

    def __init__(
        self,
        view: AutotunerView,
        batch: BatchRule,
        tune_args: Callable[..., Any] | None = None,
        timed_call: Callable[..., Any] | None = None,
        lenient: bool = False,
    ) -> None:
        self.view = view
        self._lenient = lenient  # a stock kernel never promised us anything: what stock accepts is stock's to serve
        self.name = view.kernel_name
        self.records = Records(self.name)
        self._tuning = Tuning(view, batch, self.records, tune_args, timed_call)
        self._rankings = Rankings(self._tuning, self.records, timed_call is None, self._first_that_fits)
        self._keys = KeyReader(self.name, view.arg_names, view.keys, batch.part, view.heuristics_below())
        self._config_names = frozenset(name for config in view.configs for name in config.all_kwargs())
        self._bind = ArgumentBinder(view.arg_names, defaults(view.autotuner.base_fn), self._config_names)
        self._interpreted = type(innermost(view.fn)).__name__ == "InterpretedFunction"
        self.plans = Plans(view, batch)
        view.autotuner.cache = Watched(view.autotuner.cache, self.plans.clear)
        self._said: set[str] = set()
        self._refused_only: triton.Config | None = None

    # ---- one launch ----------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What replaces ``Autotuner.run``; what there is nothing to tune in goes straight through."""
        if settings.current().mode == "stock":
            return self.view.stock_run(*args, **kwargs)
        self._check_conflicts(kwargs)
        if self._interpreted:
            return self._run_interpreted(args, kwargs)
        if len(self.view.configs) == 1:
            return self._run_only_config(args, kwargs)
        return self.launch(args, kwargs)

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves one call from key to launch; a fault of our own becomes stock behaviour."""
        era = self.plans.era()
        try:
            call = self.call(args, kwargs)
            capturing = capture.is_capturing()
            device = current_limits()
            ranking = self._rankings.for_call(call, self._key(call, device), capturing, device)
            config = self._checked_config(call, ranking, capturing, device)
        except Exception as error:
            return self._fail_open(error, args, kwargs)
        if config is not None:
            kernel = self._start(call, config)
        else:
            config, kernel = self._start_first_accepted(call, ranking, device)
        if ranking.lasting:
            self.plans.learn(args, kwargs, config, kernel, era)
        return kernel

    def config_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> triton.Config:
        """The config a launch with these arguments would use now; tunes if that is allowed."""
        self._check_conflicts(kwargs)
        call = self.call(args, kwargs)
        if self._interpreted:
            return self.pruned(call)[0]
        device = current_limits()
        key = self._key(call, device)
        if len(self.view.configs) == 1:
            ranking = self._rankings.known(key) or Ranking(key, tuple(self.view.configs), "the only config")
        else:
            ranking = self._rankings.for_call(call, key, capture.is_capturing(), device)
        return self._first_that_fits(call, ranking, device)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        launch_kwargs = {"grid": kwargs.get("grid"), "warmup": kwargs.get("warmup", False)}
        own = {name: value for name, value in kwargs.items() if name not in launch_kwargs}
        return Call(self.view.fn, self.view.arg_names, tuple(args), own, launch_kwargs, self._bind(args, own))

    def _key(self, call: Call, device: DeviceLimits) -> TuningKey:
        return self._keys.read(call.named, self.view.source_identity, device)

    def pruned(self, call: Call) -> list[triton.Config]:
        """The configs that the author's own prune keeps for this call."""
        return self._tuning.pruned(call)[0]

    def _run_interpreted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """No device, nothing to time: the first config that the author's prune leaves."""
        call = self.call(args, kwargs)
        configs = self.view.configs
        return self._start(call, self.pruned(call)[0] if len(configs) > 1 else configs[0])

    def _run_only_config(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One config: stock's path; only where it does not fit, the rescue and the explanation."""
        config, era = self.view.configs[0], self.plans.era()
        if settings.current().shared_bytes_cap or config is self._refused_only:
            return self.launch(args, kwargs)
        self.view.autotuner.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.view.arg_names, args)), **kwargs, **config.all_kwargs()})
        try:
            kernel = self.view.fn.run(*args, **kwargs, **config.all_kwargs())
        except OutOfResources:
            self._refused_only = config
            return self.launch(args, kwargs)
        self.plans.learn(args, kwargs, config, kernel, era)
        return kernel

    def _check_conflicts(self, kwargs: Mapping[str, Any]) -> None:
        """A value that both the call and the configs give; stock's error types."""
        for config in self.view.configs if kwargs.keys() & self._config_names else ():
            for name in sorted(kwargs.keys() & config.all_kwargs().keys()):
                error = BadValue if name in config.kwargs else BadType
                raise error(
                    f"{self.name}: Conflicting meta-parameters: {name!r} was passed and the configs set it; "
                    f"multiple values are not allowed. Leave it out of the call"
                )

    # ---- which config --------------------------------------------------------------------------------------------

    def _checked_config(
        self, call: Call, ranking: Ranking, capturing: bool, device: DeviceLimits
    ) -> triton.Config | None:
        """The config, when this specialisation must be checked before the launch; None: its load is check enough."""
        if capturing or device.what_if or ranking.contested:
            return self._first_that_fits(call, ranking, device)
        return None

    def _first_that_fits(self, call: Call, ranking: Ranking, device: DeviceLimits) -> triton.Config:
        found, refused = serving.first_fitting(call, ranking.configs, device)
        for candidate in refused:
            self.records.refused(ranking, candidate.verdict)
        if refused:
            ranking.contested = True
        return (found or self._rescued(call, ranking, refused, device)).config

    def _rescued(self, call: Call, ranking: Ranking, refused: Sequence[Candidate], device: DeviceLimits) -> Candidate:
        def compile_here(configs: Sequence[triton.Config]) -> list[Candidate]:
            return [prefilter.compile_one(call, config, device) for config in configs]

        for candidate in prefilter.rescue([c.config for c in refused if over_limit(c)], compile_here):
            if candidate.fits:
                self.records.rescued(ranking.key, [candidate], refused)
                ranking.configs = (*ranking.configs, candidate.config)
                return candidate
        raise nothing_fits(self.name, ranking.key, refused, (), device)

    # ---- the launch ----------------------------------------------------------------------------------------------

    def _start(self, call: Call, config: triton.Config) -> Any:
        self.view.autotuner.best_config = config
        return call.start(config)

    def _start_first_accepted(self, call: Call, ranking: Ranking, device: DeviceLimits) -> tuple[triton.Config, Any]:
        """The best config, unless its load refuses this specialisation (other alignment, other need): then the next."""
        config = ranking.configs[0]
        try:
            with prefilter.quiet_assembler():  # a new specialisation compiles here
                return config, self._start(call, config)
        except NoConfigFits:
            raise
        except Exception as error:
            refused_by_load = isinstance(error, OutOfResources)
            if not refused_by_load and prefilter.compile_one(call, config, device).fits:
                raise  # it compiles: the launch itself failed
        ranking.contested = True
        config = self._first_that_fits(call, ranking, device)
        return config, self._start(call, config)

    def _fail_open(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._lenient and isinstance(error, (BadType, BadValue)):
            if one_line(error) not in self._said:
                self._said.add(one_line(error))
                log.warning("%s: stock Triton takes over: %s", self.name, one_line(error))
            return self.view.stock_run(*args, **kwargs)
        if not is_ours(error) or settings.current().strict:
            raise error
        if one_line(error) not in self._said:
            self._said.add(one_line(error))
            log.error("%s: stock Triton takes over: %s", self.name, one_line(error), exc_info=error)
        return self.view.stock_run(*args, **kwargs)


def stock_engine(autotuner: Any, stock_run: Callable[..., Any], batch: BatchSpec = "auto") -> Engine:
    """The engine of a stock ``Autotuner`` (or of a subclass that calls ``super().run``)."""
    view = AutotunerView(autotuner, stock_run)
    rule = BatchRule(view.kernel_name, view.arg_names, view.keys, batch, "pow2")
    return Engine(view, rule, lenient=True)


def current_limits() -> DeviceLimits:
    """The current device's limits. Without a driver (fake kernels) nothing is over a limit; a real launch says so."""
    try:
        driver = triton.runtime.driver.active
    except RuntimeError:
        return limits.UNKNOWN
    with not_ours():
        return limits.of_device(driver, driver.get_current_device())
