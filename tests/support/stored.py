"""Keys, records and a slow tuning to remember and to agree on; importable by child processes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import triton

from smart_autotune import ranks, settings
from smart_autotune.agreement import one_process
from smart_autotune.identity import key_text
from smart_autotune.key import TuningKey
from smart_autotune.limits import DeviceLimits
from smart_autotune.store import Store, decode, encode
from smart_autotune.verdict import Outcome, TuningRecord, Verdict

LONG_SECS = 120.0
LIMITS = DeviceLimits("sm_90", 232_448, multiprocessors=132)


def key(n: object = 512, kind: str = "int", bucket: int | None = 16) -> TuningKey:
    return TuningKey(
        kernel="package.module.decode@0123456789abcdef",
        device=(("arch", "sm_90"), ("shared_bytes", 232_448), ("multiprocessors", 132)),
        values=(("topk", kind, n),),
        dtypes=(("q", "torch.bfloat16"), ("idx", "torch.int32")),
        batch=None if bucket is None else ("q", bucket),
    )


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32) for warps in (4, 8)]


def record(key: TuningKey, times_us: tuple[float, ...] = (3.0, 1.0, 2.0, 4.0), configs=CONFIGS) -> TuningRecord:
    """A tuning in which each config took what ``times_us`` says."""
    order = sorted(range(len(configs)), key=lambda index: times_us[index])
    verdicts = tuple(
        Verdict(
            configs[index], Outcome.WON if rank == 0 else Outcome.SLOWER, 65_536, LIMITS.shared_bytes, "bytes",
            median_us=times_us[index],
        )
        for rank, index in enumerate(order)
    )  # fmt: skip
    return TuningRecord("decode", key, verdicts, "tuned")


def winner_of(found: Any) -> str:
    return str(next(verdict.config for verdict in found.verdicts if verdict.outcome is Outcome.WON))


# ---- what child processes do -------------------------------------------------------------------------------------


def jittered(key: TuningKey, random_numbers: random.Random) -> TuningRecord:
    """A tuning on noisy timings: two of them seldom agree."""
    time.sleep(random_numbers.uniform(0.0, 0.05))
    return record(key, tuple(random_numbers.uniform(1.0, 2.0) for _ in CONFIGS))


def tune_once(folder: str, gate: Any, seed: int, results: Any) -> None:
    """Meets one cold key with others: looks, waits its turn, looks again, tunes slowly."""
    store, met = Store(Path(folder)), key()
    gate.wait(LONG_SECS)
    with one_process(store.path(met), LONG_SECS) as mine:
        found, tuned = store.load(met, CONFIGS, LIMITS), False
        if found is None:
            time.sleep(0.5)
            store.save(jittered(met, random.Random(seed)))
            found, tuned = store.load(met, CONFIGS, LIMITS), True
    assert found is not None
    results.put((mine, tuned, winner_of(found)))


def hold_and_be_killed(path: str, holding: Any) -> None:
    with one_process(Path(path), LONG_SECS) as mine:
        holding.put(mine)
        time.sleep(LONG_SECS)


def save_many(folder: str, gate: Any, numbers: list[int]) -> None:
    store = Store(Path(folder))
    gate.wait(LONG_SECS)
    for number in numbers:
        store.save(record(key(number), (float(number + 1), 1e6, 2e6, 3e6)))


def rank_meets_keys(
    rank: int, size: int, meeting: int | str, numbers: list[int], dies_at: int | None, results: Any
) -> None:
    """One rank of a gloo group: meets ``numbers`` in order, each on its own noise; SIGKILL while it tunes ``dies_at``.

    ``meeting``: the port of a store that the test holds (as a launcher does), or a file's path. Puts (rank, {number:
    winner}) at the end.
    """
    import torch.distributed as distributed

    ranks.BEAT_SECS, ranks.DEAD_SECS = 0.1, 2.0
    if isinstance(meeting, int):
        store = distributed.TCPStore("127.0.0.1", meeting, is_master=False)
    else:
        store = distributed.FileStore(meeting, size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    random_numbers = random.Random(rank)
    chosen: dict[int, str] = {}
    with settings.override(share="ranks", strict=True):
        assert ranks.is_available()
        for number in numbers:
            met = key(number)
            text = key_text(met)
            assert text is not None
            with ranks.through_ranks(text, LONG_SECS) as claim:
                entry = claim.result
                if claim.mine:
                    own = encode(jittered(met, random_numbers))
                    if number == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    entry = claim.publish(own)
            chosen[number] = winner_of(decode(entry, met, CONFIGS, LIMITS))
    results.put((rank, chosen))
