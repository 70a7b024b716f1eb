"""Many threads, re-entrant hooks: one tuning a key, no deadlock (the suite's timeout), no exception."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from smart_autotune import settings, smart_autotune
from support.fake_kernel import FakeKernel
from support.kernels import fresh, tile, tile_arguments, tile_product
from support.stub_driver import ScriptedBench

THREADS = 8


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def tuned(fake, sizes=(4, 2, 8), **options):
    options.setdefault("do_bench", fake.bench(lambda values: values["BLOCK"]))
    return smart_autotune(configs=[triton.Config({"BLOCK": size}) for size in sizes], key=["n"], **options)(fake)


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs each job in a thread of its own, all let go by one barrier; results in order, the first error raised."""
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(index: int, job: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            results[index] = job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]
    return results


def test_of_many_threads_on_one_cold_key_one_tunes_and_all_get_its_best(sm_120):
    fake = FakeKernel(shape, on_launch=lambda values: time.sleep(0.001))
    kernel = tuned(fake)
    at_once(*[lambda: kernel[(1,)](None, 63)] * THREADS)
    assert len(kernel.do_bench.timed) == 3 and len(kernel.records) == 1
    by_thread = {}
    for launch in fake.launches:
        by_thread.setdefault(launch["thread"], []).append(launch["BLOCK"])
    assert len(by_thread) == THREADS
    assert {blocks[-1] for blocks in by_thread.values()} == {2}
    assert sorted(len(blocks) for blocks in by_thread.values()) == [1] * (THREADS - 1) + [4]


def test_of_many_threads_on_a_real_kernel_one_tunes(sm_120):
    bench = ScriptedBench(sm_120, lambda launch: float(launch.metadata.num_stages))
    kernel = smart_autotune(configs=[tile(3), tile(2), tile(8)], key=[], do_bench=bench)(fresh(tile_product))
    stages = at_once(*[lambda: kernel[(1,)](*tile_arguments()).metadata.num_stages] * THREADS)
    assert stages == [2] * THREADS
    assert len(bench.timed) == 2 and len(sm_120.launches) == 2 + THREADS


def test_many_threads_on_different_keys_each_get_their_own_best(sm_120):
    fake = FakeKernel(shape, on_launch=lambda values: time.sleep(0.001))
    bench = fake.bench(lambda values: abs(values["BLOCK"] - values["n"]) + 1.0)
    kernel = tuned(fake, sizes=tuple(range(1, THREADS + 1)), do_bench=bench)
    blocks = at_once(
        *[lambda n=n: kernel[(1,)](None, n).values["BLOCK"] for n in range(1, THREADS + 1)],
        *[lambda n=n: kernel[(1,)](None, n).values["BLOCK"] for n in range(THREADS, 0, -1)],
    )
    assert blocks == [*range(1, THREADS + 1), *range(THREADS, 0, -1)]
    assert len(kernel.records) == THREADS and len(bench.timed) == THREADS * THREADS


def test_two_keys_are_never_timed_at_the_same_time(sm_120):
    running, most = [0], [0]
    fake = FakeKernel(shape)

    def bench(run, quantiles):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.005)
        run()
        running[0] -= 1
        return 1.0

    kernel = tuned(fake, do_bench=bench)
    at_once(*[lambda n=n: kernel[(1,)](None, n) for n in range(4)])
    assert most == [1]


def test_a_warm_thread_goes_on_beside_one_that_tunes(sm_120):
    tuning, warm_done = threading.Event(), threading.Event()
    fake = FakeKernel(shape)

    def time_ms(values):
        if values["n"] == 100:
            tuning.set()
            assert warm_done.wait(60), "the warm thread waited for the tuning"
        return values["BLOCK"]

    kernel = tuned(fake, do_bench=fake.bench(time_ms))
    kernel[(1,)](None, 63)

    def tunes():
        return kernel[(1,)](torch.zeros(3), n=100).values["BLOCK"]

    def warm():
        assert tuning.wait(60)
        blocks = [kernel[(1,)](None, n=63).values["BLOCK"] for _ in range(50)]
        warm_done.set()
        return blocks

    found = at_once(tunes, warm)
    assert found == [2, [2] * 50]
    assert len(kernel.records) == 2


def test_a_thread_that_has_waited_long_enough_serves_cold(sm_120, caplog):
    timing, waited = threading.Event(), threading.Event()
    fake = FakeKernel(shape)

    def bench(run, quantiles):
        run()
        timing.set()
        assert waited.wait(60)
        return float(fake.launches[-1]["BLOCK"])

    kernel = tuned(fake, do_bench=bench)

    def second():
        assert timing.wait(60)
        block = kernel[(1,)](None, 63).values["BLOCK"]
        waited.set()
        return block

    with settings.override(wait_secs=0.05):
        assert at_once(lambda: kernel[(1,)](None, 63).values["BLOCK"], second) == [2, 4]
    assert any("another thread is still tuning it" in record.getMessage() for record in caplog.records)
    assert len(kernel.records) == 1 and kernel.cold_keys() == []


def test_when_the_tuning_thread_fails_the_next_one_tunes(sm_120):
    attempts = []
    fake = FakeKernel(shape)

    def prune(configs, named, **kwargs):
        attempts.append(threading.get_ident())
        if len(attempts) == 1:
            raise KeyError("the first attempt")
        return configs

    kernel = tuned(fake, prune_configs_by={"early_config_prune": prune})

    def job():
        try:
            return kernel[(1,)](None, 63).values["BLOCK"]
        except KeyError:
            return "failed"

    assert sorted(at_once(*[job] * 4), key=str) == [2, 2, 2, "failed"]
    assert len(attempts) == 2


@pytest.mark.parametrize("same_key", [True, False])
@pytest.mark.parametrize("place", ["tuner", "config"])
def test_a_hook_that_calls_the_kernel_again_neither_deadlocks_nor_breaks_the_tuning(sm_120, same_key, place):
    depth = [0]

    def again(arguments, reset_only=False):
        if depth[0] == 0:
            depth[0] += 1
            try:
                kernel[(1,)](None, 63 if same_key else 100)
            finally:
                depth[0] -= 1

    fake = FakeKernel(shape)
    options = {"pre_hook": again} if place == "tuner" else {}
    hook = again if place == "config" else None
    configs = [triton.Config({"BLOCK": size}, pre_hook=hook) for size in (4, 2, 8)]
    kernel = smart_autotune(configs=configs, key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]), **options)(fake)
    assert kernel[(1,)](None, n=63).values["BLOCK"] == 2
    assert len(kernel.records) == (1 if same_key else 2)
    assert kernel.nargs is None
    assert kernel[(1,)](None, n=63).values["BLOCK"] == 2


def test_threads_whose_hooks_call_the_other_ones_key_do_not_wait_for_each_other(sm_120):
    local = threading.local()

    def calls_the_other(arguments, reset_only=False):
        if not getattr(local, "inside", False):
            local.inside = True
            try:
                kernel[(1,)](None, 163 - arguments["n"])
            finally:
                local.inside = False

    fake = FakeKernel(shape, on_launch=lambda values: time.sleep(0.001))
    kernel = tuned(fake, pre_hook=calls_the_other)
    found = at_once(lambda: kernel[(1,)](None, n=63).values["BLOCK"], lambda: kernel[(1,)](None, n=100).values["BLOCK"])
    assert found == [2, 2] and len(kernel.records) == 2


def test_restored_values_of_threads_on_different_keys_do_not_mix(sm_120):
    fake = FakeKernel(shape, on_launch=lambda values: (values["x"].add_(1), time.sleep(0.001)))
    kernel = tuned(fake, restore_value=["x"], batch=None)
    tensors = [torch.full((3,), float(10 * n)) for n in range(THREADS)]
    at_once(*[lambda n=n: kernel[(1,)](tensors[n], n) for n in range(THREADS)])
    assert [x.tolist() for x in tensors] == [[10.0 * n + 1] * 3 for n in range(THREADS)]


def test_a_prune_of_one_thread_never_sees_the_arguments_of_another(sm_120):
    mixed = []

    def prune(configs, named, **kwargs):
        before = named["n"]
        time.sleep(0.005)
        if named["n"] != before or kernel.nargs not in (None, named):
            mixed.append(named)
        return configs

    kernel = tuned(FakeKernel(shape), prune_configs_by={"early_config_prune": prune})
    at_once(*[lambda n=n: kernel[(1,)](None, n) for n in range(THREADS)])
    assert mixed == [] and len(kernel.records) == THREADS
