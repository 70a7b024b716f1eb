"""Jobs in parallel threads, each with its own time budget."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from smart_autotune import settings

MISSING = object()


class TimedOut(Exception):
    """A job outlived its budget. Its thread cannot be killed; what it returns later is thrown away."""


def worker_count(jobs: int) -> int:
    """``SMART_AUTOTUNE_COMPILE_WORKERS``, or one for each core this process may use, at most one a job."""
    configured = settings.current().compile_workers
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(configured or usable, jobs))


class Batch:
    """Runs jobs on daemon threads (a stuck compiler must not keep the process from ending).

    ``results[i]`` is what job i returned or the exception it raised; ``secs[i]`` its wall time in seconds.
    """

    def __init__(self, jobs: Sequence[Callable[[], Any]], budget_secs: float, prepare: Callable[[], None]) -> None:
        self._jobs = jobs
        self._budget_secs = budget_secs
        self._prepare = prepare
        self._waiting = deque(range(len(jobs)))
        self._started: dict[int, float] = {}
        self._changed = threading.Condition()
        self.results: dict[int, Any] = {}
        self.secs: dict[int, float] = {}

    def run(self) -> list[Any]:
        """Every job's result, in order."""
        for _ in self.completed():
            pass
        return [self.results[index] for index in range(len(self._jobs))]

    def completed(self, deadline: float = float("inf")) -> Iterator[int]:
        """Indices as their jobs end. At ``deadline`` (``time.monotonic``) it ends; jobs not begun are never begun."""
        for _ in range(worker_count(len(self._jobs))):
            self._add_worker()
        reported: set[int] = set()
        while len(reported) < len(self._jobs):
            fresh = self._wait_for_more(reported, deadline)
            if not fresh:
                return
            reported.update(fresh)
            yield from fresh

    def _wait_for_more(self, reported: set[int], deadline: float) -> list[int]:
        with self._changed:
            while True:
                fresh = [index for index in self.results if index not in reported]
                if fresh:
                    return fresh
                if time.monotonic() >= deadline:
                    self._waiting.clear()
                    return []
                self._changed.wait(min(self._next_deadline_secs(), max(0.0, deadline - time.monotonic())))
                self._give_up_on_late_jobs()

    def _add_worker(self) -> None:
        threading.Thread(target=self._work, name="smart_autotune-compile", daemon=True).start()

    def _work(self) -> None:
        prepared: Any = MISSING
        while True:
            with self._changed:
                if not self._waiting:
                    return
                index = self._waiting.popleft()
                begin = self._started[index] = time.monotonic()
            if prepared is MISSING:
                prepared = _attempt(self._prepare)  # on the first job's budget
            result = prepared if isinstance(prepared, BaseException) else _attempt(self._jobs[index])
            if not self._finish(index, begin, result):
                return  # given up on: another worker has taken this one's place

    def _finish(self, index: int, begin: float, result: Any) -> bool:
        with self._changed:
            if index in self.results:
                return False
            self.results[index] = result
            self.secs[index] = time.monotonic() - begin
            self._changed.notify_all()
            return True

    def _give_up_on_late_jobs(self) -> None:
        for index, begin in list(self._started.items()):
            elapsed = time.monotonic() - begin
            if index not in self.results and elapsed >= self._budget_secs:
                self.results[index] = TimedOut(f"no result after {elapsed:.0f} s")
                self.secs[index] = elapsed
                if self._waiting:
                    self._add_worker()

    def _next_deadline_secs(self) -> float:
        begins = [begin for index, begin in self._started.items() if index not in self.results]
        left = min(begins, default=time.monotonic()) + self._budget_secs - time.monotonic()
        return min(max(0.0, left) + 0.001, threading.TIMEOUT_MAX)


def _attempt(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except BaseException as error:  # also SystemExit: whoever waits for this thread must hear of it
        return error
