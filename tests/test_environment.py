"""Every environment variable, read from the environment, changes what happens. None is wired to nothing.

For each variable: the value that is tried, and a scene that is played without it and with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
import time

import pytest
import torch
import triton

from smart_autotune import NoConfigFits, Outcome, bench, gpu_bench, settings, smart_autotune, thaw
from smart_autotune.patches import sglang as sglang_patch
from smart_autotune.patches import startup
from support import fake_sglang
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy, tile, tile_arguments, tile_product
from support.patching import on_the_verified_triton, put_back

VARIABLES = [
    "SMART_AUTOTUNE",
    *(f"SMART_AUTOTUNE_{setting.name.upper()}" for setting in dataclasses.fields(settings.Settings)),
]


def blocks(*sizes):
    return [triton.Config({"BLOCK": size}) for size in sizes]


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def tuner(fake=None, configs=None, time_ms=lambda values: values["BLOCK"], **options):
    fake = fake or FakeKernel(shape)
    options.setdefault("do_bench", fake.bench(time_ms))
    return smart_autotune(configs=configs or blocks(4, 2, 8), key=["n"], **options)(fake)


def rows(count):
    return torch.zeros(count, 4)


def outcomes(kernel):
    return [str(verdict.outcome) for verdict in kernel.records[-1].verdicts]


SCENES = {}  # by variable: the value to try, and the scene


def scene(variable, value):
    def add(function):
        SCENES[variable] = (value, function)
        return function

    return add


# ---- the scenes: what each returns differs with its variable ---------------------------------------------------------


@scene("SMART_AUTOTUNE", "1")
def stock_tuners_are_served_by_us(monkeypatch, folder):
    monkeypatch.setattr(startup, "_registered", False)
    with put_back():
        startup.activate()
        return hasattr(triton.runtime.autotuner.Autotuner.run, "_smart_autotune_patch")


@scene("SMART_AUTOTUNE_MODE", "first_fit")
def whether_anything_is_timed(monkeypatch, folder):
    kernel = tuner()
    kernel[(1,)](None, 100)
    return len(kernel.do_bench.timed), kernel.best_config.kwargs


@scene("SMART_AUTOTUNE_BATCH", "off")
def how_often_it_tunes_when_only_the_batch_differs(monkeypatch, folder):
    kernel = tuner()
    for count in (1, 64):
        kernel[(1,)](rows(count), 100)
    return len(kernel.records)


@scene("SMART_AUTOTUNE_DETERMINISTIC", "1")
def whether_the_batch_selects_a_config(monkeypatch, folder):
    return how_often_it_tunes_when_only_the_batch_differs(monkeypatch, folder)


@scene("SMART_AUTOTUNE_MAX_BUCKETS", "1")
def how_many_buckets_are_tuned(monkeypatch, folder):
    return how_often_it_tunes_when_only_the_batch_differs(monkeypatch, folder)


@scene("SMART_AUTOTUNE_CACHE", "0")
def whether_the_next_process_times_again(monkeypatch, folder):
    monkeypatch.setenv("SMART_AUTOTUNE_CACHE_DIR", str(folder))
    timed = []
    for _ in range(2):  # a process each, as far as this kernel's memory goes
        kernel = smart_autotune(configs=[tile(2), tile(3)], key=[], do_bench=counted(timed))(fresh(tile_product))
        kernel[(1,)](*tile_arguments())
    return len(timed)


def counted(timed):
    def do_bench(run, quantiles):
        run()
        timed.append(run)
        return 1.0

    return do_bench


@scene("SMART_AUTOTUNE_CACHE_DIR", "given")
def whether_tunings_are_kept_in_the_folder_that_was_named(monkeypatch, folder):
    monkeypatch.setenv("SMART_AUTOTUNE_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "default"))
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[], do_bench=counted([]))(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*.json")})


@scene("SMART_AUTOTUNE_SHARE", "off")
def whether_an_entry_is_locked_against_other_processes_while_it_is_tuned(monkeypatch, folder):
    monkeypatch.setenv("SMART_AUTOTUNE_CACHE", "1")
    monkeypatch.setenv("SMART_AUTOTUNE_CACHE_DIR", str(folder))
    locks = []

    def do_bench(run, quantiles):
        run()
        locks.extend(path.suffix for path in folder.rglob("*.lock"))
        return 1.0

    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[], do_bench=do_bench)(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    return bool(locks)


@scene("SMART_AUTOTUNE_WAIT_SECS", "0.01")
def whether_a_thread_outwaits_another_ones_tuning(monkeypatch, folder):
    timing, served = threading.Event(), threading.Event()

    def do_bench(run, quantiles):
        run()
        timing.set()
        served.wait(0.5)  # set once the other thread was served without waiting for the end
        return 1.0

    kernel = tuner(configs=blocks(4, 2), do_bench=do_bench)
    tuning = threading.Thread(target=lambda: kernel[(1,)](None, 100))
    tuning.start()
    timing.wait(30)
    kernel[(1,)](None, 100)
    while_tuning = tuning.is_alive() and not kernel.records
    served.set()
    tuning.join(30)
    return while_tuning


@scene("SMART_AUTOTUNE_COMPILE_WORKERS", "1")
def how_many_threads_compile(monkeypatch, folder):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    together, meeting = [], threading.Barrier(2)

    def compiles(values):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(1)
            together.append(values["BLOCK"])

    tuner(FakeKernel(shape, on_compile=compiles), blocks(4, 2))[(1,)](None, 100)
    return bool(together)


@scene("SMART_AUTOTUNE_COMPILE_TIMEOUT_SECS", "0.05")
def whether_a_slow_compile_is_given_up(monkeypatch, folder):
    def compiles(values):
        if values["BLOCK"] == 2:
            time.sleep(0.6)

    kernel = tuner(FakeKernel(shape, on_compile=compiles))
    kernel[(1,)](None, 100)
    return outcomes(kernel).count(str(Outcome.COMPILE_TIMEOUT))


@scene("SMART_AUTOTUNE_BUDGET_SECS", "0.000001")
def whether_timing_ends_before_all_are_timed(monkeypatch, folder):
    kernel = tuner()
    kernel[(1,)](None, 100)
    return len(kernel.do_bench.timed)


@scene("SMART_AUTOTUNE_BENCH", "graph")
def whether_candidates_are_replayed_from_a_graph(monkeypatch, folder):
    """Here without a GPU: which of the two ways the benchmark asks for."""
    ways = []
    monkeypatch.setattr(gpu_bench, "in_graph", lambda run: ways.append("graph") or run)
    kernel = tuner()
    engine = kernel._engine
    call = engine.call((None, 100), {"grid": (1,)})
    with contextlib.ExitStack() as scope:
        bench.GpuBench(engine.view, call, None, None, scope)._run(kernel.configs[0])
    return ways


@scene("SMART_AUTOTUNE_RESCUE", "0")
def what_happens_when_nothing_fits(monkeypatch, folder):
    kernel = smart_autotune(configs=[tile(9, warps=8)], key=[])(fresh(tile_product))
    try:
        kernel[(1,)](*tile_arguments())
    except NoConfigFits:
        return "an error"
    return kernel.best_config.num_stages < 9


@scene("SMART_AUTOTUNE_LOG", "given")
def whether_a_tuning_leaves_a_line_in_the_file_that_was_named(monkeypatch, folder):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[], do_bench=counted([]))(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    return [path.read_text().count("\n") for path in folder.rglob("*") if path.is_file()]


@scene("SMART_AUTOTUNE_SPARSE_DECODE", "force")
def whether_sglangs_decode_is_ours(monkeypatch, folder):
    with fake_sglang.loaded(monkeypatch, folder):
        sglang_patch.apply()
        return hasattr(importlib.import_module(fake_sglang.ENTRY_MODULE).flash_mla_with_kvcache_sm120, "__wrapped__")


@scene("SMART_AUTOTUNE_FREEZE_AFTER_CAPTURE", "1")
def whether_a_server_that_is_ready_still_tunes(monkeypatch, folder):
    with fake_sglang.loaded(monkeypatch, folder):
        sglang_patch.apply()
        importlib.import_module(fake_sglang.SCHEDULER_MODULE).Scheduler().get_init_info()
    kernel = tuner()
    kernel[(1,)](None, 100)
    thaw()
    return len(kernel.do_bench.timed)


@scene("SMART_AUTOTUNE_SHARED_BYTES_CAP", "20000")
def what_fits_this_device(monkeypatch, folder):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    return outcomes(kernel)


@scene("SMART_AUTOTUNE_STRICT", "1")
def what_becomes_of_a_fault_of_our_own(monkeypatch, folder):
    kernel = smart_autotune(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
    monkeypatch.setattr(kernel._engine, "call", lambda *args: 1 / 0)
    try:
        kernel[(1,)](*copy_arguments())
    except ZeroDivisionError:
        return "raised"
    return "stock served"


# ---- the tests -------------------------------------------------------------------------------------------------------


# Without the Triton that the patch is for there is nothing to turn on.
EACH = pytest.mark.parametrize(
    "variable",
    [pytest.param(name, marks=on_the_verified_triton if name == "SMART_AUTOTUNE" else ()) for name in VARIABLES],
)


def played(variable, value, monkeypatch, folder):
    """The scene in a process that has not read its settings yet and has no other variable of ours."""
    folder.mkdir()
    with monkeypatch.context() as scope:
        for other in VARIABLES:
            scope.delenv(other, raising=False)
        scope.setenv("SMART_AUTOTUNE_CACHE", "0")
        if value is not None:
            scope.setenv(variable, str(folder / "given") if value == "given" else value)
        elif variable == "SMART_AUTOTUNE_CACHE":
            scope.delenv(variable)
        scope.setattr(settings, "_current", None)
        return SCENES[variable][1](scope, folder)


def test_every_variable_has_a_scene_and_every_scene_a_variable():
    assert set(SCENES) == set(VARIABLES)


@EACH
def test_every_variable_changes_what_happens(sm_120, monkeypatch, tmp_path, variable):
    value, _ = SCENES[variable]
    without = played(variable, None, monkeypatch, tmp_path / "without")
    with_it = played(variable, value, monkeypatch, tmp_path / "with")
    assert with_it != without


@EACH
def test_no_scene_differs_from_itself(sm_120, monkeypatch, tmp_path, variable):
    first = played(variable, None, monkeypatch, tmp_path / "first")
    assert played(variable, None, monkeypatch, tmp_path / "second") == first
