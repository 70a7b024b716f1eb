"""Times the candidates that fit."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import triton

from smart_autotune.errors import BadType, BadValue, bare, is_sticky, not_ours
from smart_autotune.launch import Call
from smart_autotune.prefilter import Candidate, classify_failure
from smart_autotune.verdict import Outcome, describe
from smart_autotune.view import AutotunerView

log = logging.getLogger("smart_autotune")

# Medians closer than this share are a tie, which the declared order decides: noise must not pick the numerics.
NEAR_TIE = 0.01
# Two tunings at once on one GPU would time each other. Re-entrant: a hook may launch a cold kernel.
_one_at_a_time = threading.RLock()


def time_candidates(
    view: AutotunerView, call: Call, candidates: Sequence[Candidate], timed_call: Callable[..., Any] | None
) -> list[Candidate]:
    """Each fitting candidate with its median and 20/80 % quantiles in its verdict, the others as they were."""
    with _one_at_a_time:
        return [_timed(view, call, c, timed_call) if c.fits else c for c in candidates]


def _timed(view: AutotunerView, call: Call, candidate: Candidate, timed_call: Callable[..., Any] | None) -> Candidate:
    config = candidate.config
    log.debug("%s: now timing %s", view.kernel_name, describe(config))
    try:
        with not_ours():
            run = _timed_function(view, call, config, timed_call)
            quantiles_ms = view.do_bench(run, quantiles=(0.5, 0.2, 0.8))
    except Exception as error:
        if is_sticky(error):
            log.error("%s: CUDA error while timing %s: nothing was kept", view.kernel_name, describe(config))
            raise
        failed = classify_failure(config, bare(error), Outcome.LAUNCH_FAILED)
        failed = replace(failed, compile_secs=candidate.verdict.compile_secs)
        return replace(candidate, verdict=failed, error=error)
    return _measured(view, candidate, quantiles_ms)


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


def _timed_function(
    view: AutotunerView, call: Call, config: triton.Config, timed_call: Callable[..., Any] | None
) -> Callable[[], Any]:
    operation = None
    if timed_call is not None:
        operation = timed_call(dict(call.named), config)
        if not callable(operation):
            raise BadType(f"{view.kernel_name}: timed_call returned {type(operation).__name__}; allowed: a callable")
    arguments = call.hook_arguments(config)

    def timed() -> None:
        if operation is None:
            call.run_config_hook(config, arguments)
        view.pre_hook(arguments)
        try:
            call.run(config) if operation is None else operation()
        except Exception as error:
            view.post_hook(arguments, exception=error)
            raise
        view.post_hook(arguments, exception=None)

    return timed


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
    timed = [c for c in candidates if c.verdict.median_us is not None]
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
