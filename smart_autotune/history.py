"""What tuning found out, kept and said: records, cold keys and the log lines of one kernel."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from smart_autotune import recorder, serving, settings
from smart_autotune.errors import NoConfigFits
from smart_autotune.key import TuningKey
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate
from smart_autotune.serving import Ranking
from smart_autotune.verdict import OVER_LIMIT, TAKEN_OVER, TuningRecord, Verdict, describe

log = logging.getLogger("smart_autotune")

_all: weakref.WeakSet[Records] = weakref.WeakSet()
_MOST_COLD_KEYS = 4096  # a kernel whose key never repeats must not grow a list for ever


class Records:
    """One kernel's records, newest last, and the keys it served without having tuned them."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._mutex = threading.Lock()
        self._by_key: dict[TuningKey, TuningRecord] = {}
        self._cold: dict[TuningKey, str] = {}
        self._said: set[TuningKey] = set()
        self._warned: set[str] = set()
        _all.add(self)

    def __iter__(self):  # type: ignore[no-untyped-def]  # Iterator[TuningRecord]
        with self._mutex:
            return iter(tuple(self._by_key.values()))

    @property
    def cold(self) -> tuple[TuningKey, ...]:
        with self._mutex:
            return tuple(self._cold)

    def cold_origins(self) -> list[str]:
        """What serves each cold key."""
        with self._mutex:
            return list(self._cold.values())

    def served(self) -> list[str]:
        """One line for each key: what serves it."""
        with self._mutex:
            records, cold = list(self._by_key.values()), dict(self._cold)
        lines = [_line(record.kernel, record.key, record.served_by, record.winner) for record in records]
        return lines + [_line(self._kernel, key, origin) for key, origin in cold.items()]

    def tuned(self, record: TuningRecord) -> None:
        with self._mutex:
            self._by_key.pop(record.key, None)
            self._by_key[record.key] = record
            self._cold.pop(record.key, None)
            self._said.discard(record.key)
        recorder.settled(record)
        _count(record)
        for verdict in record.verdicts if log.isEnabledFor(logging.DEBUG) else ():
            log.debug(
                "%s: %s: outcome=%s need=%s limit=%s unit=%s median_us=%s %s",
                self._kernel, describe(verdict.config), verdict.outcome, verdict.need, verdict.limit, verdict.unit,
                verdict.median_us, verdict.detail,
            )  # fmt: skip
        if not log.isEnabledFor(logging.INFO):
            return
        winner = record.winner
        if record.served_by in TAKEN_OVER:
            log.info(
                "%s: [%s] from %s: winner=[%s] median=%s",
                self._kernel, record.key.describe(), record.served_by, describe(winner.config) if winner else None,
                _time(winner),
            )  # fmt: skip
            return
        timed = sum(1 for verdict in record.verdicts if verdict.median_us is not None)
        log.info(
            "%s: tuned [%s]: offered=%d dropped=%s timed=%d winner=[%s] median=%s (compile %.1f s, timing %.1f s)",
            self._kernel, record.key.describe(), len(record.verdicts), _counts(record.dropped), timed,
            describe(winner.config) if winner else None, _time(winner), record.compile_secs, record.timing_secs,
        )  # fmt: skip

    def served_cold(self, key: TuningKey, ranking: Ranking, reason: str, cold: bool) -> None:
        """Notes a key that was served without tuning; said once a key."""
        with self._mutex:
            if cold and (key in self._cold or len(self._cold) < _MOST_COLD_KEYS):
                self._cold[key] = ranking.origin
            if key in self._said:
                return
            if len(self._said) < _MOST_COLD_KEYS:
                self._said.add(key)
        recorder.served_cold(self._kernel, key, ranking, reason)
        if cold:
            _count(None)
        asked_for = not cold or settings.current().mode != "tune"
        level = logging.INFO if asked_for else logging.WARNING
        log.log(level, "%s: cold key [%s] served by %s: %s", self._kernel, key.describe(), ranking.origin, reason)

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s: %s", self._kernel, text)

    def refused(self, ranking: Ranking, verdict: Verdict) -> None:
        """A specialisation (alignment, ==1) of a known key that one of its configs does not fit; said once."""
        text = f"{describe(verdict.config)}: {verdict.outcome} need={verdict.need} limit={verdict.limit}"
        if text in ranking.refused:
            return
        ranking.refused.add(text)
        expected = ranking.origin == serving.FIRST_THAT_FITS  # nobody had said that it would fit
        log.log(
            logging.INFO if expected else logging.WARNING,
            "%s: [%s] %s unit=%s for this specialisation; the next best serves it %s",
            self._kernel, ranking.key.describe(), text, verdict.unit, verdict.detail,
        )  # fmt: skip

    def rescued(self, key: TuningKey, found: Sequence[Candidate], refused: Sequence[Candidate]) -> None:
        log.warning(
            "%s: none of %d configs fits [%s]; rescued with fewer pipeline stages: %s",
            self._kernel, len(refused), key.describe(), "; ".join(describe(c.config) for c in found if c.fits),
        )  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """How the keys met so far are served: tuned, by the nearest tuned one, or by the first config that fits."""

    tuned: int
    served_near: int
    served_cold: int

    def __str__(self) -> str:
        return f"{self.tuned} keys tuned, {self.served_near} served by a near one, {self.served_cold} served cold"


def coverage() -> Coverage:
    """Over every kernel of this process. A server can fail on it at the end of its warm-up."""
    kernels = list(_all)
    origins = [origin for kernel in kernels for origin in kernel.cold_origins()]
    near = sum(origin.startswith("nearest") for origin in origins)
    return Coverage(sum(1 for kernel in kernels for _ in kernel), near, len(origins) - near)


def served() -> list[str]:
    """One line for each key that ``coverage()`` counts: its kernel, the key, what serves it."""
    return sorted(line for kernel in list(_all) for line in kernel.served())


@dataclass
class Totals:
    """Sums over the life of this process; they only grow. ``cold``: keys first served untuned, each counted once.

    ``verdicts`` (by outcome) and the seconds are those of tunings done here, not of results read from disk.
    """

    tunings: int = 0
    compile_secs: float = 0.0
    timing_secs: float = 0.0
    cold: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)


_totals = Totals()
_totals_mutex = threading.Lock()
_listener: Callable[[], None] | None = None


def totals() -> Totals:
    """A copy of the sums as they are now."""
    with _totals_mutex:
        return replace(_totals, verdicts=_totals.verdicts.copy())


def tell(listener: Callable[[], None] | None) -> None:
    """``listener`` is called whenever a key is settled or first served untuned, by no launch that has a plan."""
    global _listener
    _listener = listener


def _count(record: TuningRecord | None) -> None:
    with _totals_mutex:
        if record is None:
            _totals.cold += 1
        elif record.served_by not in TAKEN_OVER:
            _totals.tunings += 1
            _totals.compile_secs += record.compile_secs
            _totals.timing_secs += record.timing_secs
            _totals.verdicts.update(str(verdict.outcome) for verdict in record.verdicts)
    if _listener is not None:
        _listener()


def records() -> list[TuningRecord]:
    """The tuning records of every kernel in this process, oldest first."""
    return sorted((record for kernel in list(_all) for record in kernel), key=lambda record: record.created)


def cold_keys() -> list[TuningKey]:
    """The keys that were served without having been tuned, of every kernel; tuned at their next call that may."""
    return [key for kernel in list(_all) for key in kernel.cold]


def no_config_fits(
    kernel: str, key: TuningKey, verdicts: Sequence[Verdict], pruned: Sequence[Verdict], device: DeviceLimits
) -> NoConfigFits:
    """The error for a key that no config fits: how many, the closest miss, what to do."""
    over = [v for v in verdicts if v.outcome in OVER_LIMIT and v.need is not None and v.excess is not None]
    closest = min(over, key=lambda v: (v.excess or 0) / (v.limit or 1), default=None)
    text = [f"{kernel}: none of {len(verdicts)} configs fits [{key.describe()}]"]
    if pruned:
        text.append(f"the kernel's own prune had dropped {len(pruned)} more")
    if closest is None:
        failures = [v.detail for v in verdicts if v.detail]
        text.append(f"failures: {_counts(Counter(str(v.outcome) for v in verdicts))} {failures[0] if failures else ''}")
        return NoConfigFits("; ".join(text))
    text.append(f"dropped: {_counts(Counter(str(v.outcome) for v in verdicts))}")
    cap = " (SMART_AUTOTUNE_SHARED_BYTES_CAP)" if device.what_if else ""
    text.append(
        f"smallest need {closest.need:,} {closest.unit}, limit {closest.limit:,}{cap}, "
        f"{closest.excess:,} over, by {describe(closest.config)}"
    )
    text += [f"{describe(v.config)}: {v.detail}" for v in verdicts if v.outcome not in OVER_LIMIT and v.detail][:1]
    text.append("remedy: offer a config with smaller blocks or fewer stages (fewer warps for threads)")
    return NoConfigFits("; ".join(text), closest.need, closest.limit, str(closest.outcome))


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _line(kernel: str, key: TuningKey, served_by: str, winner: Verdict | None = None) -> str:
    text = f"{kernel} [{key.describe()}]: {served_by}"
    return text if winner is None else f"{text}, {describe(winner.config)}"


def _time(verdict: Verdict | None) -> str:
    return "not timed" if verdict is None or verdict.median_us is None else f"{verdict.median_us:.1f} us"
