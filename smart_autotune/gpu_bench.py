"""Times candidates on a CUDA device: few samples of all, more of those that may still win.

Every sample is one launch between two events, after the L2 cache was flushed. The device is kept busy ahead of each
round, so that what the host spends on a launch stays out of it; and a sample counts only if the device had not yet
reached its first event when its last one was enqueued: then nothing that kept the host (another thread's turn at the
interpreter, while candidates compile) can be in it. Hooks run outside the events. Constants that are not explained by
themselves were measured on an H200 (``integration/benchmarks/tuning_time.py``).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger("smart_autotune")

FIRST_SAMPLES = 2  # of every candidate; the lesser one decides whether it gets more
# (how much slower than the best a candidate may be to stay, samples it has after this round)
ROUNDS = ((1.5, 8), (1.15, 20), (1.04, 50))
ROUND_MS = 6.0  # device time that one round may take for one candidate: long kernels get fewer samples
HOST_MARGIN = 1.3  # by how much more than a launch costs the host the device is kept busy ahead of it
ATTEMPTS = 3  # at a sample that the device was too early for
MOST_WAIT_MS = 40.0  # that the device is kept busy ahead of one sample: eight turns of another thread (5 ms each)
MOST_QUEUED = 120  # launches enqueued behind one wait: with flush and events well below a stream's queue of 1,024
CYCLES_PER_MS = 2_000_000  # torch.cuda._sleep counts device clocks; a slower clock sleeps longer, which is harmless
SMALLEST_FLUSH_BYTES = 4 << 20
FREE_BYTES_TO_LEAVE = 64 << 20
GRAPH_LAUNCHES = 20


@dataclass
class Run:
    """One candidate's launch, and what has to happen around it outside the timing."""

    launch: Callable[[], Any]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    launches: int = 1  # in one call of ``launch``
    host_us: float = float("inf")  # the least that enqueueing one sample has cost the host
    samples_us: list[float] = field(default_factory=list)
    was_ahead: bool = False  # at least once the host had enqueued a sample before the device came to it

    @property
    def waits(self) -> bool:
        """Whether it waits for the device itself, as far as its samples tell."""
        return bool(self.samples_us) and not self.was_ahead

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def seen_us(self) -> float:
        """What it is known to reach: of few samples the least, because what disturbs a launch only makes it longer."""
        return self.median_us if len(self.samples_us) > FIRST_SAMPLES else min(self.samples_us)

    @property
    def spread_us(self) -> tuple[float, float]:
        """20 % and 80 % quantiles."""
        ordered = sorted(self.samples_us)
        return ordered[len(ordered) // 5], ordered[(4 * len(ordered)) // 5]


@dataclass
class Sample:
    """Two events around one launch. ``ahead``: both were enqueued before the device reached the first."""

    run: Run
    begin: Any
    end: Any
    ahead: bool
    host_us: float


class GpuTimer:
    """Samples runs on the current device and stream. ``deadline``: ``time.monotonic`` at which sampling ends."""

    def __init__(self, deadline: float = float("inf")) -> None:
        self._deadline = deadline
        self._flush = flush_buffer()

    def close(self) -> None:
        """Gives the flush buffer back."""
        self._flush = None

    def screen(self, run: Run) -> None:
        """Launches once untimed, then takes the first samples. Raises what the launch or the device raises.

        Samples that the device was too early for are left to ``decide``: candidates may still be compiling.
        """
        self._enqueue(run)
        torch.cuda.synchronize()
        self._enqueue(run)  # what it costs the host when nothing is done for the first time
        self._sample([run], FIRST_SAMPLES, attempts=1, keep_early=False)

    def decide(self, runs: Sequence[Run]) -> None:
        """More samples for those that may still win, in interleaved rounds."""
        self._sample([run for run in runs if len(run.samples_us) < FIRST_SAMPLES], FIRST_SAMPLES)
        for tolerance, wanted in ROUNDS:
            best_us = min((run.seen_us for run in runs), default=0.0)
            alive = [run for run in runs if run.seen_us <= tolerance * best_us]
            if len(alive) < 2 or time.monotonic() >= self._deadline:
                return
            affordable = int(ROUND_MS * 1e3 / max(best_us, 1.0)) or 1
            self._sample(alive, min(wanted - min(len(run.samples_us) for run in alive), affordable))

    def _sample(self, runs: Sequence[Run], rounds: int, attempts: int = ATTEMPTS, keep_early: bool = True) -> None:
        """``rounds`` samples of each run, interleaved; those that the device was too early for again.

        ``keep_early``: at the last attempt they are kept. A launch that itself waits for the device never does better.
        """
        queue = [(run, run.host_us) for _ in range(rounds) for run in runs]
        for attempt in range(1, attempts + 1):
            again: list[tuple[Run, float]] = []
            for sample in self._enqueued(queue):
                run = sample.run
                run.was_ahead = run.was_ahead or sample.ahead
                if sample.ahead or (keep_early and (attempt == attempts or run.waits)):
                    run.samples_us.append(sample.begin.elapsed_time(sample.end) * 1e3 / run.launches)
                else:
                    again.append((run, 2 * sample.host_us))
            if not again:
                return
            queue = again

    def _enqueued(self, queue: Sequence[tuple[Run, float]]) -> list[Sample]:
        """One sample of each, the device kept busy for what each may cost the host; done when it returns."""
        samples: list[Sample] = []
        for chunk in _chunks(queue):
            ahead_ms = min(MOST_WAIT_MS, HOST_MARGIN * sum(host_us for _, host_us in chunk) / 1e3)
            _sleep(int(CYCLES_PER_MS * ahead_ms))
            samples += [self._enqueue(run) for run, _ in chunk]
        torch.cuda.synchronize()
        return samples

    def _enqueue(self, run: Run) -> Sample:
        started = time.perf_counter()
        begin, end = _event(), _event()
        run.before()
        if self._flush is not None:
            self._flush.zero_()
        begin.record()
        run.launch()
        end.record()
        ahead = not begin.query()
        run.after()
        host_us = (time.perf_counter() - started) * 1e6
        run.host_us = min(run.host_us, host_us)
        return Sample(run, begin, end, ahead, host_us)


def _chunks(queue: Sequence[tuple[Run, float]]) -> Iterator[list[tuple[Run, float]]]:
    """What is enqueued behind one wait: not too many launches for a stream, not too long a wait."""
    chunk: list[tuple[Run, float]] = []
    wait_ms = 0.0
    for run, host_us in queue:
        own_ms = HOST_MARGIN * host_us / 1e3
        if chunk and (len(chunk) == MOST_QUEUED or wait_ms + own_ms > MOST_WAIT_MS):
            yield chunk
            chunk, wait_ms = [], 0.0
        chunk.append((run, host_us))
        wait_ms += own_ms
    if chunk:
        yield chunk


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def flush_buffer() -> Any:
    """A buffer of the L2's size; smaller when memory is short, none when there is hardly any."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    size = int(getattr(properties, "L2_cache_size", 0)) or 64 << 20
    free = torch.cuda.mem_get_info()[0] - FREE_BYTES_TO_LEAVE
    while size >= SMALLEST_FLUSH_BYTES:
        if size <= free:
            try:
                return torch.empty(size, dtype=torch.int8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                log.debug("no memory for a flush buffer of %d bytes", size)
        size //= 2
    return None


def in_graph(run: Run) -> Run:
    """The same launches replayed from a graph: nothing of the host in the time (``SMART_AUTOTUNE_BENCH=graph``).

    Runs once eagerly first, so that everything is compiled and loaded. The L2 is warm between its launches.
    """
    run.before()
    run.launch()
    run.after()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_LAUNCHES):
            run.launch()
    return Run(graph.replay, run.before, run.after, launches=GRAPH_LAUNCHES)
