"""Jobs in parallel: order, failures as values, budgets, and what a stuck job may not do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from smart_autotune import settings
from smart_autotune.settings import SettingsError
from smart_autotune.workers import Batch, TimedOut, worker_count

LONG_SECS = 20.0
SHORT_SECS = 0.2


def nothing() -> None:
    pass


def run(
    jobs: list[Callable[[], Any]],
    budget_secs: float = LONG_SECS,
    prepare: Callable[[], None] = nothing,
    workers: int = 2,
) -> list[Any]:
    with settings.override(compile_workers=workers):
        return Batch(jobs, budget_secs, prepare).run()


def fails(error: BaseException) -> Callable[[], Any]:
    def job() -> Any:
        raise error

    return job


@contextmanager
def stuck() -> Iterator[Callable[[], str]]:
    """A job that does not return before the scope ends; its threads are gone afterwards."""
    release = threading.Event()

    def job() -> str:
        release.wait(LONG_SECS)
        return "too late"

    try:
        yield job
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "smart_autotune-compile":
                thread.join(LONG_SECS)
                assert not thread.is_alive()


# ---- results -------------------------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(delays_ms=st.lists(st.integers(0, 3), max_size=8), workers=st.integers(1, 8))
def test_results_come_in_the_order_of_the_jobs(delays_ms: list[int], workers: int) -> None:
    def job(index: int, delay_ms: int) -> int:
        time.sleep(delay_ms / 1e3)
        return index

    jobs = [lambda index=index, delay=delay: job(index, delay) for index, delay in enumerate(delays_ms)]
    assert run(jobs, workers=workers) == list(range(len(jobs)))


def test_an_exception_is_that_jobs_result_and_nobody_elses() -> None:
    error = RuntimeError("PassManager::run failed")
    assert run([lambda: 0, fails(error), lambda: 2]) == [0, error, 2]


@pytest.mark.parametrize(
    "error", [AssertionError(), MemoryError(), RecursionError(), OSError(28, "no space"), StopIteration()]
)
def test_any_exception_is_a_value(error: Exception) -> None:
    assert run([fails(error)]) == [error]


def test_an_exception_object_that_a_job_returns_is_its_result() -> None:
    error = ValueError()
    assert run([lambda: error]) == [error]


def test_none_is_a_result() -> None:
    assert run([nothing, nothing]) == [None, None]


def test_no_jobs_give_no_results() -> None:
    assert run([]) == []


def test_a_job_that_ends_its_thread_does_not_cost_its_budget() -> None:
    begin = time.monotonic()
    results = run([sys.exit, lambda: 1], budget_secs=2.0)
    assert time.monotonic() - begin < 1.0
    assert isinstance(results[0], BaseException)
    assert results[1] == 1


def test_the_wall_time_of_each_job_is_kept() -> None:
    batch = Batch([nothing, lambda: time.sleep(0.05), fails(ValueError())], LONG_SECS, nothing)
    batch.run()
    assert sorted(batch.secs) == [0, 1, 2]
    assert 0.04 < batch.secs[1] < LONG_SECS
    assert all(secs >= 0 for secs in batch.secs.values())


def test_jobs_run_at_the_same_time() -> None:
    together = threading.Barrier(3)
    assert sorted(run([lambda: together.wait(LONG_SECS)] * 3, workers=3)) == [0, 1, 2]


def test_jobs_do_not_run_in_the_callers_thread_nor_keep_the_process_from_ending() -> None:
    threads = run([threading.current_thread] * 3)
    assert threading.current_thread() not in threads
    assert all(thread.daemon for thread in threads)


# ---- budgets -------------------------------------------------------------------------------------------------------


def test_a_job_over_its_budget_is_timed_out_and_the_others_still_run() -> None:
    with stuck() as job:
        results = run([job, lambda: 1, job, lambda: 3, lambda: 4], SHORT_SECS)
        assert isinstance(results[0], TimedOut) and isinstance(results[2], TimedOut)
        assert [results[1], *results[3:]] == [1, 3, 4]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_as_many_stuck_jobs_as_workers_do_not_stop_the_rest(workers: int) -> None:
    with stuck() as job:
        results = run([job] * workers + [lambda: "done"] * 4, SHORT_SECS, workers=workers)
        assert results[workers:] == ["done"] * 4
        assert all(isinstance(result, TimedOut) for result in results[:workers])


def test_the_budget_is_each_jobs_own_not_that_of_all() -> None:
    def slow() -> str:
        time.sleep(0.6 * SHORT_SECS)
        return "done"

    assert run([slow] * 4, SHORT_SECS, workers=1) == ["done"] * 4


def test_what_a_job_returns_after_its_budget_is_thrown_away() -> None:
    with settings.override(compile_workers=1):
        with stuck() as job:
            batch = Batch([job], SHORT_SECS, nothing)
            results = batch.run()
        assert isinstance(results[0], TimedOut)
        assert isinstance(batch.results[0], TimedOut)  # also now that the job has returned
        assert batch.secs[0] < LONG_SECS / 2


def test_a_timeout_says_how_long_was_waited() -> None:
    with stuck() as job:
        (result,) = run([job], 0.6)
        assert str(result) == "no result after 1 s"


@pytest.mark.parametrize("text", ["1e6", "1e12", "1e300"])
def test_every_budget_that_the_setting_allows_can_be_waited(text: str) -> None:
    try:
        budget_secs = settings._from_environment({"SMART_AUTOTUNE_COMPILE_TIMEOUT_SECS": text}).compile_timeout_secs
    except SettingsError:
        return  # refused with a reason: as good

    def job() -> int:
        time.sleep(0.02)  # the waiter is already waiting
        return 1

    assert run([job], budget_secs) == [1]


# ---- prepare -------------------------------------------------------------------------------------------------------


def test_prepare_runs_once_in_each_thread_before_its_first_job() -> None:
    prepared: list[threading.Thread] = []

    def job() -> bool:
        time.sleep(0.002)
        return prepared.count(threading.current_thread()) == 1

    assert run([job] * 12, prepare=lambda: prepared.append(threading.current_thread()), workers=3) == [True] * 12
    assert len(prepared) == len(set(prepared)) <= 3


def test_a_prepare_that_fails_is_every_jobs_result_and_no_job_runs() -> None:
    error, ran = RuntimeError("no such device"), []
    assert run([lambda: ran.append(1)] * 5, prepare=fails(error)) == [error] * 5
    assert not ran


def test_the_worker_that_replaces_a_stuck_one_is_prepared_too() -> None:
    prepared: list[threading.Thread] = []

    def job() -> bool:
        return threading.current_thread() in prepared

    with stuck() as never:
        results = run([never, job], SHORT_SECS, lambda: prepared.append(threading.current_thread()), workers=1)
        assert results[1] is True
        assert len(prepared) == 2


def test_a_prepare_that_never_returns_is_within_the_budget_too() -> None:
    results: list[Any] = []
    with stuck() as never:

        def prepare() -> None:
            never()

        caller = threading.Thread(target=lambda: results.extend(run([nothing], SHORT_SECS, prepare)))
        caller.start()
        caller.join(5 * SHORT_SECS)
        gave_up = not caller.is_alive()
    caller.join(LONG_SECS)
    assert gave_up
    assert isinstance(results[0], TimedOut)


# ---- how many ------------------------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None)
@hypothesis.given(configured=st.integers(1, 64), jobs=st.integers(0, 64))
def test_the_setting_is_how_many_workers_there_are_but_never_more_than_jobs(configured: int, jobs: int) -> None:
    with settings.override(compile_workers=configured):
        assert worker_count(jobs) == max(1, min(configured, jobs))


def test_by_default_there_is_a_worker_for_each_core_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    with settings.override(compile_workers=0):
        assert worker_count(100) == 3
        assert worker_count(2) == 2


def test_where_affinity_is_not_known_the_number_of_cores_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    with settings.override(compile_workers=0):
        assert worker_count(100) == 5


def test_no_more_workers_than_the_setting_says_run_at_once() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def job() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with lock:
            inside -= 1

    run([job] * 12, workers=3)
    assert 1 <= most <= 3
