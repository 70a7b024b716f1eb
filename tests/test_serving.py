"""Serving without tuning: frozen, by mode, by the nearest bucket, by the first config that fits; and tuning ahead."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
import triton

import smart_autotune as package
from smart_autotune import NoConfigFits, coverage, freeze, pretune, serving, settings, smart_autotune, thaw, warming_up
from smart_autotune.key import TuningKey
from support.fake_kernel import FakeKernel
from support.kernels import fresh, tile, tile_arguments, tile_product


def blocks(*sizes):
    return [triton.Config({"BLOCK": size}) for size in sizes]


def batched(x, n, BLOCK=1):
    """x[batch, 1]."""


def of_batch(size):
    return torch.zeros(size, 1)


def tuned(fake=None, configs=None, time_ms=lambda values: values["BLOCK"], **options):
    fake = fake or FakeKernel(batched)
    options.setdefault("do_bench", fake.bench(time_ms))
    return smart_autotune(configs=configs or blocks(4, 2, 8), key=["n"], **options)(fake)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def last_block(kernel):
    return kernel.fn.launches[-1]["BLOCK"]


def test_frozen_nothing_is_tuned_until_it_thaws(sm_120, caplog):
    gc.collect()
    kernel = tuned()
    freeze()
    for _ in range(2):
        kernel[(1,)](of_batch(3), 63)
    assert kernel.do_bench.timed == [] and kernel.cache == {}
    assert last_block(kernel) == 4, "the first that fits"
    (text,) = warnings_in(caplog)
    assert "frozen" in text and "batched" in text and "n=63" in text
    assert package.cold_keys() == kernel.cold_keys() and len(kernel.cold_keys()) == 1
    thaw()
    kernel[(1,)](of_batch(3), 63)
    assert len(kernel.do_bench.timed) == 3 and last_block(kernel) == 2
    assert kernel.cold_keys() == []


def test_frozen_a_tuned_key_still_gets_its_best(sm_120, caplog):
    kernel = tuned()
    kernel[(1,)](of_batch(3), 63)
    freeze()
    kernel[(1,)](of_batch(3), 63)
    assert last_block(kernel) == 2 and warnings_in(caplog) == []


@pytest.mark.parametrize("mode", ["first_fit", "pinned"])
def test_a_mode_that_never_times_serves_the_first_config_that_fits(sm_120, caplog, mode):
    caplog.set_level("INFO", logger="smart_autotune")
    kernel = tuned(FakeKernel(batched, on_compile=lambda values: 200_000 if values["BLOCK"] == 4 else 64))
    with settings.override(mode=mode):
        for _ in range(2):
            kernel[(1,)](of_batch(3), 63)
    assert kernel.do_bench.timed == [] and last_block(kernel) == 2
    assert [launch["BLOCK"] for launch in kernel.fn.launches] == [2, 2]
    assert any(f"MODE={mode}" in record.getMessage() for record in caplog.records)
    assert warnings_in(caplog) == [], "somebody asked for it"


def test_pinned_still_serves_what_was_tuned_before(sm_120):
    kernel = tuned(configs=blocks(8, 4, 2))
    kernel[(1,)](of_batch(3), 63)
    with settings.override(mode="pinned"):
        kernel[(1,)](of_batch(3), 63)
    assert last_block(kernel) == 2


def test_off_serves_config_0_that_fits_whatever_was_tuned_and_lists_nothing(sm_120, caplog):
    fake = FakeKernel(batched, on_compile=lambda values: 200_000 if values["BLOCK"] == 4 else 64)
    kernel = tuned(fake, configs=blocks(4, 8, 2))
    kernel[(1,)](of_batch(3), 63)
    assert last_block(kernel) == 2 and len(kernel.records) == 1
    timed = len(kernel.do_bench.timed)
    with settings.override(mode="off"):
        for batch in (3, 100):
            kernel[(1,)](of_batch(batch), 63)
            assert last_block(kernel) == 8
    assert len(kernel.do_bench.timed) == timed
    assert kernel.cold_keys() == [] and warnings_in(caplog) == []


def test_stock_is_tritons_own_tuner(sm_120):
    kernel = tuned()
    with settings.override(mode="stock"):
        kernel[(1,)](of_batch(3), 63)
    assert kernel.fn.compiles == [] and list(kernel.cache) == [(63, "torch.float32")]


def test_frozen_the_nearest_tuned_bucket_serves_and_never_one_of_another_key(sm_120):
    fastest = {4: 4, 64: 8}
    fake = FakeKernel(batched)
    kernel = tuned(fake, do_bench=fake.bench(lambda v: abs(v["BLOCK"] - fastest[v["x"][1][0]]) + 1.0))
    for size in (4, 64):
        kernel[(1,)](of_batch(size), 63)
    freeze()
    for size, expected in ((5, 4), (33, 8), (100, 8), (1, 4), (16, 8)):
        kernel[(1,)](of_batch(size), 63)
        assert last_block(kernel) == expected, size
    kernel[(1,)](of_batch(5), 100)
    assert last_block(kernel) == 4, "the first that fits, for another n"
    assert len(kernel.cache) == 2


def test_a_neighbour_tuned_later_takes_over_from_the_first_that_fits(sm_120):
    kernel = tuned(configs=blocks(8, 2))
    freeze()
    kernel[(1,)](of_batch(3), 63)
    assert last_block(kernel) == 8
    thaw()
    kernel[(1,)](of_batch(64), 63)
    freeze()
    kernel[(1,)](of_batch(3), 63)
    assert last_block(kernel) == 2


def key_of_bucket(bucket, value=1):
    return TuningKey("kernel", (), (("n", "int", value),), (), None if bucket is None else ("x", bucket))


@pytest.mark.parametrize(
    ("bucket", "tuned_buckets", "expected"),
    [(16, [4, 64], 64), (8, [4, 64], 4), (1, [512], 512), (16, [], None), (0, [1, 4], 1), (None, [4], None)],
)
def test_nearest_is_by_ratio_and_the_larger_of_two_as_near(bucket, tuned_buckets, expected):
    found = serving.nearest(key_of_bucket(bucket), [key_of_bucket(b) for b in tuned_buckets] + [key_of_bucket(16, 2)])
    assert (found.bucket if found else None) == expected


def test_when_nothing_fits_a_cold_key_the_error_is_the_same_as_when_tuning(sm_120):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    freeze()
    with settings.override(shared_bytes_cap=1000), pytest.raises(NoConfigFits, match="16,384"):
        kernel[(1,)](*tile_arguments())
    assert sm_120.launches == [] and kernel.cache == {}


def test_a_cold_key_that_nothing_fits_is_rescued_too(sm_120):
    kernel = smart_autotune(configs=[tile(9), tile(8)], key=[])(fresh(tile_product))
    freeze()
    for _ in range(2):
        assert kernel[(1,)](*tile_arguments()).metadata.num_stages == 7


def test_a_call_that_only_compiles_tunes_nothing_and_launches_nothing(sm_120):
    kernel = smart_autotune(configs=[tile(8), tile(2)], key=[])(fresh(tile_product))
    compiled = kernel.run(*tile_arguments(), grid=(1,), warmup=True)
    assert compiled.metadata.num_stages == 2
    assert sm_120.launches == [] and kernel.cache == {}


def test_pretune_tunes_each_call_and_launches_nothing_for_a_caller(sm_120):
    kernel = tuned()
    count = pretune(kernel, ({"x": of_batch(size), "n": 63, "grid": (1,)} for size in (1, 2, 100)))
    assert count == 3 and sorted(key.bucket for key in kernel.cache) == [1, 2, 128]
    timed = len(kernel.do_bench.timed)
    assert len(kernel.fn.launches) == timed <= 9
    kernel[(1,)](of_batch(100), 63)
    assert len(kernel.do_bench.timed) == timed and last_block(kernel) == 2


def test_pretune_on_a_real_kernel(sm_120):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    assert pretune(kernel, [{**dict(zip(kernel.arg_names, tile_arguments())), "grid": (1,)}]) == 1
    assert len(kernel.cache) == 1 and len(sm_120.launches) == 2


def test_pretune_refuses_what_is_no_dict_of_arguments():
    with pytest.raises(TypeError, match="call 0 is tuple; allowed: a dict of arguments by name"):
        pretune(tuned(), [(None, 63)])


# ---- the warm-up of a server ----------------------------------------------------------------------------------------


def test_first_fit_does_not_serve_what_was_tuned_before(sm_120):
    kernel = tuned(configs=blocks(8, 4, 2))
    kernel[(1,)](of_batch(3), 63)
    with settings.override(mode="first_fit"):
        kernel[(1,)](of_batch(3), 63)
    assert last_block(kernel) == 8


def test_everything_met_while_warming_up_is_tuned_and_then_it_freezes(sm_120, caplog):
    caplog.set_level("INFO", logger="smart_autotune")
    kernel = tuned(configs=blocks(8, 4, 2))
    freeze()
    with warming_up():
        kernel[(1,)](of_batch(3), 63)
    kernel[(1,)](of_batch(100), 63)
    assert len(kernel.cache) == 1 and len(kernel.cold_keys()) == 1
    assert any("warm-up is over" in record.getMessage() for record in caplog.records)


def test_it_freezes_also_when_the_warm_up_fails(sm_120):
    kernel = tuned()
    with pytest.raises(RuntimeError, match="server"), warming_up():
        raise RuntimeError("the server gave up")
    kernel[(1,)](of_batch(3), 63)
    assert kernel.do_bench.timed == []


def test_when_frozen_an_unseen_number_in_the_authors_key_is_served_by_the_nearest_tuned_one(sm_120):
    fastest = {100: 8, 10_000: 2}
    bench_ms = lambda values: abs(values["BLOCK"] - fastest[values["n"]]) + 1  # noqa: E731
    kernel = tuned(FakeKernel(batched), configs=blocks(8, 4, 2), time_ms=bench_ms)
    for length in fastest:
        kernel[(1,)](of_batch(4), length)
    freeze()
    for length, expected in ((90, 8), (400, 8), (4_000, 2), (1_000_000, 2)):
        kernel[(1,)](of_batch(4), length)
        assert last_block(kernel) == expected, length
    assert len(kernel.cache) == 2 and len(kernel.cold_keys()) == 4


def test_the_coverage_counts_tuned_near_and_cold(sm_120):
    gc.collect()  # kernels of other tests would leave while this one counts
    before = coverage()
    kernel = tuned(FakeKernel(batched))
    kernel[(1,)](of_batch(3), 63)
    freeze()
    kernel[(1,)](of_batch(100), 63)
    other = tuned(FakeKernel(batched))
    other[(1,)](of_batch(3), 63)
    now = coverage()
    assert now.tuned - before.tuned == 1
    assert now.served_near - before.served_near == 1
    assert now.served_cold - before.served_cold == 1
