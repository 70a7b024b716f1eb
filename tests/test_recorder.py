"""``SMART_AUTOTUNE_LOG``: what a line holds, when it is written, and that it never stands in a launch's way."""

from __future__ import annotations

import gc
import json
import logging
import os
import weakref

import pytest
import torch
import triton

from smart_autotune import NoConfigFits, recorder, replay, settings, smart_autotune
from support import recorded_kernels as kernels
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy, tile, tile_arguments, tile_product
from support.patching import on_the_verified_triton, patched
from support.stub_driver import ScriptedBench, capturing


@pytest.fixture(autouse=True)
def nothing_met():
    recorder.forget()
    yield
    recorder.forget()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tuner(*configs, kernel=tile_product, key=("K",), **options):
    return smart_autotune(configs=list(configs), key=list(key), **options)(fresh(kernel))


# ---- what a line holds -----------------------------------------------------------------------------------------------


def test_a_tuning_is_a_line_with_kernel_place_key_bucket_and_every_verdict(sm_120, log):
    bench = ScriptedBench(sm_120, lambda launch: 1.0 + launch.metadata.num_stages)
    kernel = tuner(tile(3), tile(2), tile(9), tile(3, size=7), do_bench=bench)
    kernel[(1,)](*tile_arguments())
    (line,) = lines(log)
    assert (line["event"], line["kernel"], line["pid"]) == ("tuning", "tile_product", os.getpid())
    assert (line["module"], line["qualname"]) == ("support.kernels", "tile_product")
    assert line["file"].endswith("support/kernels.py") and line["line"] > 1
    assert line["source"] == kernel.fn.cache_key[:16]
    assert line["arguments"] == tile_product.arg_names
    assert line["bucket"] == 64 and line["key"]["values"] == {"K": ["int", 64]}
    assert line["key"]["device"]["arch"] == "sm_120" and line["key"]["text"] == kernel.records[0].key.describe()
    assert (line["served_by"], line["batch"]) == ("tuned", "a -> bucket 64")
    assert [config["outcome"] for config in line["configs"]] == [
        "WON",
        "SLOWER",
        "OVER_SHARED_MEMORY",
        "COMPILE_FAILED",
    ]
    won, slower, over, failed = line["configs"]
    assert won["config"]["num_stages"] == 2 and won["median_us"] == 3000.0 and won["spread_us"]
    assert (slower["need"], slower["limit"], slower["unit"]) == (32_768, 101_376, "bytes")
    assert (won["registers"], won["spill_bytes"]) == (40, 0)  # what the driver's stand-in says
    assert over["need"] > 101_376 and "over the limit" in over["detail"]
    assert "power of 2" in failed["detail"]


def test_the_recorded_recipes_are_those_of_the_call(sm_120, log):
    kernel = tuner(tile(3), tile(2, warps=8), tile(3, maxnreg=128))
    arguments = tile_arguments()
    kernel[(1,)](*arguments)
    (line,) = lines(log)
    binder = replay.Binder(kernel.fn, sm_120.get_current_target())
    for config in line["configs"]:
        options = {name: value for name, value in config["config"].items() if name != "kwargs"}
        expected = binder.recipe(arguments, {**config["config"]["kwargs"], **options})
        found = replay.decode(replay.merged(line["call"], config["own"]), kernel.fn.arg_names)
        assert found == expected
    assert sum("maxnreg" in config["own"]["options"] for config in line["configs"]) == 1


def test_no_value_of_a_tensor_is_written(sm_120, log):
    kernel = tuner(triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}), kernel=scaled_copy, key=["n"])
    kernel[(1,)](torch.full((1000,), 31337.0), torch.zeros(1000), 1000, 2.0)
    assert "31337" not in log.read_text()


def test_what_heuristics_below_the_tuner_make_of_each_config_is_in_its_own_part(sm_90, log):
    heuristic = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
    jit = fresh(kernels.with_a_heuristic.fn)
    configs = [triton.Config({"BLOCK": size}) for size in (64, 1024)]
    smart_autotune(configs=configs, key=["n"])(heuristic(jit))[(1,)](torch.zeros(64), torch.zeros(64), 64)
    (line,) = lines(log)
    evens = {config["config"]["kwargs"]["BLOCK"]: config["own"]["constants"]["EVEN"] for config in line["configs"]}
    assert evens == {64: True, 1024: False}


def test_a_rescued_config_has_a_recipe_with_its_own_stages(sm_120, log):
    tuner(tile(9, warps=8))[(1,)](*tile_arguments())
    line = next(line for line in lines(log) if line["event"] == "tuning")
    rescued = next(config for config in line["configs"] if config["outcome"] == "WON")
    assert rescued["config"]["num_stages"] < 9
    recipe = replay.merged(line["call"], rescued["own"])
    assert recipe["options"]["num_stages"] == rescued["config"]["num_stages"]


def test_a_config_that_the_prune_dropped_is_there_without_a_call(sm_120, log):
    prune = {"early_config_prune": lambda configs, named, **kwargs: configs[:2]}
    tuner(tile(2), tile(3), tile(4), prune_configs_by=prune)[(1,)](*tile_arguments())
    dropped = lines(log)[0]["configs"][-1]
    assert dropped["outcome"] == "PRUNED_BY_USER" and "own" not in dropped and "prune" in dropped["unknown"]


def test_a_kernel_that_is_no_jitted_function_is_recorded_without_its_call(sm_120, log):
    def shape(x, n, BLOCK=1):
        """x: a tensor or None. n: an int."""

    fake = FakeKernel(shape)
    configs = [triton.Config({"BLOCK": size}) for size in (4, 2)]
    smart_autotune(configs=configs, key=["n"], do_bench=fake.bench(lambda values: 1.0))(fake)[(1,)](None, 3)
    (line,) = lines(log)
    assert line["call"] is None and all("unknown" in config for config in line["configs"])


@on_the_verified_triton
def test_a_stock_kernel_that_the_patch_serves_is_recorded_too(sm_120, log):
    stock = triton.autotune(configs=[tile(2), tile(3)], key=["K"])(fresh(tile_product))
    with patched():
        stock[(1,)](*tile_arguments())
    (line,) = lines(log)
    assert line["event"] == "tuning" and line["call"]["signature"]["a"] == "*fp16"


# ---- when a line is written ------------------------------------------------------------------------------------------


def test_each_key_is_written_once_and_a_known_key_not_again(sm_120, log):
    kernel = tuner(tile(2), tile(3))
    for k in (64, 128, 64, 128):
        kernel[(1,)](*tile_arguments(k))
    assert [line["key"]["values"]["K"][1] for line in lines(log)] == [64, 128]


def test_a_ranking_read_from_disk_is_written_with_its_call(sm_120, log, tmp_path):
    with settings.override(cache=True, cache_dir=str(tmp_path / "kept")):
        for _ in range(2):
            tuner(tile(2), tile(3))[(1,)](*tile_arguments())
    first, second = lines(log)
    assert (first["event"], second["event"], second["served_by"]) == ("tuning", "ranking", "stored")
    assert second["call"] == first["call"] is not None


def test_a_key_met_in_a_capture_is_written_once_as_cold_with_its_call_and_again_when_tuned(sm_120, log):
    kernel = tuner(tile(2), tile(3))
    with capturing():
        for _ in range(3):
            kernel[(1,)](*tile_arguments())
    (line,) = lines(log)
    assert (line["event"], line["served_by"]) == ("cold", "first that fits")
    assert line["notes"] == ["a CUDA graph is being captured"]
    assert line["call"]["signature"]["K"] == "i32" and len(line["configs"]) == 2
    assert all("outcome" not in config for config in line["configs"])
    kernel[(1,)](*tile_arguments())
    assert [line["event"] for line in lines(log)] == ["cold", "tuning"]


def test_a_key_served_by_the_nearest_bucket_is_written(sm_120, log, tmp_path):
    kernel = tuner(tile(2), tile(3), batch="stride_a")
    a, b, c, *rest = tile_arguments()
    with settings.override(cache=True, cache_dir=str(tmp_path / "kept"), max_buckets=1):
        kernel[(1,)](a, b, c, 64, *rest[1:])
        kernel[(1,)](a, b, c, 128, *rest[1:])
    first, second = lines(log)
    assert (first["event"], second["event"]) == ("tuning", "cold")
    assert second["served_by"] == "nearest bucket 64" and second["bucket"] == 128
    assert second["call"] is not None


def test_first_fit_mode_writes_a_line_for_each_key_and_times_nothing(sm_120, log):
    with settings.override(mode="first_fit"):
        tuner(tile(2), tile(3))[(1,)](*tile_arguments())
    (line,) = lines(log)
    assert line["event"] == "cold" and line["call"] is not None


def test_a_key_that_no_config_fits_is_written_once(sm_120, log):
    kernel = tuner(tile(9, warps=8), tile(10, warps=8))
    with settings.override(rescue=False):
        for _ in range(2):
            with pytest.raises(NoConfigFits):
                kernel[(1,)](*tile_arguments())
    (line,) = lines(log)
    assert line["event"] == "nothing fits"
    assert [config["outcome"] for config in line["configs"]] == ["OVER_SHARED_MEMORY"] * 2
    assert line["call"] is not None


def test_without_the_setting_nothing_is_worked_out_or_written(sm_120, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("_recipes", "_record", "_fields"):
        monkeypatch.setattr(recorder, name, lambda *args: 1 / 0)
    kernel = tuner(tile(2), tile(3))
    with capturing():
        kernel[(1,)](*tile_arguments())
    kernel[(1,)](*tile_arguments())
    assert list(tmp_path.iterdir()) == []


def test_no_tensor_outlives_its_call(sm_120, log):
    kernel = tuner(triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}), kernel=scaled_copy, key=["n"])
    x, y, n, scale = copy_arguments()
    gone = weakref.ref(x)
    kernel[(1,)](x, y, n, scale)
    del x
    sm_120.launches.clear()
    gc.collect()
    assert lines(log) and gone() is None


def test_calls_whose_key_is_never_settled_are_not_kept_for_ever(sm_120, log, monkeypatch):
    monkeypatch.setattr(recorder, "MOST_MET", 2)
    kernel = tuner(tile(2), tile(3))
    engine = kernel._engine
    for k in (16, 32, 64, 128):
        engine.pruned(engine.call(tile_arguments(k), {}))
    assert len(recorder._met) == 2


# ---- beside the entry of a tuning ------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    """The cache is on, in a folder of this test's own."""
    with settings.override(cache=True, cache_dir=str(tmp_path / "kept")):
        yield tmp_path / "kept"


@pytest.fixture
def worked_out(monkeypatch):
    """How often recipes were."""
    found, original = [], recorder._recipes

    def counted(call, configs):
        found.append(len(configs))
        return original(call, configs)

    monkeypatch.setattr(recorder, "_recipes", counted)
    return found


def files(folder):
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def without_time(line):
    return {name: value for name, value in line.items() if name != "time"}


@pytest.mark.parametrize(
    ("configs", "options"),
    [
        ([tile(3), tile(2), tile(9), tile(3, size=7)], {}),
        ([tile(9, warps=8)], {}),  # is rescued
        (
            [tile(2), tile(3)],
            {"prune_configs_by": {"early_config_prune": lambda configs, named, **kwargs: configs[:1]}},
        ),
    ],
)
def test_a_tuning_keeps_the_line_of_the_log_beside_its_entry(sm_120, cache, tmp_path, configs, options):
    tuner(*configs, **options)[(1,)](*tile_arguments())
    entry, call = sorted(files(cache), key=lambda path: path.suffix, reverse=True)
    assert call == entry.with_suffix(".call") and entry.suffix == ".json"
    with settings.override(cache=False, log=str(tmp_path / "log")):
        tuner(*configs, **options)[(1,)](*tile_arguments())
    (kept,) = lines(call)
    logged = next(line for line in lines(tmp_path / "log") if line["event"] == "tuning")
    measured = ("compile_secs", "timing_secs", "configs")
    assert {**kept, **dict.fromkeys(measured), "time": 0} == {**logged, **dict.fromkeys(measured), "time": 0}
    shown = [
        [(c["config"], c["outcome"], c.get("own"), c.get("unknown")) for c in x["configs"]] for x in (kept, logged)
    ]
    assert sorted(map(str, shown[0])) == sorted(map(str, shown[1])) and kept["call"] is not None


def test_with_a_log_as_well_the_call_is_worked_out_once_and_both_lines_are_equal(sm_120, log, cache, worked_out):
    tuner(tile(2), tile(3))[(1,)](*tile_arguments())
    (kept,) = lines(next(cache.rglob("*.call")))
    (logged,) = lines(log)
    assert without_time(kept) == without_time(logged)
    assert worked_out == [2]


def test_a_restart_that_reads_the_entry_works_out_no_call_and_writes_nothing(sm_120, cache, worked_out):
    tuner(tile(2), tile(3))[(1,)](*tile_arguments())
    before = files(cache)
    assert worked_out == [2] and len(before) == 2
    again = tuner(tile(2), tile(3))
    for _ in range(2):
        again[(1,)](*tile_arguments())
    assert again.records[0].served_by == "stored"
    assert worked_out == [2] and files(cache) == before


def test_launches_of_a_tuned_key_work_out_no_call(sm_120, cache, worked_out):
    kernel = tuner(tile(2), tile(3))
    for _ in range(3):
        kernel[(1,)](*tile_arguments())
    assert worked_out == [2]


def test_an_entry_without_its_call_is_read_as_ever_and_gets_none(sm_120, cache):
    tuner(tile(2), tile(3))[(1,)](*tile_arguments())
    next(cache.rglob("*.call")).unlink()
    again = tuner(tile(2), tile(3))
    again[(1,)](*tile_arguments())
    assert again.records[0].served_by == "stored" and not list(cache.rglob("*.call"))


def test_a_folder_that_takes_nothing_is_one_warning_and_no_call_is_worked_out(sm_120, tmp_path, caplog, worked_out):
    (tmp_path / "kept").write_text("a file")
    with settings.override(cache=True, share="off", cache_dir=str(tmp_path / "kept")):
        kernel = tuner(tile(2), tile(3))
        for k in (64, 128):
            kernel[(1,)](*tile_arguments(k))
    assert len(kernel.records) == 2 and worked_out == []
    assert len([text for text in warnings_in(caplog) if "not kept" in text]) == 1


def test_a_fault_of_ours_costs_the_call_and_not_the_entry(sm_120, cache, caplog, monkeypatch):
    monkeypatch.setattr(recorder, "_place", lambda view: 1 / 0)
    with settings.override(strict=False):
        kernel = tuner(tile(2), tile(3))
        for k in (64, 128):
            kernel[(1,)](*tile_arguments(k))
    assert len(kernel.records) == 2 and {path.suffix for path in files(cache)} == {".json"}
    (warning,) = warnings_in(caplog)
    assert "ZeroDivisionError" in warning and "beside its entry" in warning


# ---- trouble ---------------------------------------------------------------------------------------------------------


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("path", ["/dev/full", "/proc/no/such/file", "{folder}/file/below", "{folder}/pipe"])
def test_a_file_that_takes_no_line_is_one_warning_and_nothing_else(sm_120, tmp_path, caplog, path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")  # nobody reads it
    path = path.format(folder=tmp_path)
    with settings.override(log=path):
        kernel = tuner(tile(2), tile(3))
        for k in (64, 128):
            kernel[(1,)](*tile_arguments(k))
    assert len(kernel.records) == 2
    (warning,) = warnings_in(caplog)
    assert path in warning and "not logged" in warning


def test_a_line_cut_short_is_ended_so_that_the_next_is_whole(sm_120, log, caplog, monkeypatch):
    whole, cut = os.write, []

    def short_once(descriptor, data):
        if not cut:
            cut.append(data)
            return whole(descriptor, data[:10])
        return whole(descriptor, data)

    monkeypatch.setattr(os, "write", short_once)
    kernel = tuner(tile(2), tile(3))
    for k in (64, 128):
        kernel[(1,)](*tile_arguments(k))
    torn, good = log.read_text().splitlines()
    assert torn == '{"format":' and json.loads(good)["event"] == "tuning"
    assert len(warnings_in(caplog)) == 1


def test_a_fault_of_ours_costs_the_line_and_not_the_launch(sm_120, log, caplog, monkeypatch):
    monkeypatch.setattr(recorder, "_place", lambda view: 1 / 0)
    with settings.override(strict=False, log=str(log)):
        kernel = tuner(tile(2), tile(3))
        kernel[(1,)](*tile_arguments())
    assert len(kernel.records) == 1 and len(sm_120.launches) > 0
    (warning,) = warnings_in(caplog)
    assert "ZeroDivisionError" in warning and "SMART_AUTOTUNE_LOG" in warning


def test_a_fault_of_ours_is_raised_under_strict_settings(sm_120, log, monkeypatch):
    monkeypatch.setattr(recorder, "_place", lambda view: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuner(tile(2), tile(3))[(1,)](*tile_arguments())


def test_times_that_are_no_numbers_do_not_make_the_line_unreadable(sm_120, log):
    bench = ScriptedBench(sm_120, lambda launch: 1.0)
    tuner(tile(2), tile(3), do_bench=lambda run, quantiles: [bench(run)[0], float("inf"), float("nan")])[(1,)](
        *tile_arguments()
    )
    assert lines(log)[0]["event"] == "tuning" and "Infinity" not in log.read_text() and "NaN" not in log.read_text()


def test_folders_that_are_not_there_are_made(sm_120, tmp_path):
    with settings.override(log=str(tmp_path / "a" / "b" / "log")):
        tuner(tile(2), tile(3))[(1,)](*tile_arguments())
    assert len(lines(tmp_path / "a" / "b" / "log")) == 1
