"""Which ranking serves a key: memory, disk, one tuner for all who wait."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

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


def test_stocks_autotuning_lines_are_printed_for_a_tuning_with_its_compiles_and_not_for_a_stored_ranking(
    sm_120, folder, monkeypatch, capsys
):
    """As stock does it: an operator who counts these lines counts the keys that were tuned in this process."""
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
    first = tuned(on_compile=lambda values: time.sleep(0.02) or 64)
    launch(first)
    record = first.records[0]
    assert record.compile_secs >= 0.02
    assert first.bench_time == pytest.approx(record.compile_secs + record.timing_secs)
    printed = capsys.readouterr().out
    assert printed.count("Triton autotuning for function batched") == 1
    assert f"finished after {first.bench_time:.2f}s" in printed
    assert launch(tuned()) == 2
    assert capsys.readouterr().out == ""


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


def test_who_meets_a_key_while_another_thread_looks_it_up_waits_for_the_stored_ranking(sm_120, folder, monkeypatch):
    launch(tuned())
    again = tuned()
    load, reading, go_on = store.Store.load, threading.Event(), threading.Event()

    def slow_load(*args):
        reading.set()
        assert go_on.wait(60)
        return load(*args)

    monkeypatch.setattr(store.Store, "load", slow_load)
    with settings.override(mode="pinned"):
        threads = [threading.Thread(target=launch, args=(again,)) for _ in range(4)]
        threads[0].start()
        assert reading.wait(60)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(0.2)
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert [values["BLOCK"] for values in again.fn.launches] == [2] * 4
    assert again.cold_keys() == [] and again.do_bench.timed == []


def in_child(work):
    """What ``work`` returned in a forked child, as JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture
def reachable_folder():
    """One that every user can reach; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="smart-autotune-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", ["pinned", "tune"])
def test_a_read_only_folder_made_by_another_user_serves_and_nothing_is_said(sm_120, reachable_folder, mode, caplog):
    def make():
        os.environ["HOME"] = "/home/author"
        return launch(tuned())

    def serve():
        caplog.clear()
        os.environ["HOME"] = "/home/server"
        if os.getuid() == 0:
            os.setuid(65_534)  # root may write anywhere
        kernel = tuned()
        served = [launch(kernel), launch(kernel, batch=5)] if mode == "pinned" else [launch(kernel)]
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return served, len(kernel.do_bench.timed), said

    with settings.override(cache=True, cache_dir=str(reachable_folder)):
        assert in_child(make) == 2
        for path in (reachable_folder, *reachable_folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = sorted(reachable_folder.rglob("*"))
        with settings.override(mode=mode):
            served, timed, said = in_child(serve)
    assert served == ([2, 2] if mode == "pinned" else [2])
    assert timed == 0 and said == [] and sorted(reachable_folder.rglob("*")) == before
