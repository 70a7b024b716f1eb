"""How the engine sees an ``Autotuner``: a stock one, a subclass of it, or ours.

Everything the engine reads from or writes to the object goes through here, so that it keeps what stock promises.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton import knobs
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import AutotunerError

from smart_autotune.checks import base_function, innermost
from smart_autotune.hooks import ResetRestore
from smart_autotune.launch import Call
from smart_autotune.verdict import TAKEN_OVER, Outcome, TuningRecord

_STOCK_PRUNE = Autotuner.prune_configs


def kernel_name(fn: Any) -> str:
    """A kernel's name for logs and records."""
    return str(getattr(fn, "__name__", None) or base_function(fn).__name__)


class AutotunerView:
    """One ``Autotuner`` as the engine uses it. ``stock_run`` is what runs when ours cannot."""

    def __init__(self, autotuner: Any, stock_run: Callable[..., Any]) -> None:
        self.autotuner = autotuner
        self.kernel_name = kernel_name(autotuner.fn)
        self.stock_run = stock_run
        self._nargs_lock = threading.RLock()
        self.hooks = hooks = ResetRestore(self.kernel_name, autotuner.reset_to_zero, autotuner.restore_value)
        resets = bool(autotuner.reset_to_zero or autotuner.restore_value)
        # Whether launches are wrapped by nothing but stock's own reset and restore, which a tuning may do its own way.
        self.own_hooks = not (autotuner.user_defined_pre_hook or autotuner.user_defined_post_hook)
        # Stock's own reset and restore hooks fail on None and share one slot between threads.
        self.pre_hook = hooks.before if resets and not autotuner.user_defined_pre_hook else autotuner.pre_hook
        restores = bool(autotuner.restore_value) and not autotuner.user_defined_post_hook
        self.post_hook = hooks.after if restores else autotuner.post_hook

    @property
    def fn(self) -> Any:
        return self.autotuner.fn

    @property
    def configs(self) -> list[triton.Config]:
        found: list[triton.Config] = self.autotuner.configs
        return found

    @property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(self.autotuner.arg_names)

    @property
    def keys(self) -> list[str]:
        return list(self.autotuner.keys or ())

    @property
    def do_bench(self) -> Callable[..., Any]:
        bench: Callable[..., Any] = self.autotuner.do_bench
        return bench

    @property
    def benchmarks_as_default(self) -> bool:
        """Whether launches are to be timed by Triton's default benchmark on a CUDA device: then ours times them."""
        if self.autotuner._do_bench is not None:
            return False
        from triton.backends.nvidia.driver import CudaDriver

        return isinstance(triton.runtime.driver.active, CudaDriver)

    @property
    def source_identity(self) -> str:
        """The kernel's name and a hash of its source with everything it calls."""
        base = self.autotuner.base_fn
        digest = getattr(innermost(self.fn), "cache_key", "")
        return f"{base.__module__}.{base.__qualname__}@{str(digest)[:16]}"

    def heuristics_below(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Functions by argument name of the ``@triton.heuristics`` under this tuner."""
        found: dict[str, Callable[[dict[str, Any]], Any]] = {}
        fn = self.fn
        while fn is not None and not callable(getattr(fn, "cache_key", None)):
            if isinstance(fn, Heuristics):
                found = {**found, **fn.values}  # outer ones run first, inner ones override them
            fn = getattr(fn, "fn", None)
        return found

    def prune(self, call: Call) -> list[triton.Config]:
        """The author's own pruning; a subclass's ``prune_configs`` is asked with stock's one argument."""
        if type(self.autotuner).prune_configs is _STOCK_PRUNE:
            return prune(self.autotuner, self.kernel_name, call.nargs, call.all_kwargs)
        with self.calling(call):
            return list(self.autotuner.prune_configs(call.all_kwargs))

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """``autotuner.nargs`` is this call's for the scope. Stock has one for all threads, hence the lock."""
        with self._nargs_lock:
            before = getattr(self.autotuner, "nargs", None)
            self.autotuner.nargs = call.nargs
            try:
                yield
            finally:
                self.autotuner.nargs = before

    def remember(self, record: TuningRecord, best: triton.Config) -> None:
        """Puts a tuning's outcome where stock puts it."""
        tuner = self.autotuner
        tuner.cache[record.key] = best
        tuner.configs_timings = {
            verdict.config: _timings_ms(verdict.median_us, verdict.spread_us)
            for verdict in record.verdicts
            if verdict.outcome is not Outcome.PRUNED_BY_USER
        }
        tuner.bench_time = record.compile_secs + record.timing_secs  # stock's timing compiles too
        if knobs.autotuning.print and record.served_by not in TAKEN_OVER:
            sys.stdout.write(
                f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {record.key.describe()},\n"
                f"finished after {tuner.bench_time:.2f}s,\nbest config selected: {best};\n"
            )


def _timings_ms(median_us: float | None, spread_us: tuple[float, float] | None) -> list[float]:
    """Stock's three quantiles in milliseconds; what was not timed, or failed, is infinite there."""
    if median_us is None:
        return [math.inf] * 3
    low, high = spread_us or (median_us, median_us)
    return [median_us / 1e3, low / 1e3, high / 1e3]


def prune(autotuner: Any, kernel: str, nargs: dict[str, Any], kwargs: dict[str, Any]) -> list[triton.Config]:
    """Stock's pruning: the author's early prune, then the performance model's ``top_k`` (at least one is kept)."""
    kept: list[triton.Config] = autotuner.configs
    if autotuner.early_config_prune:
        kept = list(autotuner.early_config_prune(autotuner.configs, nargs, **kwargs) or ())
        if not kept:
            raise AutotunerError(
                f"No valid autotuner configs after pruning. {kernel}: `early_config_prune` dropped all "
                f"{len(autotuner.configs)} configs; it should return at least one config."
            )
    if autotuner.perf_model:
        top_k = autotuner.configs_top_k
        share = isinstance(top_k, float) and top_k <= 1.0
        count = max(1, int(len(autotuner.configs) * top_k) if share else int(top_k))
        if len(kept) > count:
            estimates = {c: autotuner.perf_model(**{**nargs, **kwargs, **c.all_kwargs()}) for c in kept}
            kept = sorted(estimates, key=lambda c: estimates[c])[:count]
    return kept
