"""Times the candidates that fit, and ranks them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import triton

from smart_autotune import settings
from smart_autotune.errors import BadType, BadValue, is_sticky, not_ours, one_line
from smart_autotune.launch import Call
from smart_autotune.prefilter import Candidate, failed_after_compiling
from smart_autotune.verdict import Outcome, describe
from smart_autotune.view import AutotunerView

log = logging.getLogger("smart_autotune")

# Medians closer than this share are a tie, which the declared order decides: noise must not pick the numerics.
NEAR_TIE = 0.01
# Two tunings at once on one GPU would time each other. Re-entrant: a hook may launch a cold kernel.
_one_at_a_time = threading.RLock()


class Bench(Protocol):
    """``screen`` each candidate as it is ready, then ``finish`` all of them: those that fit come back timed."""

    def screen(self, candidate: Candidate) -> Candidate: ...

    def finish(self, candidates: Sequence[Candidate]) -> list[Candidate]: ...


@contextmanager
def opened(
    view: AutotunerView, call: Call, timed_call: Callable[..., Any] | None, deadline: float = float("inf")
) -> Iterator[Bench]:
    """The benchmark for one tuning: the author's ``do_bench`` where there is one, ours on a CUDA device."""
    if not view.benchmarks_as_default:
        yield AuthorsBench(view, call, timed_call, deadline)
        return
    from smart_autotune.gpu_bench import GpuTimer

    with ExitStack() as scope:
        timer = GpuTimer(deadline)
        scope.callback(timer.close)
        yield GpuBench(view, call, timed_call, timer, scope)


class AuthorsBench:
    """Asks ``do_bench`` (the author's, or a driver's other than CUDA's) about one candidate after the other."""

    def __init__(self, view: AutotunerView, call: Call, timed_call: Callable[..., Any] | None, deadline: float) -> None:
        self._view = view
        self._call = call
        self._timed_call = timed_call
        self._deadline = deadline

    def screen(self, candidate: Candidate) -> Candidate:
        return candidate

    def finish(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        with _one_at_a_time:
            return [self._timed(c) if is_open(c) else c for c in candidates]

    def _timed(self, candidate: Candidate) -> Candidate:
        if time.monotonic() >= self._deadline:
            return _out_of_budget(candidate)
        view, config = self._view, candidate.config
        log.debug("%s: now timing %s", view.kernel_name, describe(config))
        arguments = self._call.hook_arguments(config)
        try:
            with not_ours():
                launch = _launcher(view, self._call, config, self._timed_call)

                def timed() -> None:
                    if self._timed_call is None:
                        self._call.run_config_hook(config, arguments)
                    view.pre_hook(arguments)
                    try:
                        launch()
                    except BaseException as error:  # also an interrupt: what was copied is put back
                        view.post_hook(arguments, exception=error)
                        raise
                    view.post_hook(arguments, exception=None)

                quantiles_ms = view.do_bench(timed, quantiles=(0.5, 0.2, 0.8))
        except Exception as error:
            return _failed(view, candidate, error)
        return _measured(view, candidate, quantiles_ms)


class GpuBench:
    """Our own timing. ``scope`` ends with the tuning: then copies of restored tensors are put back and let go."""

    def __init__(
        self, view: AutotunerView, call: Call, timed_call: Callable[..., Any] | None, timer: Any, scope: ExitStack
    ) -> None:
        self._view = view
        self._call = call
        self._timed_call = timed_call
        self._timer = timer
        self._scope = scope
        self._put_back: Callable[[], None] | None = None
        self._runs: list[tuple[triton.Config, Any]] = []

    def screen(self, candidate: Candidate) -> Candidate:
        """The first samples of one candidate; its failure is its verdict."""
        log.debug("%s: now timing %s", self._view.kernel_name, describe(candidate.config))
        try:
            with _one_at_a_time, not_ours():
                run = self._run(candidate.config)
                self._timer.screen(run)
        except Exception as error:
            if not self._view.own_hooks:
                self._view.post_hook(self._call.hook_arguments(candidate.config), exception=error)
            return _failed(self._view, candidate, error)
        self._runs.append((candidate.config, run))
        return candidate

    def finish(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        known = [config for config, _ in self._runs]
        screened = [self.screen(c) if is_open(c) and not any(c.config is k for k in known) else c for c in candidates]
        with _one_at_a_time, not_ours():
            self._timer.decide([run for _, run in self._runs])
        return [self._with_time(candidate) for candidate in screened]

    def _with_time(self, candidate: Candidate) -> Candidate:
        run = next((run for config, run in self._runs if config is candidate.config), None)
        if run is None or not candidate.fits:
            return candidate
        verdict = replace(candidate.verdict, median_us=run.median_us, spread_us=run.spread_us)
        return replace(candidate, verdict=verdict)

    def _run(self, config: triton.Config) -> Any:
        from smart_autotune.gpu_bench import Run, in_graph

        view, arguments = self._view, self._call.hook_arguments(config)
        launch = _launcher(view, self._call, config, self._timed_call)

        def before() -> None:
            if self._timed_call is None:
                self._call.run_config_hook(config, arguments)
            if view.own_hooks:
                self._restore()
            else:
                view.pre_hook(arguments)

        def after() -> None:
            if not view.own_hooks:
                view.post_hook(arguments, exception=None)

        run = Run(launch, before, after)
        if settings.current().bench == "graph":
            try:
                return in_graph(run)
            except RuntimeError as error:
                log.warning("%s: not capturable, timed eagerly: %s", view.kernel_name, one_line(error))
        return run

    def _restore(self) -> None:
        if self._put_back is None:
            arguments = self._call.hook_arguments()
            self._put_back = self._scope.enter_context(self._view.hooks.saved(arguments))
        self._put_back()


def _launcher(
    view: AutotunerView, call: Call, config: triton.Config, timed_call: Callable[..., Any] | None
) -> Callable[[], Any]:
    """What is timed: the author's whole operation, or the launch without its hooks."""
    if timed_call is None:
        return lambda: call.run(config)
    operation = timed_call(dict(call.named), config)
    if not callable(operation):
        raise BadType(f"{view.kernel_name}: timed_call returned {type(operation).__name__}; allowed: a callable")
    found: Callable[[], Any] = operation
    return found


def is_open(candidate: Candidate) -> bool:
    """Fits, and is neither timed nor settled."""
    return candidate.fits and candidate.verdict.median_us is None and not candidate.verdict.detail


def _failed(view: AutotunerView, candidate: Candidate, error: Exception) -> Candidate:
    """The verdict of a candidate that failed while timed. Raises when the CUDA context is lost with it."""
    if is_sticky(error):
        log.error("%s: CUDA error while timing %s: nothing was kept", view.kernel_name, describe(candidate.config))
        raise error
    if isinstance(error, BadType):
        raise error
    return failed_after_compiling(candidate, error)


def _out_of_budget(candidate: Candidate) -> Candidate:
    return replace(candidate, verdict=replace(candidate.verdict, detail="SMART_AUTOTUNE_BUDGET_SECS was spent"))


def _measured(view: AutotunerView, candidate: Candidate, quantiles_ms: Any) -> Candidate:
    values = [quantiles_ms] if isinstance(quantiles_ms, (int, float)) else list(quantiles_ms or ())
    if not values or not all(isinstance(value, (int, float)) for value in values):
        raise BadType(f"{view.kernel_name}: do_bench returned {quantiles_ms!r}; allowed: milliseconds, or several")
    median = float(values[0]) * 1e3
    if not math.isfinite(median):
        verdict = replace(candidate.verdict, outcome=Outcome.LAUNCH_FAILED, detail=f"do_bench returned {values[0]}")
        return replace(candidate, verdict=verdict)
    spread = (float(values[1]) * 1e3, float(values[2]) * 1e3) if len(values) > 2 else None
    return replace(candidate, verdict=replace(candidate.verdict, median_us=median, spread_us=spread))


def representative(view: AutotunerView, call: Call, tune_args: Callable[..., Any] | None) -> Call:
    """The call to time: the live one, or with the arguments that ``tune_args`` puts in their place."""
    if tune_args is None:
        return call
    with not_ours():
        replacements = tune_args(dict(call.named))
    if not isinstance(replacements, dict):
        raise BadType(f"{view.kernel_name}: tune_args returned {type(replacements).__name__}; allowed: a dict by name")
    unknown = sorted(set(replacements) - set(call.arg_names))
    if unknown:
        known = ", ".join(call.arg_names)
        raise BadValue(f"{view.kernel_name}: tune_args replaces {unknown[0]!r}, not an argument; arguments: {known}")
    return call.replaced(replacements)


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The timed candidates best first, the winner marked; near ties go to the one declared first."""
    timed = [c for c in candidates if c.fits and c.verdict.median_us is not None]
    if not timed:
        return [c for c in candidates if c.verdict.outcome is Outcome.WON]  # the only one that fits: not timed
    by_time = sorted(timed, key=_median_us)
    limit_us = _median_us(by_time[0]) * (1 + NEAR_TIE)
    winner = next(c for c in timed if _median_us(c) < limit_us or c is by_time[0])
    ordered = [winner, *(c for c in by_time if c is not winner)]
    return [
        replace(c, verdict=replace(c.verdict, outcome=Outcome.WON if c is winner else Outcome.SLOWER)) for c in ordered
    ]


def _median_us(candidate: Candidate) -> float:
    assert candidate.verdict.median_us is not None
    return candidate.verdict.median_us
