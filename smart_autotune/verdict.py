"""What became of each config, kept as data: the vocabulary of logs, tables and records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import triton

from smart_autotune.key import TuningKey


class Outcome(str, Enum):
    """One config's fate for one key."""

    WON = "WON"
    SLOWER = "SLOWER"
    OVER_SHARED_MEMORY = "OVER_SHARED_MEMORY"
    OVER_TENSOR_MEMORY = "OVER_TENSOR_MEMORY"
    OVER_THREADS = "OVER_THREADS"
    PRUNED_BY_USER = "PRUNED_BY_USER"
    COMPILE_FAILED = "COMPILE_FAILED"
    COMPILE_TIMEOUT = "COMPILE_TIMEOUT"
    ASSEMBLER_FAILED = "ASSEMBLER_FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    OUT_OF_DEVICE_MEMORY = "OUT_OF_DEVICE_MEMORY"
    NOT_TIMED = "NOT_TIMED"

    def __str__(self) -> str:
        return self.value


OVER_LIMIT = frozenset({Outcome.OVER_SHARED_MEMORY, Outcome.OVER_TENSOR_MEMORY, Outcome.OVER_THREADS})
FITS = frozenset({Outcome.WON, Outcome.SLOWER, Outcome.NOT_TIMED})


@dataclass(frozen=True)
class Verdict:
    """One config's fate: what it needed, what it may have, and why it was kept or dropped.

    ``need``/``limit`` are in ``unit`` (``"bytes"``, ``"columns"``, ``"threads"``); ``spill_bytes`` is local memory a
    thread; ``median_us`` microseconds; ``compile_secs`` seconds. None: not known.
    """

    config: triton.Config
    outcome: Outcome
    need: int | None = None
    limit: int | None = None
    unit: str | None = None
    detail: str = ""
    median_us: float | None = None
    spread_us: tuple[float, float] | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    compile_secs: float | None = None

    @property
    def fits(self) -> bool:
        return self.outcome in FITS

    @property
    def excess(self) -> int | None:
        """By how much ``need`` is over ``limit`` (negative: room left), in ``unit``."""
        if self.need is None or self.limit is None:
            return None
        return self.need - self.limit


@dataclass(frozen=True)
class TuningRecord:
    """Everything one tuning found out. ``served_by`` says how the ranking came to be (``"tuned"``, ``"rescue"``)."""

    kernel: str
    key: TuningKey
    verdicts: tuple[Verdict, ...]
    served_by: str
    compile_secs: float = 0.0
    timing_secs: float = 0.0
    batch: str = ""
    notes: tuple[str, ...] = ()
    created: float = field(default_factory=time.time)

    @property
    def winner(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.outcome is Outcome.WON), None)

    @property
    def dropped(self) -> Counter[str]:
        """How many configs were dropped, by outcome."""
        return Counter(str(v.outcome) for v in self.verdicts if not v.fits)


def distinct(configs: Iterable[triton.Config]) -> list[triton.Config]:
    """Each config once, in order; equal ones are one."""
    configs = list(configs)
    try:
        if len({(c.num_warps, c.num_stages, *c.kwargs.values()) for c in configs}) == len(configs):
            return configs  # none can be equal; ``Config.__hash__`` takes several times as long
        return list(dict.fromkeys(configs))
    except TypeError:  # a config value that cannot be hashed
        return [config for index, config in enumerate(configs) if config not in configs[:index]]


def without(configs: Iterable[triton.Config], others: Sequence[triton.Config]) -> list[triton.Config]:
    """The configs that are not among ``others``."""
    same = {id(config) for config in others}
    rest = [config for config in configs if id(config) not in same]
    return [config for config in rest if config not in others]


LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")  # what a config sets beside kwargs
TAKEN_OVER = ("stored", "another rank")  # what serves a key that this process did not tune


def describe(config: triton.Config) -> str:
    """One config on one line, launch options last: ``BLOCK_T=16, num_warps=4, num_stages=2``."""
    parts = [f"{name}={value}" for name, value in config.kwargs.items()]
    parts += [f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    if config.num_ctas not in (None, 1):
        parts.append(f"num_ctas={config.num_ctas}")
    if config.maxnreg is not None:
        parts.append(f"maxnreg={config.maxnreg}")
    if config.ir_override is not None:
        parts.append(f"ir_override={config.ir_override}")
    return ", ".join(parts)
