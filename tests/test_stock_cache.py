"""Stock's results cache on disk: a second process does not time again, and no odd entry reaches the caller."""

from __future__ import annotations

import json
import logging

import pytest
import triton
import triton.language as tl

from smart_autotune import Outcome, settings, smart_autotune
from support.kernels import copy_arguments, fresh, scaled_copy, tile, tile_arguments, tile_product
from support.stub_driver import ScriptedBench, StubDriver, active


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def copying(driver, configs=None, key=("n",), cache_results=True, times=lambda warps: 10.0 - warps, **options):
    """A tuner as a new process has it: nothing in memory, the same folder."""
    bench = ScriptedBench(driver, lambda launch: times(launch.metadata.num_warps))
    configs = configs or [triton.Config({"BLOCK": 64}, num_warps=warps) for warps in (1, 4, 2)]
    return smart_autotune(configs=configs, key=list(key), do_bench=bench, cache_results=cache_results, **options)(
        fresh(scaled_copy)
    )


def entries(folder):
    return sorted(folder.glob("*/*.autotune.json"))


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_second_process_takes_the_times_from_the_entry_and_the_winner_is_its_own_object(sm_120, own_folder, caplog):
    first, second = copying(sm_120), copying(sm_120)
    first[(1,)](*copy_arguments())
    assert len(first.do_bench.timed) == 3 and len(entries(own_folder)) == 1
    second[(1,)](*copy_arguments())
    assert second.do_bench.timed == []
    assert second.best_config is second.configs[1]
    assert len(second.cache) == 1 and next(iter(second.cache.values())) is second.configs[1]
    assert [v.median_us for v in second.records[0].verdicts] == [v.median_us for v in first.records[0].verdicts]
    assert [v.outcome for v in second.records[0].verdicts] == [Outcome.WON, Outcome.SLOWER, Outcome.SLOWER]
    assert warnings_in(caplog) == []


def test_the_environments_switch_does_the_same(sm_120, own_folder, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    for expected in (3, 0):
        kernel = copying(sm_120, cache_results=False)
        kernel[(1,)](*copy_arguments())
        assert len(kernel.do_bench.timed) == expected


def test_without_either_switch_nothing_is_written_and_each_process_times(sm_120, own_folder):
    for _ in range(2):
        kernel = copying(sm_120, cache_results=False)
        kernel[(1,)](*copy_arguments())
        assert len(kernel.do_bench.timed) == 3
    assert entries(own_folder) == []


def test_an_entry_is_not_shared_between_two_caps(own_folder):
    configs = [tile(3), tile(2)]
    winners = []
    for cap in (101_376, 20_000, 30_000):
        with active(StubDriver(120)) as driver, settings.override(shared_bytes_cap=cap):
            bench = ScriptedBench(driver, lambda launch: 5.0 - launch.metadata.num_stages)
            kernel = smart_autotune(
                configs=[*configs, tile(2, warps=8)], key=[], do_bench=bench, cache_results=True
            )(fresh(tile_product))  # fmt: skip
            kernel[(1,)](*tile_arguments())
            winners.append((kernel.best_config.num_stages, len(bench.timed)))
    assert winners == [(3, 3), (2, 2), (2, 2)]
    assert len(entries(own_folder)) == 3


def test_an_entry_is_not_shared_between_two_keys(sm_120, own_folder):
    kernel = copying(sm_120)
    for n in (63, 1000):
        kernel[(1,)](*copy_arguments(n))
    assert len(kernel.do_bench.timed) == 6 and len(entries(own_folder)) == 2


@pytest.mark.parametrize(
    "content",
    ["{", "", "[]", '{"configs_timings": 3}', '{"configs_timings": []}',
     '{"configs_timings": [[{"kwargs": {}}, ["x"]]]}',
     '{"configs_timings": [[{"kwargs": {"BLOCK": 999}}, [1, 1, 1]]]}', '{"configs_timings": [[{"unknown": 1}, [1]]]}',
     "\x00\x01"],
)  # fmt: skip
def test_a_corrupted_entry_is_a_miss_with_one_warning(sm_120, own_folder, caplog, content):
    copying(sm_120)[(1,)](*copy_arguments())
    (entry,) = entries(own_folder)
    entry.write_text(content)
    kernel = copying(sm_120)
    kernel[(1,)](*copy_arguments())
    kernel[(1,)](*copy_arguments())
    assert len(kernel.do_bench.timed) == 3 and kernel.best_config is kernel.configs[1]
    (text,) = warnings_in(caplog)
    assert "scaled_copy" in text and "not usable" in text


def test_an_entry_whose_times_are_no_times_is_a_miss(sm_120, own_folder, caplog):
    copying(sm_120)[(1,)](*copy_arguments())
    (entry,) = entries(own_folder)
    content = json.loads(entry.read_text())
    for _config, times in content["configs_timings"]:
        times[:] = [float("nan")] * 3
    entry.write_text(json.dumps(content))
    kernel = copying(sm_120)
    kernel[(1,)](*copy_arguments())
    assert len(kernel.do_bench.timed) == 3 and kernel.best_config is kernel.configs[1]
    assert len(warnings_in(caplog)) == 1


def test_a_key_value_that_cannot_be_written_is_a_warning_and_the_launch_works(sm_120, own_folder, caplog):
    @triton.jit
    def typed_copy(x, y, n, kind: tl.constexpr, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n).to(kind), mask=offsets < n)

    bench = ScriptedBench(sm_120, lambda launch: 10.0 - launch.metadata.num_warps)
    configs = [triton.Config({"BLOCK": 64}, num_warps=warps) for warps in (1, 4)]
    kernel = smart_autotune(configs=configs, key=["kind"], do_bench=bench, cache_results=True)(typed_copy)
    x, y, *_ = copy_arguments(63)
    for _ in range(2):
        kernel[(1,)](x, y, 63, tl.float32)
    assert len(bench.timed) == 2, "timed once, although nothing could be written"
    assert kernel.best_config is configs[1]
    (text,) = warnings_in(caplog)
    assert "typed_copy" in text and "not written" in text


def test_configs_with_hooks_are_timed_in_each_process_as_with_stock(sm_120, own_folder):
    configs = [triton.Config({"BLOCK": 64}, num_warps=warps, pre_hook=lambda args: None) for warps in (1, 4)]
    for _ in range(2):
        kernel = copying(sm_120, configs)
        kernel[(1,)](*copy_arguments())
        assert len(kernel.do_bench.timed) == 2
    assert entries(own_folder) == []


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_launch(sm_120, own_folder, caplog, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(16, "Device or resource busy")

    kernel = copying(sm_120)
    kernel.warmup(*copy_arguments(), grid=(1,))
    monkeypatch.setattr("triton.runtime.cache.FileCacheManager.put", refuse)
    kernel[(1,)](*copy_arguments())
    assert kernel.best_config is kernel.configs[1] and len(kernel.do_bench.timed) == 3
    (text,) = warnings_in(caplog)
    assert "busy" in text


def test_an_error_of_the_benchmark_is_not_taken_for_one_of_the_cache(sm_120, own_folder, caplog):
    def lost(launch):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernel = copying(sm_120, times=lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel[(1,)](*copy_arguments())
    assert len(kernel.do_bench.timed) == 1, "not tried a second time"
    assert entries(own_folder) == [] and kernel.cache == {}
    assert warnings_in(caplog) == []


def test_a_config_that_fails_while_timed_does_not_come_back_as_a_winner_from_the_entry(sm_120, own_folder):
    def fails_for_4(warps):
        if warps == 4:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        return float(warps)

    for expected in (3, 0):
        kernel = copying(sm_120, times=fails_for_4)
        kernel[(1,)](*copy_arguments())
        assert len(kernel.do_bench.timed) == expected
        assert kernel.best_config is kernel.configs[0]
        assert kernel.records[0].winner.config is kernel.configs[0]
