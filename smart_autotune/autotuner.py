"""The decorator and the ``Autotuner`` it returns."""

from __future__ import annotations

import copy
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import triton
from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import AutotunerError, OutOfResources

from smart_autotune import settings
from smart_autotune.batch import BatchRule, BatchSpec, BucketSpec
from smart_autotune.checks import base_function, check_top_k, checked_configs, checked_names, defaults, innermost
from smart_autotune.engine import Engine
from smart_autotune.errors import BadType, BadValue
from smart_autotune.hooks import ResetRestore
from smart_autotune.key import TuningKey
from smart_autotune.launch import Call
from smart_autotune.verdict import TuningRecord

log = logging.getLogger("smart_autotune")

_calls = threading.local()  # .nargs: what stock calls ``nargs``, for each tuner this thread is inside of


class SmartAutotuner(Autotuner):  # type: ignore[misc]  # triton is untyped
    """A stock ``Autotuner`` whose choice is made by :class:`~smart_autotune.engine.Engine`.

    All of stock's attributes keep their types and their time of appearance. ``cache`` maps a
    :class:`~smart_autotune.key.TuningKey` (a tuple) to the best config; clearing it forgets what was tuned.
    """

    def __init__(
        self,
        fn: Any,
        arg_names: list[str],
        configs: Iterable[triton.Config],
        key: Iterable[str],
        reset_to_zero: Iterable[str] | None,
        restore_value: Iterable[str] | None,
        pre_hook: Callable[..., Any] | None = None,
        post_hook: Callable[..., Any] | None = None,
        prune_configs_by: dict[str, Any] | None = None,
        warmup: int | None = None,
        rep: int | None = None,
        use_cuda_graph: bool = False,
        do_bench: Callable[..., Any] | None = None,
        cache_results: bool = False,
        *,
        batch: BatchSpec = "auto",
        batch_buckets: BucketSpec = "pow2",
        tune_args: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
        timed_call: Callable[[Mapping[str, Any], triton.Config], Callable[[], Any]] | None = None,
        examples: Callable[[], Any] | None = None,
    ) -> None:
        name = getattr(fn, "__name__", None) or base_function(fn).__name__
        configs = checked_configs(configs)
        keys = checked_names(name, "key", key)
        reset = checked_names(name, "reset_to_zero", reset_to_zero)
        restore = checked_names(name, "restore_value", restore_value)
        check_top_k(name, prune_configs_by)
        for option, given in (("tune_args", tune_args), ("timed_call", timed_call), ("examples", examples)):
            if given is not None and not callable(given):
                raise BadType(f"{name}: {option} is {type(given).__name__}; allowed: a callable or None")
        super().__init__(
            fn, arg_names, configs, keys, reset, restore, pre_hook, post_hook, prune_configs_by, warmup, rep,
            use_cuda_graph, do_bench, cache_results,
        )  # fmt: skip
        if do_bench is not None:
            self._do_bench = do_bench  # stock forgets it when warmup= or rep= is given as well
        hooks = ResetRestore(name, reset, restore)
        if not self.user_defined_pre_hook and (reset or restore):
            self.pre_hook = hooks.before
        if not self.user_defined_post_hook and restore:
            self.post_hook = hooks.after
        self.kernel_name: str = name
        self.examples = examples
        self._tune_args = tune_args
        self._timed_call = timed_call
        self._batch_rule = BatchRule(name, arg_names, keys, batch, batch_buckets)
        self._interpreted = innermost(fn).__class__.__name__ == "InterpretedFunction"
        self._engine = self._new_engine()

    # ---- launching -------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches the config that fits and is fastest for this call; see ``Engine.launch``."""
        if settings.current().mode == "off":
            return self.stock_run(*args, **kwargs)
        if self._interpreted:
            return self._run_interpreted(args, kwargs)
        self._check_conflicts(kwargs)
        if len(self.configs) == 1:
            return self._run_only_config(args, kwargs)
        return self._engine.launch(args, kwargs)

    def config_for(self, *args: Any, **kwargs: Any) -> triton.Config:
        """The config that a launch with these arguments would use now; tunes first where that is allowed.

        Timing needs ``grid=`` among the keywords, unless the decorator was given ``timed_call``; without either, a
        cold key is answered with the first config that fits.
        """
        if self._interpreted:
            return self._engine_pruned(args, kwargs)[0]
        self._check_conflicts(kwargs)
        return self.configs[0] if len(self.configs) == 1 else self._engine.config_for(args, kwargs)

    def warmup(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Compiles every config that the author's prune keeps; returns what compiled, in order. Sets no winner.

        One config's failure does not end it; when all fail, the first failure is raised.
        """
        compiled, failures = [], []
        for config in self._engine_pruned(args, kwargs):
            try:
                compiled.append(self.fn.warmup(*args, **kwargs, **config.all_kwargs()))
            except Exception as error:
                log.debug("%s: warmup of %s failed", self.kernel_name, config, exc_info=True)
                failures.append(error)
        if failures and not compiled:
            raise failures[0]
        return compiled

    def stock_run(self, *args: Any, **kwargs: Any) -> Any:
        """Stock Triton's ``Autotuner.run``, untouched."""
        return super().run(*args, **kwargs)

    def _run_interpreted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """No device, nothing to time: the first config that the author's prune leaves."""
        call = self._engine.call(args, kwargs)
        with self.calling(call):
            config = self.prune_configs(kwargs)[0] if len(self.configs) > 1 else self.configs[0]
        self.best_config = config
        return call.start(config)

    def _run_only_config(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One config: stock's path, and only when it does not fit the engine's rescue and explanation."""
        if settings.current().shared_bytes_cap or self._engine.in_use:
            return self._engine.launch(args, kwargs)
        self.best_config = config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args)), **kwargs, **config.all_kwargs()})
        try:
            return self.fn.run(*args, **kwargs, **config.all_kwargs())
        except OutOfResources:
            return self._engine.launch(args, kwargs)

    def _engine_pruned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[triton.Config]:
        with self.calling(self._engine.call(args, kwargs)):
            return list(self.prune_configs(kwargs))

    def _check_conflicts(self, kwargs: Mapping[str, Any]) -> None:
        for config in self.configs:
            twice = kwargs.keys() & config.all_kwargs().keys()
            if twice:
                name = sorted(twice)[0]
                error = BadValue if name in config.kwargs else BadType
                raise error(
                    f"{self.kernel_name}: Conflicting meta-parameters: {name!r} was passed and the configs set it; "
                    f"multiple values are not allowed. Leave it out of the call"
                )

    # ---- what stock offers subclasses, without state shared by threads -----------------------------------------

    @property
    def nargs(self) -> dict[str, Any] | None:
        """This thread's current positional arguments by name (stock keeps one dict for all threads)."""
        found: dict[str, Any] | None = getattr(_calls, "nargs", {}).get(id(self))
        return found

    @nargs.setter
    def nargs(self, value: dict[str, Any] | None) -> None:
        if not hasattr(_calls, "nargs"):
            _calls.nargs = {}
        if value is None:
            _calls.nargs.pop(id(self), None)
        else:
            _calls.nargs[id(self)] = value

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """``nargs`` is this call's for the scope, whatever a hook launches meanwhile."""
        before = self.nargs
        self.nargs = call.nargs
        try:
            yield
        finally:
            self.nargs = before

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        """The author's own pruning, as stock does it: early prune, then the performance model's ``top_k``."""
        nargs = self.nargs or {}
        kept: list[triton.Config] = self.configs
        if self.early_config_prune:
            kept = list(self.early_config_prune(self.configs, nargs, **kwargs) or ())
            if not kept:
                raise AutotunerError(
                    f"No valid autotuner configs after pruning. {self.kernel_name}: `early_config_prune` dropped all "
                    f"{len(self.configs)} configs; it should return at least one config."
                )
        if self.perf_model:
            top_k = self.configs_top_k
            count = max(1, int(len(self.configs) * top_k)) if isinstance(top_k, float) else int(top_k)
            if len(kept) > count:
                estimates = {c: self.perf_model(**{**nargs, **kwargs, **c.all_kwargs()}) for c in kept}
                kept = sorted(estimates, key=lambda c: estimates[c])[:count]
        return kept

    # ---- records -----------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[TuningRecord]:
        """One record a tuned key, oldest first."""
        return list(self._engine.records)

    def cold_keys(self) -> list[TuningKey]:
        """Keys of this kernel that were served without having been tuned."""
        return list(self._engine.records.cold)

    def explain(self) -> str:
        """The last record as a table: each config's verdict, need and limit, time; then the keys served cold."""
        from smart_autotune import report

        return report.explain(self.kernel_name, self.records, self.cold_keys())

    def remember(self, record: TuningRecord, best: triton.Config) -> None:
        """Puts a tuning's outcome where stock puts it."""
        self.cache[record.key] = best
        timings = {}
        for verdict in record.verdicts:
            if verdict.median_us is not None:
                low, high = verdict.spread_us or (verdict.median_us, verdict.median_us)
                timings[verdict.config] = [verdict.median_us / 1e3, low / 1e3, high / 1e3]
            elif str(verdict.outcome) != "PRUNED_BY_USER":
                timings[verdict.config] = [math.inf] * 3
        self.configs_timings = timings
        self.bench_time = record.timing_secs
        if knobs.autotuning.print:
            sys.stdout.write(
                f"Triton autotuning for function {self.base_fn.__name__},\nwith key as {record.key.describe()},\n"
                f"finished after {self.bench_time:.2f}s,\nbest config selected: {best};\n"
            )

    @property
    def source_identity(self) -> str:
        """The kernel's name and a hash of its source with everything it calls."""
        base = self.base_fn
        digest = getattr(innermost(self.fn), "cache_key", "")
        return f"{base.__module__}.{base.__qualname__}@{str(digest)[:16]}"

    # ---- copies ------------------------------------------------------------------------------------------------

    def _new_engine(self) -> Engine:
        return Engine(self, self._batch_rule, defaults(self.base_fn), self._tune_args, self._timed_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> SmartAutotuner:
        twin: SmartAutotuner = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            shared = name in ("_engine", "_batch_rule", "fn", "base_fn")
            twin.__dict__[name] = value if shared else copy.deepcopy(value, memo)
        twin.cache = {}
        twin._engine = twin._new_engine()
        return twin


def smart_autotune(
    configs: Iterable[triton.Config],
    key: Iterable[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: Iterable[str] | None = None,
    restore_value: Iterable[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    batch: BatchSpec = "auto",
    batch_buckets: BucketSpec = "pow2",
    tune_args: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    timed_call: Callable[[Mapping[str, Any], triton.Config], Callable[[], Any]] | None = None,
    examples: Callable[[], Any] | None = None,
) -> Callable[[Any], SmartAutotuner]:
    """Decorates a ``@triton.jit`` kernel (or ``@triton.heuristics`` of one); replaces ``@triton.autotune``.

    The first twelve parameters are stock's, with stock's meaning. ``configs`` may be any iterable.

    batch: which number is the batch size. ``"auto"`` (an int argument with a batch-like name, else the first tensor's
        ``shape[0]``; off when ``key`` already holds such a value), an argument's name (an int's value or a tensor's
        ``shape[0]``), ``(name, dim)``, a function of the named arguments returning an int or None, or None for never.
    batch_buckets: how it is rounded up: ``"pow2"``, ascending ints, or a function int -> int.
    tune_args: function of the named arguments returning replacements by name, used only while timing.
    timed_call: function of (named arguments, config) returning the callable that is timed instead of the launch.
    examples: function returning argument dicts by example name (meta tensors do), for ``smart-autotune audit``.

    Raises TypeError or ValueError naming the kernel, the argument, what was given and what is allowed. Decorating
    touches no driver.
    """

    settings.current()  # a bad environment value is best found before the server serves
    configs = checked_configs(configs)

    def decorate(fn: Any) -> SmartAutotuner:
        if not hasattr(fn, "arg_names"):
            raise BadType(
                f"{getattr(fn, '__name__', fn)!r} is a {type(fn).__name__}; smart_autotune decorates kernels made by "
                f"@triton.jit (put it above that decorator)"
            )
        return SmartAutotuner(
            fn, fn.arg_names, configs, key, reset_to_zero, restore_value, pre_hook=pre_hook, post_hook=post_hook,
            prune_configs_by=prune_configs_by, warmup=warmup, rep=rep, use_cuda_graph=use_cuda_graph,
            do_bench=do_bench, cache_results=cache_results, batch=batch, batch_buckets=batch_buckets,
            tune_args=tune_args, timed_call=timed_call, examples=examples,
        )  # fmt: skip

    return decorate
