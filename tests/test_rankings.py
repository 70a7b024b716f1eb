"""Which ranking serves a key: memory, disk, one tuner for all who wait."""

from __future__ import annotations

import json
import threading

import filelock
import pytest
import torch
import triton

from smart_autotune import freeze, settings, smart_autotune, store
from support.fake_kernel import FakeKernel
from support.stub_driver import StubDriver, active, capturing


def blocks(*sizes):
    return [triton.Config({"BLOCK": size}) for size in sizes]


def batched(x, n, BLOCK=1):
    """x[batch, 1]."""


@pytest.fixture
def folder(tmp_path):
    """The cache is on, in a folder of this test's own."""
    with settings.override(cache=True, cache_dir=str(tmp_path)):
        yield tmp_path


def tuned(sizes=(4, 2, 8), time_ms=lambda values: values["BLOCK"], **options):
    """As a new process would make it: another kernel object of the same name and source."""
    fake = FakeKernel(batched, **options)
    return smart_autotune(configs=blocks(*sizes), key=["n"], do_bench=fake.bench(time_ms))(fake)


def launch(kernel, n=63, batch=3):
    kernel[(1,)](torch.zeros(batch, 1), n)
    return kernel.fn.launches[-1]["BLOCK"]


def entries(folder):
    return sorted(folder.rglob("*.json"))


def test_after_a_restart_nothing_is_timed_and_only_the_winner_is_compiled(sm_120, folder, caplog):
    caplog.set_level("INFO", logger="smart_autotune")
    assert launch(tuned()) == 2
    again = tuned()
    assert launch(again) == 2
    assert again.do_bench.timed == []
    assert {values["BLOCK"] for values in again.fn.compiles} <= {2}
    assert again.records[0].served_by == "stored" and again.best_config is again.configs[1]
    assert any("from stored" in record.getMessage() for record in caplog.records)


def test_a_config_that_is_new_is_the_only_one_timed(sm_120, folder):
    launch(tuned(sizes=(4, 8)))
    more = tuned(sizes=(4, 2, 8))
    assert launch(more) == 2
    assert {values["BLOCK"] for values in more.do_bench.timed} == {2}
    assert sum(verdict.median_us is not None for verdict in more.records[0].verdicts) == 3


def test_a_config_that_is_gone_does_not_serve(sm_120, folder):
    launch(tuned(sizes=(4, 2, 8)))
    fewer = tuned(sizes=(4, 8))
    assert launch(fewer) == 4


def test_another_cap_is_another_entry(folder):
    for cap in (101_376, 60_000):
        with active(StubDriver(120, shared_bytes=cap)):
            kernel = tuned(on_compile=lambda values: 80_000 if values["BLOCK"] == 2 else 64)
            assert launch(kernel) == (2 if cap > 80_000 else 4)
            assert kernel.do_bench.timed != []
    assert len(entries(folder)) == 2


def test_the_cache_can_be_turned_off(sm_120, folder):
    with settings.override(cache=False):
        launch(tuned())
        again = tuned()
        launch(again)
    assert len(again.do_bench.timed) == 3 and entries(folder) == []


def test_clearing_stocks_cache_means_tuning_again_and_not_the_old_entry(sm_120, folder):
    kernel = tuned()
    launch(kernel)
    kernel.cache.clear()
    launch(kernel)
    assert len(kernel.do_bench.timed) == 6


def test_clearing_stocks_cache_frees_the_buckets(sm_120):
    kernel = tuned()
    with settings.override(max_buckets=2):
        for batch in (1, 16):
            launch(kernel, batch=batch)
        kernel.cache.clear()
        for batch in (16, 1):
            launch(kernel, batch=batch)
    assert len(kernel.cache) == 2


def test_a_broken_entry_is_tuned_over_with_one_warning(sm_120, folder, caplog):
    launch(tuned())
    (entry,) = entries(folder)
    entry.write_text(entry.read_text()[:-20])
    again = tuned()
    assert launch(again) == 2 and len(again.do_bench.timed) == 3
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert entry.name in warning.getMessage()
    json.loads(entry.read_text())


def test_what_an_unfinished_sweep_found_out_is_not_found_out_again(sm_120, folder):
    def fails(values):
        if values["BLOCK"] == 4:
            raise RuntimeError("PassManager::run failed")
        return 64

    first = tuned(on_compile=fails)
    launch(first)
    store.current().save(first.records[0], complete=False)
    again = tuned(on_compile=fails)
    assert launch(again) == 2
    assert {values["BLOCK"] for values in again.fn.compiles} == {2, 8}
    assert {values["BLOCK"] for values in again.do_bench.timed} == {2, 8}, "an unfinished entry's times do not count"


@pytest.mark.parametrize("mode", ["pinned", "first_fit"])
def test_pinned_serves_the_stored_ranking_and_first_fit_does_not(sm_120, folder, mode):
    launch(tuned())
    again = tuned()
    with settings.override(mode=mode):
        assert launch(again) == (2 if mode == "pinned" else 4)
    assert again.do_bench.timed == []


def test_inside_a_capture_and_when_frozen_the_stored_ranking_serves(sm_120, folder):
    launch(tuned())
    again = tuned()
    with capturing():
        assert launch(again) == 2
    frozen = tuned()
    freeze()
    assert launch(frozen) == 2
    assert again.cold_keys() == frozen.cold_keys() == []


def test_while_another_process_tunes_the_key_it_is_served_cold_after_the_wait(sm_120, folder, caplog):
    kernel = tuned()
    launch(kernel)
    path = store.current().path(next(iter(kernel.cache)))
    path.unlink()
    waiting = tuned()
    with filelock.FileLock(str(path) + ".lock"), settings.override(wait_secs=0.05):
        assert launch(waiting) == 4
    assert waiting.do_bench.timed == [] and len(waiting.cold_keys()) == 1
    assert "another process is still tuning it" in caplog.text
    assert launch(waiting) == 2 and waiting.cold_keys() == []


def test_not_sharing_means_no_lock(sm_120, folder):
    kernel = tuned()
    launch(kernel)
    path = store.current().path(next(iter(kernel.cache)))
    path.unlink()
    with filelock.FileLock(str(path) + ".lock"), settings.override(wait_secs=0.05, share="off"):
        assert launch(tuned()) == 2


def test_what_another_process_tuned_meanwhile_is_taken_over(sm_120, folder):
    first = tuned()
    launch(first)
    path = store.current().path(next(iter(first.cache)))
    content = path.read_text()
    path.unlink()
    waiting = tuned()
    lock = filelock.FileLock(str(path) + ".lock", thread_local=False)
    lock.acquire()
    served = []
    thread = threading.Thread(target=lambda: served.append(launch(waiting)))
    thread.start()
    path.write_text(content)
    lock.release()
    thread.join(60)
    assert served == [2] and waiting.do_bench.timed == []
