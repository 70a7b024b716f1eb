"""Ranks share tunings through a key-value store: who tunes, who waits, and that no trouble outlasts its time limit.

Here ranks are threads, each with its own claim, on a real store; real processes are in ``stress/test_processes.py``.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as distributed

from smart_autotune import once, ranks, settings
from smart_autotune.ranks import Claim, is_available, through_ranks

LONG_SECS = 60.0
ENTRY = {"verdicts": [1, "ü", None]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranks, "BEAT_SECS", 0.05)
    monkeypatch.setattr(ranks, "DEAD_SECS", 1.0)
    monkeypatch.setattr(ranks, "STORE_SECS", 5.0)
    once.forget()
    with settings.override(share="ranks"):
        yield
    assert not [thread for thread in threading.enumerate() if thread.name == "smart-autotune-claim"]


@pytest.fixture(params=["TCPStore", "FileStore", "HashStore"])
def group(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a group of two, as far as ``ranks`` can tell."""
    store = {
        "TCPStore": lambda: distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "FileStore": lambda: distributed.FileStore(str(tmp_path / "store"), 2),
        "HashStore": distributed.HashStore,
    }[request.param]()
    in_a_group(monkeypatch, distributed.PrefixStore("default_pg", store))
    return store


def in_a_group(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(ranks, "is_available", lambda: True)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def meanwhile(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def dies_holding(key: str) -> None:
    """A claimer of ``key`` that shows no more signs of life."""
    claim = through_ranks(key, 0)
    assert claim.mine
    claim._end()


# ---- claiming, waiting, publishing ---------------------------------------------------------------------------------


def test_the_first_tunes_and_the_others_get_what_it_published(group: Any) -> None:
    with through_ranks("key", LONG_SECS) as claim:
        assert claim.mine and claim.result is None
        assert claim.publish(ENTRY) is ENTRY
    for wait_secs in (LONG_SECS, 0):
        with through_ranks("key", wait_secs) as other:
            assert not other.mine and other.result == ENTRY


def test_keys_have_nothing_to_do_with_each_other(group: Any) -> None:
    with through_ranks("one", 0) as one, through_ranks("other", 0) as other:
        assert one.mine and other.mine


def test_a_waiting_rank_gets_the_entry_when_it_is_published(group: Any) -> None:
    with through_ranks("key", 0) as claim:
        results: list[Claim] = []
        thread = meanwhile(lambda: results.append(through_ranks("key", LONG_SECS)))
        time.sleep(0.2)
        assert not results
        claim.publish(ENTRY)
        thread.join(LONG_SECS)
    assert [(found.mine, found.result) for found in results] == [(False, ENTRY)]


@pytest.mark.parametrize("wait_secs", [-1, 0, 0.2])
def test_a_wait_that_is_over_leaves_neither_claim_nor_result(group: Any, wait_secs: float) -> None:
    with through_ranks("key", 0) as claim:
        with through_ranks("key", wait_secs) as other:
            assert not other.mine and other.result is None
            assert other.publish({"not": "mine"}) == {"not": "mine"}
        claim.publish(ENTRY)
    assert through_ranks("key", 0).result == ENTRY


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_a_claim_left_unpublished_is_free_for_the_next(group: Any, error: Any) -> None:
    def leave() -> None:
        with through_ranks("key", 0) as claim:
            assert claim.mine
            if error:
                raise error

    for _ in range(3):
        if error:
            with pytest.raises(error):
                leave()
        else:
            leave()
    with through_ranks("key", 0) as claim:
        claim.publish(ENTRY)
    assert through_ranks("key", 0).result == ENTRY


def test_a_waiting_rank_claims_what_was_abandoned(group: Any) -> None:
    with through_ranks("key", 0) as claim:
        results: list[Claim] = []
        thread = meanwhile(lambda: results.append(through_ranks("key", LONG_SECS)))
        time.sleep(0.1)
        claim.abandon()
        thread.join(LONG_SECS)
    with results[0] as found:
        assert found.mine
        found.publish(ENTRY)
    assert through_ranks("key", 0).result == ENTRY


def test_of_many_that_meet_a_key_at_once_one_tunes(group: Any) -> None:
    found: list[tuple[bool, Any]] = []
    start = threading.Barrier(8)

    def meet() -> None:
        start.wait(LONG_SECS)
        with through_ranks("key", LONG_SECS) as claim:
            if claim.mine:
                time.sleep(0.2)
            found.append((claim.mine, claim.publish(ENTRY) if claim.mine else claim.result))

    threads = [meanwhile(meet) for _ in range(8)]
    for thread in threads:
        thread.join(LONG_SECS)
    assert sorted(mine for mine, _ in found) == [False] * 7 + [True]
    assert all(entry == ENTRY for _, entry in found)


# ---- the dead and the slow -----------------------------------------------------------------------------------------


def test_a_dead_claimer_is_superseded(group: Any) -> None:
    dies_holding("key")
    with through_ranks("key", LONG_SECS) as claim:
        assert claim.mine
        claim.publish(ENTRY)
    assert through_ranks("key", 0).result == ENTRY


def test_a_dead_claimer_is_superseded_by_calls_that_never_wait_too(group: Any) -> None:
    dies_holding("key")
    limit = time.monotonic() + LONG_SECS
    while time.monotonic() < limit:
        with through_ranks("key", 0) as claim:
            if claim.mine:
                return
        time.sleep(0.05)
    pytest.fail("nobody may ever tune it")


def test_a_dead_claimer_is_superseded_by_one(group: Any) -> None:
    dies_holding("key")
    found: list[tuple[bool, Any]] = []

    def meet() -> None:
        with through_ranks("key", LONG_SECS) as claim:
            found.append((claim.mine, claim.publish(ENTRY) if claim.mine else claim.result))

    threads = [meanwhile(meet) for _ in range(6)]
    for thread in threads:
        thread.join(LONG_SECS)
    assert [entry for _, entry in found] == [ENTRY] * 6 and sum(mine for mine, _ in found) == 1


def test_a_claimer_that_is_slow_but_alive_is_not_superseded(group: Any) -> None:
    with through_ranks("key", 0) as claim, through_ranks("key", 1.6) as other:
        assert claim.mine and not other.mine and other.result is None


def test_one_that_was_taken_for_dead_and_is_first_all_the_same_counts_for_all(group: Any) -> None:
    slow = through_ranks("key", 0)
    slow._end()
    with through_ranks("key", LONG_SECS) as second:
        assert second.mine
        assert slow.publish({"by": "slow"}) == {"by": "slow"}
        assert second.publish({"by": "second"}) == {"by": "slow"}
    assert through_ranks("key", 0).result == {"by": "slow"}


def test_one_that_was_taken_for_dead_and_comes_late_gets_what_counts(group: Any) -> None:
    slow = through_ranks("key", 0)
    slow._end()
    with through_ranks("key", LONG_SECS) as second:
        second.publish({"by": "second"})
    assert slow.publish({"by": "slow"}) == {"by": "second"}
    slow.abandon()
    assert through_ranks("key", 0).result == {"by": "second"}


# ---- without a group, or with one whose store fails ------------------------------------------------------------------


def test_without_a_group_every_key_is_ours_and_torch_is_not_imported_for_it() -> None:
    assert not is_available()
    for _ in range(2):
        with through_ranks("key", LONG_SECS) as claim:
            assert claim.mine and claim.publish(ENTRY) is ENTRY
    code = (
        "import sys; from smart_autotune import ranks, settings;"
        "from smart_autotune.ranks import *; there = 'torch.distributed' in sys.modules;"
        "scope = settings.override(share='ranks'); scope.__enter__();"
        "assert not ranks.is_available() and ranks.through_ranks('key', 1).mine;"
        "assert ('torch.distributed' in sys.modules) == there"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("share", "size", "expected"), [("ranks", 2, True), ("host", 2, False), ("ranks", 1, False)])
def test_ranks_share_when_they_are_to_and_there_are_several(
    monkeypatch: pytest.MonkeyPatch, share: str, size: int, expected: bool
) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: size)
    with settings.override(share=share):
        assert is_available() is expected


class Failing:
    """A store of which one request fails."""

    def __init__(self, request: str, error: type[Exception]) -> None:
        self._store, self._request, self._error = distributed.HashStore(), request, error

    def __getattr__(self, name: str) -> Any:
        if name == self._request:
            raise self._error("the store is gone")
        return (lambda: self) if name == "clone" else getattr(self._store, name)


@pytest.mark.parametrize("error", [distributed.DistStoreError, distributed.DistNetworkError, RuntimeError, ValueError])
@pytest.mark.parametrize("request_", ["clone", "set_timeout", "compare_set", "set", "add", "get"])
def test_a_store_that_fails_costs_one_warning_and_each_rank_tunes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request_: str, error: Any
) -> None:
    store = Failing(request_, error)
    in_a_group(monkeypatch, store)
    monkeypatch.setattr(distributed.distributed_c10d, "PrefixStore", lambda prefix, store: store)
    for key in ("key", "key", "other"):
        for _ in range(2):
            with through_ranks(key, 0.2) as claim:
                if claim.mine:
                    time.sleep(0.1)
                    assert claim.publish(ENTRY) == ENTRY
                else:
                    assert claim.result == ENTRY
    expected = 0 if request_ == "add" else 1  # signs of life alone: nobody waited
    assert len(warnings(caplog)) == expected


def test_a_server_that_died_costs_one_warning_and_each_rank_tunes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import torch.distributed as d, sys;"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        store = distributed.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        in_a_group(monkeypatch, store)
        with through_ranks("key", 0) as claim:
            server.kill()
            server.wait()
            assert claim.publish(ENTRY) == ENTRY
    finally:
        server.kill()
        server.communicate()
    for key in ("key", "other"):
        with through_ranks(key, LONG_SECS) as claim:
            assert claim.mine
    assert len(warnings(caplog)) == 1


def test_a_group_that_is_gone_takes_its_connection_along(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, before = store.port, len(ranks._connections)
    with monkeypatch.context() as scope:
        in_a_group(scope, store)
        with through_ranks("key", 0) as claim:
            claim.publish(ENTRY)
    del store
    assert len(ranks._connections) == before
    distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
