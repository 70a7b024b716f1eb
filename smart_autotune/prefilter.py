"""Compiles every candidate, launches none, and says of each whether one block of it fits the device."""

from __future__ import annotations

import builtins
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import triton
from triton.runtime.errors import OutOfResources, PTXASError

from smart_autotune import settings
from smart_autotune.errors import bare, one_line, raise_if_sticky
from smart_autotune.launch import Call, load
from smart_autotune.limits import DeviceLimits
from smart_autotune.verdict import Outcome, Verdict
from smart_autotune.workers import Batch, TimedOut

log = logging.getLogger("smart_autotune")

_RESOURCES = {  # Triton's names for what ran out: our outcome and its unit
    "shared memory": (Outcome.OVER_SHARED_MEMORY, "bytes"),
    "tensor memory": (Outcome.OVER_TENSOR_MEMORY, "columns"),
    "threads": (Outcome.OVER_THREADS, "threads"),
}


@dataclass(frozen=True)
class Candidate:
    """One config with its verdict so far; ``kernel`` is what it compiled to, ``error`` why it did not."""

    config: triton.Config
    verdict: Verdict
    kernel: Any = None
    error: BaseException | None = None

    @property
    def fits(self) -> bool:
        return self.verdict.fits


def judge(config: triton.Config, metadata: Any, limits: DeviceLimits) -> Verdict:
    """Compiled need against the device's limits. What the metadata does not say counts as fitting."""
    shared = getattr(metadata, "shared", None)
    columns = getattr(metadata, "tmem_size", None)
    warps = getattr(metadata, "num_warps", None)
    threads = None if warps is None else warps * limits.warp_size
    for name, need, limit in (
        ("shared memory", shared, limits.shared_bytes),
        ("tensor memory", columns, limits.tensor_columns),
        ("threads", threads, limits.threads),
    ):
        if need is not None and need > limit:
            outcome, unit = _RESOURCES[name]
            return Verdict(config, outcome, need, limit, unit, f"{need - limit:,} {unit} of {name} over the limit")
    return Verdict(config, Outcome.NOT_TIMED, shared, limits.shared_bytes, "bytes")


def classify_failure(config: triton.Config, error: BaseException, otherwise: Outcome) -> Verdict:
    """An exception of one config as that config's verdict; ``otherwise`` names the phase it came from."""
    if isinstance(error, OutOfResources) and error.name in _RESOURCES:
        outcome, unit = _RESOURCES[error.name]
        detail = f"{error.required - error.limit:,} {unit} of {error.name} over the limit"
        return Verdict(config, outcome, error.required, error.limit, unit, detail)
    if isinstance(error, PTXASError):
        outcome = Outcome.ASSEMBLER_FAILED
    elif isinstance(error, TimedOut):
        outcome = Outcome.COMPILE_TIMEOUT
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        outcome = Outcome.OUT_OF_DEVICE_MEMORY
    else:
        outcome = otherwise
    return Verdict(config, outcome, detail=one_line(error))


def compiling(
    call: Call,
    configs: Sequence[triton.Config],
    limits: DeviceLimits,
    prepare: Callable[[], None] = lambda: None,
    timed_as: Call | None = None,
    deadline: float = float("inf"),
) -> Iterator[tuple[int, Candidate]]:
    """Compiles ``configs`` in parallel for this call's specialisation; yields each as it is ready, with its index.

    One config's failure is its own verdict. ``prepare`` runs once in each thread (the current device is a thread's
    own). ``timed_as``: the call that will be timed, compiled in the same job where it is another specialisation.
    What is not ready at ``deadline`` is not waited for.
    """

    def job(config: triton.Config) -> Any:
        kernel = call.compile(config)
        if timed_as is not None and timed_as is not call:
            timed_as.compile(config)
        return kernel

    batch = Batch([partial(job, config) for config in configs], settings.current().compile_timeout_secs, prepare)
    with quiet_assembler():
        for index in batch.completed(deadline):
            yield index, _candidate(configs[index], batch.results[index], batch.secs[index], limits)


def compile_candidates(
    call: Call, configs: Sequence[triton.Config], limits: DeviceLimits, prepare: Callable[[], None] = lambda: None
) -> list[Candidate]:
    """The same, all at once and in order."""
    ready = dict(compiling(call, configs, limits, prepare))
    return [ready[index] for index in range(len(configs))]


def compile_one(call: Call, config: triton.Config, limits: DeviceLimits) -> Candidate:
    """The same for one config, in the calling thread."""
    begin = time.monotonic()
    result: Any
    try:
        with quiet_assembler():
            result = call.compile(config)
    except Exception as error:
        result = error
    return _candidate(config, result, time.monotonic() - begin, limits)


def _candidate(config: triton.Config, result: Any, secs: float, limits: DeviceLimits) -> Candidate:
    if isinstance(result, BaseException):
        verdict = classify_failure(config, result, Outcome.COMPILE_FAILED)
        return Candidate(config, replace(verdict, compile_secs=secs), error=bare(result))
    verdict = judge(config, getattr(result, "metadata", None), limits)
    return Candidate(config, replace(verdict, compile_secs=secs), kernel=result)


def load_candidate(candidate: Candidate) -> Candidate:
    """Loads a fitting candidate: checks the function's own thread limit, records registers and spills."""
    try:
        load(candidate.kernel)
    except Exception as error:
        raise_if_sticky(error)
        return failed_after_compiling(candidate, error)
    spills = getattr(candidate.kernel, "n_spills", None)
    verdict = replace(
        candidate.verdict,
        registers=getattr(candidate.kernel, "n_regs", None),
        spill_bytes=None if spills is None else 4 * spills,  # Triton counts 4-byte words of local memory
    )
    return replace(candidate, verdict=verdict)


def failed_after_compiling(candidate: Candidate, error: BaseException) -> Candidate:
    """The candidate with its failure to load or run as its verdict; what its compile took stays."""
    verdict = classify_failure(candidate.config, bare(error), Outcome.LAUNCH_FAILED)
    return replace(candidate, verdict=replace(verdict, compile_secs=candidate.verdict.compile_secs), error=error)


def rescue(
    configs: Sequence[triton.Config], compile_all: Callable[[Sequence[triton.Config]], list[Candidate]]
) -> list[Candidate]:
    """When nothing fits: the same configs with fewer pipeline stages (results do not change), level by level.

    Returns the candidates of the first level at which one fits (all of that level), or an empty list.
    """
    if not settings.current().rescue:
        return []
    for stages in range(max((config.num_stages or 1 for config in configs), default=1) - 1, 0, -1):
        fewer: list[triton.Config] = []
        for config in configs:
            if (config.num_stages or 1) > stages:
                twin = copy.copy(config)
                twin.num_stages = stages
                if twin not in fewer:
                    fewer.append(twin)
        found = compile_all(fewer)
        if any(candidate.fits for candidate in found):
            return found
    return []


_quiet_users = 0
_quiet_lock = threading.Lock()


@contextmanager
def quiet_assembler() -> Iterator[None]:
    """While a candidate compiles, Triton 3.6.0's assembler errors (the whole PTX) go to DEBUG, not to stdout.

    Triton calls ``print`` in its NVIDIA backend module; a module global of that name shadows the builtin there. Not
    needed from the Triton on that raises without printing.
    """
    global _quiet_users
    try:
        from triton.backends.nvidia import compiler as backend
    except ImportError:
        yield
        return
    with _quiet_lock:
        _quiet_users += 1
        backend.print = _log_instead
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_users -= 1
            if _quiet_users == 0 and getattr(backend, "print", None) is _log_instead:
                del backend.print


def _log_instead(*values: object, **options: Any) -> None:
    text = " ".join(str(value) for value in values)
    if options.get("file") is None and "ptxas" in text and "PTX" in text:
        log.debug("assembler output kept from stdout: %s", text)
    else:
        builtins.print(*values, **options)
