"""What is kept and said of each tuning: records, cold keys, one shape of log line."""

from __future__ import annotations

import gc
import logging
import re

import pytest
import torch
import triton

import smart_autotune as package
from smart_autotune import Outcome, TuningRecord, history, settings, smart_autotune
from support.fake_kernel import FakeKernel
from support.kernels import fresh, tile, tile_arguments, tile_product
from support.stub_driver import capturing


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def tuned(fake=None, sizes=(4, 2, 8, 16), **options):
    fake = fake or FakeKernel(shape, on_compile=lambda values: 200_704 if values["BLOCK"] == 16 else 1024)
    options.setdefault("do_bench", fake.bench(lambda values: values["BLOCK"]))
    return smart_autotune(configs=[triton.Config({"BLOCK": size}) for size in sizes], key=["n"], **options)(fake)


def test_the_info_line_of_a_tuning_says_everything_an_operator_asks(sm_120, caplog):
    caplog.set_level(logging.INFO, logger="smart_autotune")
    kernel = tuned()
    kernel[(1,)](torch.zeros(3), 63)
    kernel[(1,)](torch.zeros(3), 63)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        r"shape: tuned \[n=63 x:float32 batch\(x\)<=4 on sm_120 \(101376 B\)\]: offered=4 dropped=OVER_SHARED_MEMORY 1 "
        r"timed=3 winner=\[BLOCK=2, num_warps=4, num_stages=3\] median=2000\.0 us "
        r"\(compile \d+\.\d s, timing \d+\.\d s\)",
        line,
    )


def test_the_debug_lines_are_one_a_verdict_with_need_limit_and_unit(sm_120, caplog):
    caplog.set_level(logging.DEBUG, logger="smart_autotune")
    tuned()[(1,)](None, 63)
    lines = [record.getMessage() for record in caplog.records if "outcome=" in record.getMessage()]
    assert len(lines) == 4
    (over,) = [line for line in lines if "OVER_SHARED_MEMORY" in line]
    assert "BLOCK=16" in over and "need=200704 limit=101376 unit=bytes" in over
    assert {record.levelname for record in caplog.records if "outcome=" in record.getMessage()} == {"DEBUG"}


def test_a_library_sets_no_handler_and_no_level():
    logger = logging.getLogger("smart_autotune")
    assert logger.handlers == [] and logger.level == logging.NOTSET and logger.propagate


def test_the_record_holds_key_verdicts_times_and_who_served(sm_120):
    kernel = tuned()
    kernel[(1,)](torch.zeros(3), 63)
    (record,) = kernel.records
    assert isinstance(record, TuningRecord)
    assert (record.kernel, record.served_by) == ("shape", "tuned")
    assert record.key in kernel.cache
    assert record.winner.config is kernel.best_config and record.winner.median_us == 2000.0
    assert [(str(v.outcome), v.config.kwargs["BLOCK"]) for v in record.verdicts] == [
        ("WON", 2), ("SLOWER", 4), ("SLOWER", 8), ("OVER_SHARED_MEMORY", 16),
    ]  # fmt: skip
    assert record.compile_secs >= 0 and record.timing_secs >= 0
    assert all(v.compile_secs is not None for v in record.verdicts)


def test_every_config_has_exactly_one_verdict_whatever_became_of_it(sm_120):
    def fails(values):
        if values["BLOCK"] == 8:
            raise RuntimeError("invalid argument")

    fake = FakeKernel(shape, lambda values: 200_704 if values["BLOCK"] == 16 else 1024, fails)
    prune = {"early_config_prune": lambda configs, named, **kwargs: configs[1:]}
    kernel = tuned(fake, sizes=(1, 4, 2, 8, 16), prune_configs_by=prune)
    kernel[(1,)](None, 63)
    found = {v.config.kwargs["BLOCK"]: v.outcome for v in kernel.records[-1].verdicts}
    assert len(kernel.records[-1].verdicts) == 5
    assert found == {
        1: Outcome.PRUNED_BY_USER, 4: Outcome.SLOWER, 2: Outcome.WON, 8: Outcome.LAUNCH_FAILED,
        16: Outcome.OVER_SHARED_MEMORY,
    }  # fmt: skip


def test_records_of_all_kernels_are_in_one_list_oldest_first(sm_120):
    first, second = tuned(), tuned()
    second[(1,)](None, 63)
    first[(1,)](None, 63)
    second[(1,)](None, 100)
    mine = [record for record in package.records() if record in [*first.records, *second.records]]
    assert [record.key.values[0][2] for record in mine] == [63, 63, 100]
    assert mine == [second.records[0], first.records[0], second.records[1]]


def test_a_key_tuned_again_has_one_record_the_newest(sm_120):
    kernel = tuned()
    for n in (63, 100):
        kernel[(1,)](None, n)
    kernel.cache.clear()
    kernel[(1,)](None, 63)
    assert [record.key.values[0][2] for record in kernel.records] == [100, 63]


def test_records_of_a_kernel_go_with_it(sm_120):
    kernel = tuned()
    kernel[(1,)](None, 63)
    gc.collect()
    before = len(package.records())
    del kernel
    gc.collect()
    assert len(package.records()) == before - 1


def test_cold_keys_of_all_kernels_are_in_one_list_until_they_are_tuned(sm_120):
    kernels = [tuned(), tuned()]
    with capturing():
        for kernel in kernels:
            kernel[(1,)](None, 63)
    keys = [key for kernel in kernels for key in kernel.cold_keys()]
    assert len(keys) == 2 and all(key in package.cold_keys() for key in keys)
    kernels[0][(1,)](None, 63)
    assert kernels[0].cold_keys() == [] and len(kernels[1].cold_keys()) == 1


def test_explain_before_and_after_a_tuning_and_with_cold_keys(sm_120, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    kernel = tuned()
    assert "nothing tuned yet" in kernel.explain()
    kernel[(1,)](torch.zeros(3), 63)
    with capturing():
        kernel[(1,)](torch.zeros(3), 100)
    table = kernel.explain()
    for text in ("shape", "n=63", "BLOCK=2", "WON", "SLOWER", "OVER_SHARED_MEMORY", "200,704", "101,376", "99,328",
                 "2,000.0", "served cold: n=100"):  # fmt: skip
        assert text in table


def test_a_record_and_its_verdicts_cannot_be_changed_from_outside(sm_120):
    kernel = tuned()
    kernel[(1,)](None, 63)
    record = kernel.records[0]
    with pytest.raises(AttributeError):
        record.served_by = "me"
    with pytest.raises(AttributeError):
        record.verdicts[0].outcome = Outcome.SLOWER
    kernel.records.clear()
    assert kernel.records == [record], "the list is a copy"


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def told():
    """How often whoever wants to know is told; nobody after the test."""
    calls = []
    history.tell(lambda: calls.append(history.totals()))
    yield calls
    history.tell(None)


def grown(before):
    now = history.totals()
    verdicts = {name: count - before.verdicts[name] for name, count in now.verdicts.items()}
    verdicts = {name: count for name, count in verdicts.items() if count}
    return now.tunings - before.tunings, now.cold - before.cold, verdicts


def test_the_sums_count_tunings_and_verdicts_and_a_cold_key_once(sm_120, told):
    before = history.totals()
    kernel = tuned()
    for _ in range(3):
        kernel[(1,)](torch.zeros(3), 63)
    with capturing():
        for _ in range(3):
            kernel[(1,)](torch.zeros(3), 100)
    assert grown(before) == (1, 1, {"WON": 1, "SLOWER": 2, "OVER_SHARED_MEMORY": 1})
    assert len(told) == 2, "no launch of a known key"
    kernel[(1,)](torch.zeros(3), 100)  # nothing is left cold for other tests
    assert history.totals().compile_secs > before.compile_secs and history.totals().timing_secs > before.timing_secs


def test_the_sums_never_shrink_with_a_kernel_or_a_tuning_done_again(sm_120):
    before = history.totals()
    kernel = tuned()
    kernel[(1,)](None, 63)
    kernel.cache.clear()
    kernel[(1,)](None, 63)
    del kernel
    gc.collect()
    assert grown(before)[0] == 2


def test_what_is_read_from_disk_is_no_tuning_but_is_told(sm_120, tmp_path, told):
    with settings.override(cache=True, cache_dir=str(tmp_path)):
        for _ in range(2):  # a process each, as far as this kernel's memory goes
            before = history.totals()
            kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
            kernel[(1,)](*tile_arguments())
        assert [record.served_by for record in kernel.records] == ["stored"]
    assert grown(before) == (0, 0, {}) and len(told) == 2


def test_the_sums_given_out_are_a_copy(sm_120):
    history.totals().verdicts["WON"] += 100
    before = history.totals()
    history.totals().tunings += 100
    assert history.totals() == before


def test_each_key_has_a_line_that_says_what_serves_it(sm_120):
    kernel = tuned()
    kernel[(1,)](torch.zeros(3), 63)
    with capturing():
        kernel[(1,)](torch.zeros(100), 63)
    mine = [line for line in history.served() if "n=63" in line]
    assert "shape [n=63 x:float32 batch(x)<=4 on sm_120 (101376 B)]: tuned, BLOCK=2, num_warps=4, num_stages=3" in mine
    assert "shape [n=63 x:float32 batch(x)<=128 on sm_120 (101376 B)]: nearest bucket 4" in mine
    kernel[(1,)](torch.zeros(100), 63)
    assert not any("nearest" in line for line in history.served())
