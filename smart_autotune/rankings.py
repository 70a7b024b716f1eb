"""Which ranking serves a key: one in memory or on disk, one tuned now for all who wait, or one put together untuned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import triton

from smart_autotune import identity, ranks, recorder, serving, settings, store
from smart_autotune.agreement import SingleFlight, one_process
from smart_autotune.entry import BadEntry, Stored, decode, encode
from smart_autotune.errors import one_line
from smart_autotune.history import Records
from smart_autotune.key import TuningKey
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.serving import Ranking
from smart_autotune.tuning import NotNow, Tuning, order_of, settled_by
from smart_autotune.verdict import Outcome, TuningRecord, Verdict, without

log = logging.getLogger("smart_autotune")

READ_SECS = 10.0  # how long a thread waits for another's look at the disk
_here = threading.local()  # .tuning: how many tunings this thread is inside of


class Rankings:
    """One kernel's rankings. ``first_that_fits``: picks the config that fits a call, for keys served cold."""

    def __init__(
        self,
        tuning: Tuning,
        records: Records,
        times_launches: bool,
        first_that_fits: Callable[[Call, Ranking, DeviceLimits], triton.Config],
    ) -> None:
        self._tuning = tuning
        self._view = tuning.view
        self._records = records
        self._times_launches = times_launches
        self._first_that_fits = first_that_fits
        self._flight = SingleFlight()  # of tunings
        self._reading = SingleFlight()  # of looks at the disk
        self._tuned: dict[TuningKey, Ranking] = {}
        self._cold: dict[TuningKey, Ranking] = {}
        self._looked_up: set[TuningKey] = set()  # on disk
        self._waited: set[TuningKey] = set()  # for another process or rank, in vain
        self._partly: dict[TuningKey, list[Verdict]] = {}  # what an unfinished or outgrown entry still settles

    def __len__(self) -> int:
        return len(self._tuned)

    def for_call(self, call: Call, key: TuningKey, capturing: bool, device: DeviceLimits) -> Ranking:
        """The ranking that serves this call."""
        if settings.current().mode not in serving.FIRST_FIT_MODES:
            found = self.known(key) or self._kept(call, key, device)
            if found is not None:
                return found
        reason = "a CUDA graph is being captured" if capturing else self._why_not_time(call)
        if reason:
            return self._serve_cold(call, key, device, reason)
        lasting_reason = serving.why_not_tune()
        if lasting_reason:
            return self._serve_cold(call, key, device, lasting_reason, lasting=True)
        if self._is_one_bucket_too_many(key):
            reason = "SMART_AUTOTUNE_MAX_BUCKETS buckets are tuned"
            return self._serve_cold(call, key, device, reason, lasting=True, cold=False)
        return self._tuned_by_one(call, key, device)

    def known(self, key: TuningKey) -> Ranking | None:
        """A ranking counts only while stock's ``cache`` holds its key: clearing the cache forgets it."""
        ranking = self._tuned.get(key)
        return ranking if ranking is not None and key in self._view.autotuner.cache else None

    def _why_not_time(self, call: Call) -> str:
        if call.launch_kwargs.get("warmup"):
            return "this call only compiles"
        if call.launch_kwargs.get("grid") is None and self._times_launches:
            return "there is no grid to time a launch with"
        return ""

    def _is_one_bucket_too_many(self, key: TuningKey) -> bool:
        if key.batch is None:
            return False
        buckets = {other.batch for other in list(self._tuned) if other.rest == key.rest and self.known(other)}
        return len(buckets) >= settings.current().max_buckets

    # ---- kept on disk --------------------------------------------------------------------------------------------

    def _kept(self, call: Call, key: TuningKey, device: DeviceLimits, again: bool = False) -> Ranking | None:
        """The stored ranking, looked up once a key (``again``: once more, after waiting for another process)."""
        if key in self._looked_up and not again:
            return self.known(key)
        kept_here = store.current()
        if kept_here is None:
            return None
        configs, pruned = self._tuning.pruned(call)
        with self._reading.claim(key, READ_SECS):  # who meets the key meanwhile waits: it must not be served cold
            if key in self._tuned or (key in self._looked_up and not again):
                return self.known(key)  # None: who clears stock's cache wants a new tuning, not the old one from disk
            try:
                stored = kept_here.load(key, configs, device)
                return None if stored is None else self._adopt(key, stored, configs, pruned, "stored")
            finally:
                self._looked_up.add(key)

    def _adopt(
        self, key: TuningKey, stored: Stored, configs: Sequence[triton.Config], pruned: Sequence[Verdict], origin: str
    ) -> Ranking | None:
        """An entry as this process's ranking; None where it is unfinished or lacks one of today's configs."""
        covers = not without(configs, [verdict.config for verdict in stored.verdicts])
        verdicts = [v for v in stored.verdicts if v.outcome is not Outcome.PRUNED_BY_USER]  # today's prune decides
        best = next((v for v in verdicts if v.outcome in (Outcome.WON, Outcome.SLOWER)), None)
        if not (stored.complete and covers and best):
            lasting = [v for v in verdicts if v.outcome is not Outcome.OUT_OF_DEVICE_MEMORY]  # that day's memory
            self._partly[key] = [v for v in lasting if stored.complete or not v.fits]
            return None
        won = [replace(v, outcome=Outcome.WON) if v is best else v for v in verdicts]
        batch = f"{key.batch[0]} -> bucket {key.bucket}" if key.batch else "no batch"
        return self._remember(TuningRecord(self._view.kernel_name, key, (*won, *pruned), origin, batch=batch))

    def _remember(self, record: TuningRecord) -> Ranking:
        configs = order_of(record)
        ranking = self._tuned[record.key] = Ranking(record.key, configs, record.served_by, record, lasting=True)
        self._cold.pop(record.key, None)
        self._partly.pop(record.key, None)
        self._view.remember(record, configs[0])
        self._records.tuned(record)
        return ranking

    # ---- tuned now -----------------------------------------------------------------------------------------------

    def _tuned_by_one(self, call: Call, key: TuningKey, device: DeviceLimits) -> Ranking:
        """Of all threads, processes and ranks that meet a cold key one tunes, the others wait.

        A hook's own call never waits.
        """
        nested = getattr(_here, "tuning", 0) > 0
        waited_in_vain = key in self._waited  # once: not at every later call
        wait_secs = 0.0 if nested or waited_in_vain else settings.current().wait_secs
        with self._flight.claim(key, wait_secs) as mine:
            known = self.known(key)
            if known is not None:
                return known
            if not mine:
                reason = "a hook of a running tuning called it" if nested else "another thread is still tuning it"
                return self._serve_cold(call, key, device, reason)
            try:
                with _inside_a_tuning():
                    return self._tuned_by_one_process(call, key, device, wait_secs)
            except NotNow as error:
                return self._serve_cold(call, key, device, str(error))

    def _tuned_by_one_process(self, call: Call, key: TuningKey, device: DeviceLimits, wait_secs: float) -> Ranking:
        kept_here = store.current()
        path = kept_here.path(key) if kept_here is not None and settings.current().share != "off" else None
        with one_process(path, wait_secs) as alone:
            if not alone:
                self._waited.add(key)
                raise NotNow("another process is still tuning it")
            kept = self._kept(call, key, device, again=True)
            if kept is not None:
                return kept
            text = identity.key_text(key) if ranks.is_available() else None
            if text is None:
                return self._tune(call, key, device)
            return self._tuned_by_one_rank(call, key, device, text, wait_secs)

    def _tuned_by_one_rank(
        self, call: Call, key: TuningKey, device: DeviceLimits, text: str, wait_secs: float
    ) -> Ranking:
        with ranks.through_ranks(text, wait_secs) as claim:
            entry = claim.result
            if entry is None and not claim.mine:
                self._waited.add(key)
                raise NotNow("another rank is still tuning it")
            if entry is None:
                ranking = self._tune(call, key, device)
                assert ranking.record is not None
                mine = encode(ranking.record)
                entry = claim.publish(mine)
                if entry is mine:
                    return ranking
        adopted = self._from_rank(call, key, device, entry)
        return adopted or self.known(key) or self._tune(call, key, device)

    def _from_rank(self, call: Call, key: TuningKey, device: DeviceLimits, entry: object) -> Ranking | None:
        configs, pruned = self._tuning.pruned(call)
        try:
            stored = decode(entry, key, configs, device)
        except BadEntry as error:
            log.warning("%s: another rank's tuning is not usable here: %s", self._view.kernel_name, one_line(error))
            return None
        return self._adopt(key, stored, configs, pruned, "another rank")

    def _tune(self, call: Call, key: TuningKey, device: DeviceLimits) -> Ranking:
        kept_here = store.current()

        def checkpoint(record: TuningRecord) -> None:
            if kept_here is not None:
                kept_here.save(record, complete=False)

        settled = [*self._partly.get(key, ()), *settled_by(key.bucket, self._neighbours(key))]
        record = self._tuning.run(call, key, device, settled, checkpoint)
        if kept_here is not None and kept_here.save(record):
            line = recorder.line_of(self._view, call, record)
            if line is not None:
                kept_here.save_call(key, line)
        return self._remember(record)

    def _neighbours(self, key: TuningKey) -> list[TuningRecord]:
        """The records of the nearest smaller and the nearest larger tuned bucket of the same rest of the key."""
        if key.batch is None:
            return []
        rest = key.rest
        tuned = {k.bucket or 0: r.record for k, r in list(self._tuned.items()) if k.rest == rest and self.known(k)}
        smaller = max((bucket for bucket in tuned if bucket < key.batch[1]), default=None)
        larger = min((bucket for bucket in tuned if bucket > key.batch[1]), default=None)
        return [record for bucket in (smaller, larger) if bucket is not None and (record := tuned[bucket])]

    # ---- without tuning ------------------------------------------------------------------------------------------

    def _serve_cold(
        self,
        call: Call,
        key: TuningKey,
        device: DeviceLimits,
        reason: str,
        lasting: bool = False,
        cold: bool = True,
    ) -> Ranking:
        """The nearest tuned key's ranking, else the first config that fits. ``lasting``: not only this once."""
        served = self._cold.get(key)
        near = self._nearest(key)
        if near is not None:
            if served is None or served.origin != near.origin:
                served = self._cold[key] = near
        elif served is None or served.origin != serving.FIRST_THAT_FITS:
            served = Ranking(key, tuple(self._tuning.pruned(call)[0]), serving.FIRST_THAT_FITS)
            fitting = self._first_that_fits(call, served, device)
            served.configs = (fitting, *(c for c in served.configs if c is not fitting))
            self._cold[key] = served
        served.lasting = lasting
        self._records.served_cold(key, served, reason, cold and settings.current().mode != "off")
        return served

    def _nearest(self, key: TuningKey) -> Ranking | None:
        """The nearest bucket's ranking; when frozen, also one of another number in the author's own key."""
        if settings.current().mode in serving.FIRST_FIT_MODES:
            return None
        tuned = [known for known in list(self._tuned) if self.known(known)]
        near = serving.nearest(key, tuned)
        origin = f"nearest bucket {near.bucket}" if near is not None else ""
        if near is None and serving.is_frozen():
            near = serving.nearest(key, tuned, any_number=True)
            origin = f"nearest tuned [{near.describe()}]" if near is not None else ""
        return None if near is None else replace(self._tuned[near], key=key, origin=origin, record=None)


@contextmanager
def _inside_a_tuning() -> Iterator[None]:
    _here.tuning = getattr(_here, "tuning", 0) + 1
    try:
        yield
    finally:
        _here.tuning -= 1
