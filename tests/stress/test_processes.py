"""Real processes on one folder, and real ranks on one group: one tuning a key, one choice for all, nothing lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

from smart_autotune.agreement import one_process
from smart_autotune.store import Store
from support import stored
from support.stored import CONFIGS, LIMITS, LONG_SECS, key, record

PROCESSES = 8


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Children that find everything imported, and are forked from a process without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.stored", "torch.distributed"])
    return context


@pytest.fixture
def started(processes: ForkServerContext) -> Iterator[Any]:
    """Starts children; none outlives its test."""
    children: list[Any] = []

    def start(target: Any, *args: Any) -> Any:
        child = processes.Process(target=target, args=args)
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


def test_processes_on_one_cold_key_tune_once_in_total(
    tmp_path: Path, processes: ForkServerContext, started: Any
) -> None:
    gate, results = processes.Barrier(PROCESSES), processes.Queue()
    for seed in range(PROCESSES):
        started(stored.tune_once, str(tmp_path), gate, seed, results)
    found = [results.get(timeout=LONG_SECS) for _ in range(PROCESSES)]
    assert all(mine for mine, _, _ in found)
    assert sum(tuned for _, tuned, _ in found) == 1
    assert len({winner for _, _, winner in found}) == 1


def test_a_claimer_killed_while_it_tunes_is_superseded(
    tmp_path: Path, processes: ForkServerContext, started: Any
) -> None:
    path, holding = tmp_path / "entry.json", processes.Queue()
    child = started(stored.hold_and_be_killed, str(path), holding)
    assert holding.get(timeout=LONG_SECS)
    with one_process(path, 0.2) as mine:
        assert not mine
    os.kill(child.pid, signal.SIGKILL)
    with one_process(path, LONG_SECS) as mine:
        assert mine


def test_a_claimer_killed_while_others_wait_is_followed_by_one_of_them(
    tmp_path: Path, processes: ForkServerContext, started: Any
) -> None:
    store = Store(tmp_path)
    gate, holding, results = processes.Barrier(4), processes.Queue(), processes.Queue()
    child = started(stored.hold_and_be_killed, str(store.path(key())), holding)
    assert holding.get(timeout=LONG_SECS)
    for seed in range(3):
        started(stored.tune_once, str(tmp_path), gate, seed, results)
    gate.wait(LONG_SECS)
    os.kill(child.pid, signal.SIGKILL)
    found = [results.get(timeout=LONG_SECS) for _ in range(3)]
    assert sum(tuned for _, tuned, _ in found) == 1 and len({winner for _, _, winner in found}) == 1


def test_writers_of_different_keys_lose_nothing(tmp_path: Path, processes: ForkServerContext, started: Any) -> None:
    gate = processes.Barrier(PROCESSES)
    children = [
        started(stored.save_many, str(tmp_path), gate, list(range(n * 20, n * 20 + 20))) for n in range(PROCESSES)
    ]
    for child in children:
        child.join(LONG_SECS)
        assert child.exitcode == 0
    for number in range(PROCESSES * 20):
        found = Store(tmp_path).load(key(number), CONFIGS, LIMITS)
        assert found is not None and found.verdicts[0].median_us == number + 1


def test_writers_of_one_key_leave_one_whole_entry(tmp_path: Path, processes: ForkServerContext, started: Any) -> None:
    gate = processes.Barrier(4)
    children = [started(stored.save_many, str(tmp_path), gate, [7] * 30) for _ in range(4)]
    for child in children:
        child.join(LONG_SECS)
        assert child.exitcode == 0
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    found = Store(tmp_path).load(key(7), CONFIGS, LIMITS)
    assert found is not None and found.verdicts == record(key(7), (8.0, 1e6, 2e6, 3e6)).verdicts


# ---- ranks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["server", "file"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int | str]:
    """Where the ranks of a group find each other: a store that outlives them, as a launcher's does, or a file."""
    if request.param == "file":
        yield str(tmp_path / "rendezvous")
    else:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield store.port


def choices(
    processes: ForkServerContext,
    started: Any,
    meeting: int | str,
    orders: list[list[int]],
    dies_at: dict[int, int] | None = None,
) -> dict[int, dict[int, str]]:
    """What each rank that lives to the end chose; ``orders``: the keys that each meets; ``dies_at``: by rank, where."""
    results, deaths = processes.Queue(), dies_at or {}
    for rank, numbers in enumerate(orders):
        started(stored.rank_meets_keys, rank, len(orders), meeting, numbers, deaths.get(rank), results)
    return dict(results.get(timeout=LONG_SECS) for _ in range(len(orders) - len(deaths)))


def agree(found: dict[int, dict[int, str]]) -> bool:
    keys = {number for chosen in found.values() for number in chosen}
    return all(len({chosen[number] for chosen in found.values() if number in chosen}) == 1 for number in keys)


def test_two_ranks_choose_alike_for_every_key_in_whatever_order_they_meet(
    processes: ForkServerContext, started: Any, meeting: int | str
) -> None:
    found = choices(processes, started, meeting, [list(range(12)), list(reversed(range(12)))])
    assert all(len(chosen) == 12 for chosen in found.values()) and agree(found)


def test_two_ranks_choose_alike_when_each_meets_keys_that_the_other_never_does(
    processes: ForkServerContext, started: Any, meeting: int | str
) -> None:
    found = choices(processes, started, meeting, [[0, 1, 2, 3, 10, 11, 12], [20, 21, 3, 2, 1, 0, 22]])
    assert all(len(chosen) == 7 for chosen in found.values()) and agree(found)


def test_ranks_choose_alike_when_one_of_them_dies_while_it_tunes(
    processes: ForkServerContext, started: Any, meeting: int | str
) -> None:
    orders = [[5, 0, 1, 2, 3], [0, 1, 2, 3, 5, 4], [4, 3, 2, 1, 0, 5]]
    found = choices(processes, started, meeting, orders, dies_at={0: 5})
    assert set(found) == {1, 2} and all(len(chosen) == 6 for chosen in found.values()) and agree(found)
