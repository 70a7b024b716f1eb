"""The decorator and the ``Autotuner`` it returns."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner

from smart_autotune import settings
from smart_autotune.batch import BatchRule, BatchSpec, BucketSpec
from smart_autotune.checks import check_top_k, checked_configs, checked_names
from smart_autotune.engine import Engine
from smart_autotune.errors import BadType
from smart_autotune.key import TuningKey
from smart_autotune.plan_source import NOT_PLANNED
from smart_autotune.verdict import TuningRecord
from smart_autotune.view import AutotunerView, kernel_name, prune

log = logging.getLogger("smart_autotune")

_calls = threading.local()  # .nargs: what stock calls ``nargs``, for each tuner this thread is inside of


class SmartAutotuner(Autotuner):  # type: ignore[misc]  # triton is untyped
    """A stock ``Autotuner`` whose choice is made by :class:`~smart_autotune.engine.Engine`.

    All of stock's attributes keep their types and their time of appearance. ``cache`` maps a
    :class:`~smart_autotune.key.TuningKey` (a tuple) to the best config; clearing it forgets what was tuned.
    """

    _smart_autotune_native = True  # the patch of stock's class leaves ours alone

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
        name = kernel_name(fn)
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
        self.kernel_name: str = name
        self.examples = examples
        self._tune_args = tune_args
        self._timed_call = timed_call
        self._batch_rule = BatchRule(name, arg_names, keys, batch, batch_buckets)
        self._engine = self._new_engine()
        # Stock's own reset and restore hooks fail on None and share one slot between threads.
        self.pre_hook, self.post_hook = self._engine.view.pre_hook, self._engine.view.post_hook

    # ---- launching -------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches the config that fits and is fastest for this call; see ``Engine.run``."""
        kernel = self._engine.plans.launch(*args, **kwargs)
        return self._engine.run(args, kwargs) if kernel is NOT_PLANNED else kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """``kernel[grid](*args, **kwargs)``: ``grid`` is a tuple or a function of the named arguments."""
        if type(self).run is not SmartAutotuner.run or "run" in self.__dict__:
            return super().__getitem__(grid)  # type: ignore[no-any-return]
        engine = self._engine

        def launch(*args: Any, **kwargs: Any) -> Any:
            kernel = engine.plans.launch(*args, grid=grid, **kwargs)
            if kernel is not NOT_PLANNED:
                return kernel
            return self.run(*args, grid=grid, warmup=False, **kwargs)

        return launch

    def config_for(self, *args: Any, **kwargs: Any) -> triton.Config:
        """The config that a launch with these arguments would use now; tunes first where that is allowed.

        Timing needs ``grid=`` among the keywords, unless the decorator was given ``timed_call``; without either, a
        cold key is answered with the first config that fits.
        """
        return self._engine.config_for(args, kwargs)

    def warmup(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Compiles every config that the author's prune keeps; returns what compiled, in order. Sets no winner.

        One config's failure does not end it; when all fail, the first failure is raised.
        """
        compiled, failures = [], []
        for config in self._engine.pruned(self._engine.call(args, kwargs)):
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

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        """The author's own pruning, as stock does it (``nargs`` are this thread's)."""
        return prune(self, self.kernel_name, self.nargs or {}, kwargs)

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

    # ---- copies ------------------------------------------------------------------------------------------------

    def _new_engine(self) -> Engine:
        view = AutotunerView(self, self.stock_run)
        return Engine(view, self._batch_rule, self._tune_args, self._timed_call)

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
