"""The tuner at the end of SGLang's start-up: what its graphs were captured with is said, counted and, on request, kept.

``Scheduler.get_init_info`` is what a rank answers when all its graphs are captured, before its first request.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from smart_autotune import batch, settings
from smart_autotune.errors import one_line
from smart_autotune.once import warn_once

from .seams import Seam
from .verified import Release

log = logging.getLogger("smart_autotune")

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
READY = "Scheduler.get_init_info"
RANKS = ("tp_rank", "pp_rank", "dp_rank")
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # SGLang sets it where its metrics are on

_ready: weakref.WeakSet[Any] = weakref.WeakSet()


def seams(release: Release) -> tuple[Seam, ...]:
    return Seam(*release.capture, before_capture), Seam(SCHEDULER_MODULE, READY, when_ready)


def before_capture(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the decode graphs' capture: batch buckets end at the sizes that are captured."""
    _guarded(_follow_captured_sizes, runner)
    return original(runner, *args, **kwargs)


def when_ready(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a rank's answer that it is ready; once for each scheduler."""
    info = original(scheduler, *args, **kwargs)
    if scheduler not in _ready:
        _ready.add(scheduler)
        _guarded(_after_capture, scheduler)
        _guarded(_start_metrics, scheduler)
    return info


def _guarded(step: Callable[[Any], None], argument: Any) -> None:
    """A fault of ours costs the step, never the server."""
    try:
        step(argument)
    except Exception as error:
        if settings.current().strict:
            raise
        warn_once(("sglang", step.__name__), "SGLang%s: %s", step.__name__.replace("_", " "), one_line(error))


def _follow_captured_sizes(runner: Any) -> None:
    """Not for draft models and not with several tokens a request, whose kernels see other sizes."""
    width = getattr(runner, "captured_req_width", getattr(runner, "num_tokens_per_bs", None))
    if width == 1 and not runner.model_runner.is_draft_worker:
        batch.end_buckets_at(runner.capture_bs)


def _after_capture(scheduler: Any) -> None:
    from smart_autotune.history import coverage, served
    from smart_autotune.serving import freeze

    found = coverage()
    log.info("SGLang is ready: %s%s", found, "".join(f"\n  {line}" for line in served()))
    if not settings.current().freeze_after_capture:
        return
    freeze()
    if found.tuned:
        log.info("tuning is frozen: a key not met so far is served by the nearest tuned one or untuned")
    else:
        log.warning(
            "SMART_AUTOTUNE_FREEZE_AFTER_CAPTURE=1: tuning is frozen although no key is tuned so far; "
            "what this server first runs at its requests, and nobody tuned before, is served untuned"
        )


def _start_metrics(scheduler: Any) -> None:
    if not getattr(scheduler.server_args, "enable_metrics", False):
        return
    if not os.environ.get(MULTIPROCESS):
        log.warning("no metrics of smart_autotune: SGLang's are on, but %s is not set", MULTIPROCESS)
        return
    from smart_autotune import metrics

    from . import patches

    metrics.start({name: str(getattr(scheduler.ps, name, None) or 0) for name in RANKS}, patches)
