"""Counters and gauges for Prometheus (the extra ``metrics``): what tuning costs a server, what runs untuned.

``prometheus_client`` fixes how it keeps its numbers when it is imported, so it is imported by :func:`start`, never by
the package: by then a server has set ``PROMETHEUS_MULTIPROC_DIR``, if it has several processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from smart_autotune import history, settings
from smart_autotune.errors import one_line
from smart_autotune.once import warn_once

log = logging.getLogger("smart_autotune")

PREFIX = "smart_autotune_"

_mutex = threading.Lock()
_exported: Exported | None = None


def start(labels: Mapping[str, str] | None = None, patches: Callable[[], Mapping[str, bool]] | None = None) -> bool:
    """Exports this process's numbers from now on, what happened before included; whether it does.

    ``labels``: names and values on every metric, such as a rank. ``patches``: of each patch, whether it is in force.
    Numbers are written when a key is settled or first served untuned, never by a launch that has a plan. Starting
    twice is starting once.
    """
    global _exported
    with _mutex:
        if _exported is not None:
            return True
        try:
            import prometheus_client
        except ImportError as error:
            log.warning("no metrics of smart_autotune: %s (pip install 'smart-autotune[metrics]')", one_line(error))
            return False
        _exported = Exported(prometheus_client, labels or {}, patches or _triton_patch)
        history.tell(_exported.update)
    _exported.update()
    return True


def stop() -> None:
    """Numbers stay as they are from here on (tests); the metrics leave the registry."""
    global _exported
    with _mutex:
        history.tell(None)
        if _exported is not None:
            _exported.unregister()
        _exported = None


class Exported:
    """The metrics of one process, brought up to ``history.totals()`` by :meth:`update`."""

    def __init__(self, client: Any, labels: Mapping[str, str], patches: Callable[[], Mapping[str, bool]]) -> None:
        self._client = client
        self._labels = dict(labels)
        self._patches = patches
        self._mutex = threading.Lock()
        self._before = history.Totals()
        self._made: list[Any] = []
        self._tunings = self._counter("tunings", "Keys tuned by this process")
        self._secs = self._counter("tuning_seconds", "Seconds spent on tuning", "phase")
        self._verdicts = self._counter("verdicts", "Configs by what became of them in tunings", "outcome")
        self._cold = self._counter("cold_serves", "Keys first served without having been tuned")
        self._keys = self._gauge("keys", "Keys by how they are served now", "served")
        self._patch = self._gauge("patch_state", "1: the patch is in force in this process", "patch")

    def update(self) -> None:
        """Adds what has happened since the last time. A fault of ours never reaches who is served."""
        try:
            with self._mutex:
                self._count()
                self._measure()
        except Exception as error:
            if settings.current().strict:
                raise
            warn_once("metrics", "metrics of smart_autotune are not up to date: %s", one_line(error))

    def unregister(self) -> None:
        for metric in self._made:
            self._client.REGISTRY.unregister(metric)

    def _count(self) -> None:
        now, before = history.totals(), self._before
        self._at(self._tunings).inc(now.tunings - before.tunings)
        self._at(self._cold).inc(now.cold - before.cold)
        self._at(self._secs, "compile").inc(now.compile_secs - before.compile_secs)
        self._at(self._secs, "timing").inc(now.timing_secs - before.timing_secs)
        for outcome, count in now.verdicts.items():
            self._at(self._verdicts, outcome).inc(count - before.verdicts[outcome])
        self._before = now

    def _measure(self) -> None:
        found = history.coverage()
        for served, count in (("tuned", found.tuned), ("near", found.served_near), ("cold", found.served_cold)):
            self._at(self._keys, served).set(count)
        for patch, in_force in self._patches().items():
            self._at(self._patch, patch).set(int(in_force))

    def _counter(self, name: str, meaning: str, *own_labels: str) -> Any:
        return self._add(self._client.Counter(PREFIX + name, meaning, [*self._labels, *own_labels]))

    def _gauge(self, name: str, meaning: str, *own_labels: str) -> Any:
        names = [*self._labels, *own_labels]
        return self._add(self._client.Gauge(PREFIX + name, meaning, names, multiprocess_mode="mostrecent"))

    def _add(self, metric: Any) -> Any:
        self._made.append(metric)
        return metric

    def _at(self, metric: Any, *own_values: str) -> Any:
        values = [*self._labels.values(), *own_values]
        return metric.labels(*values) if values else metric


def _triton_patch() -> dict[str, bool]:
    from smart_autotune.patches import triton_3_6_0

    return {triton_3_6_0.GATE.patch: bool(triton_3_6_0.is_active())}
