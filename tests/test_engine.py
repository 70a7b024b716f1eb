"""One launch from key to kernel: who is tuned, what is kept, what a hook sees, what is left behind."""

from __future__ import annotations

import gc
import logging
import pickle
import random
import weakref

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import AutotunerError, OutOfResources

import smart_autotune as package
from smart_autotune import NoConfigFits, Outcome, settings, smart_autotune
from smart_autotune.key import KeyReader
from smart_autotune.rankings import Rankings
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy, tile, tile_arguments, tile_product
from support.stub_driver import StubDriver, active


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def three(a, b, c, BLOCK=1):
    """Three tensors, any of which may be None."""


def tuned(fake, configs=None, key=("n",), time_ms=lambda values: values["BLOCK"], **options):
    """``fake`` under the tuner, each config as slow as its block is big."""
    options.setdefault("do_bench", fake.bench(time_ms))
    return smart_autotune(configs=configs or blocks(4, 2, 8), key=list(key), **options)(fake)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---- one tuning, then served from what it found ---------------------------------------------------------------------


def test_the_fastest_config_wins_and_serves_every_later_call_without_timing(sm_120):
    fake = FakeKernel(shape)
    kernel = tuned(fake)
    for _ in range(3):
        kernel[(1,)](None, 100)
    assert len(kernel.do_bench.timed) == 3
    assert [launch["BLOCK"] for launch in fake.launches] == [4, 2, 8, 2, 2, 2]
    assert kernel.best_config is kernel.configs[1]


def test_the_launch_returns_the_compiled_kernel_as_stock_does(sm_120):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    for _ in range(2):
        compiled = kernel[(1,)](*tile_arguments())
        assert compiled.metadata.num_stages == kernel.best_config.num_stages


def test_a_grid_function_sees_the_values_of_the_config_that_is_launched(sm_120):
    kernel = smart_autotune(configs=blocks(64, 512), key=["n"])(fresh(scaled_copy))
    kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](*copy_arguments(1000))
    assert [launch.grid[0] for launch in sm_120.launches[:2]] == [16, 2]


@pytest.mark.parametrize("wrong", [{"args": (None,)}, {"args": (None, 63, 2.0, 4, 5, 6, 7)}, {"kwargs": {"m": 1}}])
def test_a_call_that_stock_refuses_is_refused_with_stocks_error_and_nothing_is_kept(sm_120, wrong):
    raised = []
    for decorate in (triton.autotune, smart_autotune):
        kernel = decorate(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
        with pytest.raises(Exception) as error:  # which one is what is compared
            kernel[(1,)](*wrong.get("args", copy_arguments(63)), **wrong.get("kwargs", {}))
        raised.append((type(error.value), str(error.value)))
        assert kernel.cache == {}
    assert raised[1] == raised[0]
    assert sm_120.launches == []


def test_the_last_launch_after_a_tuning_is_by_the_winner_alone(sm_120):
    fake = FakeKernel(shape)
    tuned(fake)[(1,)](None, 100)
    assert [launch["BLOCK"] for launch in fake.launches].count(2) == 2, "once to time it, once for the caller"
    assert fake.launches[-1]["BLOCK"] == 2


def test_no_config_is_launched_more_often_than_by_stock(sm_120):
    launches = {}
    for decorate in (triton.autotune, smart_autotune):
        fake = FakeKernel(shape)
        kernel = decorate(configs=blocks(4, 2, 8), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
        for n in (100, 100, 63):
            kernel[(1,)](None, n)
        launches[decorate] = [launch["BLOCK"] for launch in fake.launches]
    assert launches[smart_autotune] == launches[triton.autotune]


def test_equal_configs_are_timed_once(sm_120):
    kernel = tuned(FakeKernel(shape), blocks(4, 2, 4, 2))
    kernel[(1,)](None, 100)
    assert [launch["BLOCK"] for launch in kernel.do_bench.timed] == [4, 2]
    assert kernel.best_config is kernel.configs[1]
    assert len(kernel.records[-1].verdicts) == 2


def test_one_config_left_by_the_prune_is_served_without_timing(sm_120):
    keep_one = {"early_config_prune": lambda configs, named, **_: configs[2:]}
    kernel = tuned(FakeKernel(shape), prune_configs_by=keep_one)
    kernel[(1,)](None, 100)
    assert kernel.do_bench.timed == []
    assert kernel.best_config is kernel.configs[2]
    outcomes = {verdict.config.kwargs["BLOCK"]: str(verdict.outcome) for verdict in kernel.records[-1].verdicts}
    assert outcomes == {8: "WON", 4: "PRUNED_BY_USER", 2: "PRUNED_BY_USER"}


def test_the_author_prunes_before_anything_is_compiled(sm_120):
    fake = FakeKernel(shape)
    tuned(fake, prune_configs_by={"early_config_prune": lambda configs, named, **_: configs[:2]})[(1,)](None, 100)
    assert {values["BLOCK"] for values in fake.compiles} == {4, 2}


def test_clearing_the_cache_tunes_again(sm_120):
    kernel = tuned(FakeKernel(shape))
    kernel[(1,)](None, 100)
    kernel.cache.clear()
    kernel[(1,)](None, 100)
    assert len(kernel.do_bench.timed) == 6
    assert len(kernel.cache) == 1 and len(kernel.records) == 1


# ---- nothing fits ---------------------------------------------------------------------------------------------------


def test_when_nothing_fits_the_error_says_how_close_it_was_and_nothing_is_kept(sm_120):
    def needs(values):
        raise OutOfResources({1: 663_808, 2: 700_000}[values["BLOCK"]], 101_376, "shared memory")

    fake = FakeKernel(shape, on_compile=needs)
    kernel = tuned(fake, blocks(1, 2))
    with pytest.raises(NoConfigFits) as raised:
        kernel[(1,)](None, 100)
    error = raised.value
    assert isinstance(error, AutotunerError) and isinstance(error, OutOfResources)
    assert (error.required, error.limit) == (663_808, 101_376)
    for text in ("shape", "n=100", "none of 2 configs", "663,808", "101,376", "562,432 over", "BLOCK=1", "remedy"):
        assert text in str(error)
    assert kernel.cache == {} and kernel.records == [] and fake.launches == []
    assert not hasattr(kernel, "best_config")
    assert kernel.nargs is None


def test_the_error_can_be_sent_to_another_process():
    error = NoConfigFits("kernel: none of 2 configs fits", 663_808, 101_376, "OVER_SHARED_MEMORY")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is NoConfigFits and str(twin) == str(error)
    assert (twin.required, twin.limit, twin.name) == (error.required, error.limit, error.name)


def test_after_a_call_that_nothing_fits_another_shape_works(sm_120):
    kernel = tuned(FakeKernel(shape, on_compile=lambda values: 663_808 if values["n"] == 100 else 64))
    with settings.override(rescue=False):
        for _ in range(2):
            with pytest.raises(NoConfigFits):
                kernel[(1,)](None, 100)
    kernel[(1,)](None, 63)
    assert kernel.best_config is kernel.configs[1]


def test_on_real_compiles_nothing_fits_a_tiny_cap_and_the_what_if_variable_is_named(sm_120):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    with settings.override(shared_bytes_cap=1000), pytest.raises(NoConfigFits, match="SHARED_BYTES_CAP") as raised:
        kernel[(1,)](*tile_arguments())
    assert raised.value.limit == 1000 and raised.value.required == 16_384
    assert sm_120.launches == [] and kernel.cache == {}


def test_a_prune_that_drops_everything_is_named_as_the_cause(sm_120):
    kernel = tuned(FakeKernel(shape), prune_configs_by={"early_config_prune": lambda configs, named, **_: []})
    with pytest.raises(AutotunerError, match="early_config_prune") as raised:
        kernel[(1,)](None, 100)
    assert not isinstance(raised.value, NoConfigFits)
    assert "shape" in str(raised.value)


def test_a_prune_that_keeps_only_what_does_not_fit_is_told_apart_from_one_that_drops_everything(sm_120):
    fake = FakeKernel(shape, on_compile=lambda values: 200_000 if values["BLOCK"] == 8 else 64)
    kernel = tuned(fake, prune_configs_by={"early_config_prune": lambda configs, named, **_: configs[2:]})
    with pytest.raises(NoConfigFits, match="own prune had dropped 2 more"):
        kernel[(1,)](None, 100)


def test_a_kernel_with_one_config_that_does_not_fit_is_rescued(sm_120, caplog):
    kernel = smart_autotune(configs=[tile(8)], key=[])(fresh(tile_product))
    for _ in range(2):
        assert kernel[(1,)](*tile_arguments()).metadata.num_stages == 7
    assert len(warnings_in(caplog)) == 1


def test_a_kernel_with_one_config_goes_straight_through(sm_120):
    fake = FakeKernel(shape)
    kernel = tuned(fake, blocks(4))
    assert not hasattr(kernel, "best_config")
    kernel[(1,)](None, 100)
    assert fake.compiles == [] and len(fake.launches) == 1 and kernel.do_bench.timed == []
    assert kernel.best_config is kernel.configs[0] and kernel.cache == {}


# ---- the key --------------------------------------------------------------------------------------------------------


def test_none_in_another_place_is_another_key(sm_120):
    half, single = torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    kernel = tuned(FakeKernel(three), key=())
    kernel[(1,)](half, None, single)
    kernel[(1,)](half, single, None)
    assert len(kernel.cache) == 2
    kernel[(1,)](half, None, single)
    assert len(kernel.cache) == 2 and len(kernel.do_bench.timed) == 6


def sizes(x, M=1, N=1, BLOCK=1):
    """Two sizes with defaults."""


def test_keywords_in_another_order_are_one_key(sm_120):
    kernel = tuned(FakeKernel(sizes), key=("M", "N"))
    kernel[(1,)](x=torch.zeros(4), M=4, N=5)
    kernel[(1,)](N=5, M=4, x=torch.zeros(4))
    kernel[(1,)](torch.zeros(4), 4, N=5)
    assert len(kernel.cache) == 1


def test_a_default_left_out_and_given_equal_are_one_key_and_the_name_counts(sm_120):
    kernel = tuned(FakeKernel(sizes), key=("M", "N"))
    kernel[(1,)](None, M=4)
    kernel[(1,)](None, M=4, N=1)
    assert len(kernel.cache) == 1
    kernel[(1,)](None, N=4)
    assert len(kernel.cache) == 2


def test_one_true_and_one_point_zero_are_three_keys(sm_120):
    kernel = tuned(FakeKernel(shape))
    for n in (1, True, 1.0, 1):
        kernel[(1,)](None, n)
    assert len(kernel.cache) == 3


def test_a_key_name_that_is_no_argument_is_one_warning_with_the_near_ones(sm_120, caplog):
    kernel = tuned(FakeKernel(sizes), key=("M", "NN"))
    kernel[(1,)](None, 3, 4)
    kernel[(1,)](None, 3, 5)
    assert len(kernel.cache) == 1
    (text,) = warnings_in(caplog)
    assert "'NN'" in text and "sizes" in text and "near matches: N" in text


@pytest.mark.parametrize(("value", "kind"), [(torch.zeros(3), "a tensor"), ([1, 2], "unhashable list")])
def test_a_key_value_that_can_be_no_key_is_an_error_that_names_kernel_and_argument(sm_120, value, kind):
    fake = FakeKernel(shape)
    kernel = tuned(fake)
    with pytest.raises(TypeError, match=f"shape.*'n'.*{kind}"):
        kernel[(1,)](None, value)
    assert fake.launches == [] and fake.compiles == [] and kernel.cache == {}


def test_a_device_with_another_cap_is_another_key():
    fake = FakeKernel(shape, on_compile=lambda values: 60_000 // values["BLOCK"])
    kernel = tuned(fake)
    for shared in (101_376, 10_000):
        with active(StubDriver(120, shared_bytes=shared)):
            kernel[(1,)](None, 100)
    small, big = sorted(kernel.cache, key=lambda key: dict(key.device)["shared_bytes"])
    assert small.differences(big) == ["device"]
    assert (kernel.cache[small].kwargs["BLOCK"], kernel.cache[big].kwargs["BLOCK"]) == (8, 2)


# ---- the batch ------------------------------------------------------------------------------------------------------


def batched(x, n, BLOCK=1):
    """x[batch, 1]."""


def test_batches_1_to_512_in_any_order_tune_once_a_power_of_two(sm_120):
    sizes_in_some_order = random.Random(7).sample(range(1, 513), 512)
    kernel = tuned(FakeKernel(batched))
    for size in sizes_in_some_order:
        kernel[(1,)](torch.zeros(size, 1), 63)
    assert len(kernel.records) == len(kernel.cache) == 10
    assert len(kernel.do_bench.timed) <= 30  # neighbouring buckets may settle who cannot win
    assert sorted(key.bucket for key in kernel.cache) == [1 << exponent for exponent in range(10)]
    assert kernel.cold_keys() == []


def test_where_the_prune_leaves_only_what_a_neighbouring_bucket_ruled_out_it_is_timed_after_all(sm_120):
    def one_for_each(configs, named, **kwargs):
        return configs if named["x"].shape[0] == 4 else configs[1:]

    fake = FakeKernel(batched)
    times = {1: 1.0, 8: 50.0, 16: 40.0}
    kernel = smart_autotune(
        configs=[triton.Config({"BLOCK": size}) for size in times],
        key=["n"],
        prune_configs_by={"early_config_prune": one_for_each},
        do_bench=fake.bench(lambda values: times[values["BLOCK"]]),
    )(fake)
    kernel[(1,)](torch.zeros(4, 1), 63)
    kernel[(1,)](torch.zeros(8, 1), 63)
    assert kernel.cold_keys() == [] and kernel.best_config.kwargs == {"BLOCK": 16}


def test_beyond_the_allowed_number_of_buckets_the_nearest_serves(sm_120, caplog):
    caplog.set_level(logging.INFO, logger="smart_autotune")
    fake = FakeKernel(batched)
    fastest = {1: 4, 16: 2, 256: 8}
    kernel = tuned(fake, time_ms=lambda values: abs(values["BLOCK"] - fastest[values["x"][1][0]]) + 1)
    with settings.override(max_buckets=3):
        for size in (1, 16, 256, 17, 64, 2, 3, 512):
            kernel[(1,)](torch.zeros(size, 1), 63)
    assert [launch["BLOCK"] for launch in fake.launches[-5:]] == [2, 8, 4, 2, 8]
    assert sorted(key.bucket for key in kernel.cache) == [1, 16, 256]
    texts = [record.getMessage() for record in caplog.records if "MAX_BUCKETS" in record.getMessage()]
    assert len(texts) == 5 and "nearest bucket 16" in texts[0]
    assert kernel.cold_keys() == [], "no later call would tune them"


def test_the_bucket_limit_is_for_each_rest_of_the_key(sm_120):
    kernel = tuned(FakeKernel(batched))
    with settings.override(max_buckets=1):
        for n in (63, 100):
            for size in (1, 8):
                kernel[(1,)](torch.zeros(size, 1), n)
    assert len(kernel.cache) == 2


def test_the_bucket_shows_in_the_record_the_table_and_the_log(sm_120, caplog):
    caplog.set_level(logging.INFO, logger="smart_autotune")
    kernel = tuned(FakeKernel(batched))
    kernel[(1,)](torch.zeros(100, 1), 63)
    assert kernel.records[-1].key.batch == ("x", 128)
    assert "bucket 128" in kernel.records[-1].batch
    assert "bucket 128" in kernel.explain()
    assert any("batch(x)<=128" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["BATCH_SIZE_BUCKET", "B"])
def test_the_batch_is_off_when_the_author_keys_on_it_already(sm_120, name):
    namespace = {}
    exec(f"def kernel_function(x, {name}, BLOCK=1): pass", namespace)
    kernel = tuned(FakeKernel(namespace["kernel_function"]), key=(name,))
    for size in (1, 64):
        kernel[(1,)](torch.zeros(size, 1), 8)
    assert len(kernel.cache) == 1
    assert kernel.records[-1].key.batch is None
    assert repr(name) in kernel.records[-1].batch


def test_the_batch_can_be_switched_off_for_the_process(sm_120):
    kernel = tuned(FakeKernel(batched))
    with settings.override(batch="off"):
        for size in (1, 64):
            kernel[(1,)](torch.zeros(size, 1), 63)
    assert len(kernel.cache) == 1


def test_deterministic_mode_times_nothing_and_keeps_the_batch_out_of_the_key(sm_120):
    kernel = tuned(FakeKernel(batched))
    with settings.override(deterministic=True):
        for size in (1, 64):
            kernel[(1,)](torch.zeros(size, 1), 63)
    assert kernel.do_bench.timed == [] and kernel.cache == {}
    (key,) = kernel.cold_keys()
    assert key.batch is None


def test_torchs_deterministic_switch_is_deterministic_mode(sm_120):
    kernel = tuned(FakeKernel(batched))
    torch.use_deterministic_algorithms(True)
    try:
        kernel[(1,)](torch.zeros(64, 1), 63)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel.do_bench.timed == [] and kernel.cold_keys()[0].batch is None


# ---- one key, another specialisation --------------------------------------------------------------------------------


def test_a_best_config_that_does_not_fit_an_aligned_call_of_its_key_gives_way_to_the_next_best(sm_120, caplog):
    configs = [tile(8), tile(3), tile(2)]

    def bench(run, quantiles):
        run()
        stages = sm_120.launches[-1].metadata.num_stages
        return [{8: 1.0, 2: 2.0, 3: 3.0}[stages]] * 3

    kernel = smart_autotune(configs=configs, key=[], batch=None, do_bench=bench)(fresh(tile_product))
    kernel[(1,)](*tile_arguments(63))
    assert kernel.best_config is configs[0] and len(kernel.cache) == 1
    compiled = kernel[(1,)](*tile_arguments(64))
    assert compiled.metadata.num_stages == 2 and kernel.best_config is configs[2]
    assert len(kernel.cache) == len(kernel.records) == 1, "nothing was tuned again"
    (text,) = warnings_in(caplog)
    assert "tile_product" in text and "need=114688" in text and "limit=101376" in text and "num_stages=8" in text
    assert kernel[(1,)](*tile_arguments(64)).metadata.num_stages == 2
    assert kernel[(1,)](*tile_arguments(63)).metadata.num_stages == 8, "the first specialisation keeps its best"
    assert len(warnings_in(caplog)) == 1
    assert max(shared for _, shared in sm_120.loaded) <= 101_376


def test_a_lowered_what_if_cap_is_honoured_for_every_specialisation(sm_120, caplog):
    configs = [tile(3), tile(2)]

    def bench(run, quantiles):
        run()
        return [float(5 - sm_120.launches[-1].metadata.num_stages)] * 3

    kernel = smart_autotune(configs=configs, key=[], batch=None, do_bench=bench)(fresh(tile_product))
    with settings.override(shared_bytes_cap=20_000):
        assert kernel[(1,)](*tile_arguments(63)).metadata.num_stages == 3
        assert kernel[(1,)](*tile_arguments(64)).metadata.num_stages == 2
    assert len(kernel.cache) == 1
    assert "limit=20000" in warnings_in(caplog)[0]
    assert {shared for _, shared in sm_120.loaded} == {16_384}


def test_when_no_config_of_the_ranking_fits_another_specialisation_stages_are_taken_away(sm_120, caplog):
    kernel = smart_autotune(configs=[tile(9), tile(8)], key=[], batch=None)(fresh(tile_product))
    kernel[(1,)](*tile_arguments(63))
    assert kernel[(1,)](*tile_arguments(64)).metadata.num_stages == 7
    assert kernel[(1,)](*tile_arguments(64)).metadata.num_stages == 7
    assert any("rescued" in text for text in warnings_in(caplog))


def test_a_best_config_that_does_not_compile_for_another_specialisation_gives_way_to_the_next_best(sm_120, caplog):
    def fails_for_tensors(values):
        if values["x"] is True and values["BLOCK"] == 2:
            raise RuntimeError("PassManager::run failed")

    fake = FakeKernel(shape, on_compile=fails_for_tensors)
    kernel = tuned(fake)
    assert kernel[(1,)](None, 63).values["BLOCK"] == 2
    for _ in range(2):
        assert kernel[(1,)](True, 63).values["BLOCK"] == 4
    assert kernel[(1,)](None, 63).values["BLOCK"] == 2
    assert len(kernel.records) == 1
    (text,) = warnings_in(caplog)
    assert "COMPILE_FAILED" in text and "PassManager" in text


# ---- hooks, reset_to_zero, restore_value ----------------------------------------------------------------------------


def adds_one(values):
    values["x"].add_(1)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_restore_value_leaves_the_effect_of_one_launch_alone(sm_120, by_keyword):
    kernel = tuned(FakeKernel(shape, on_launch=adds_one), restore_value=["x"])
    x = torch.full((63,), 5.0)
    if by_keyword:
        kernel[(1,)](x=x, n=100)
    else:
        kernel[(1,)](x, 100)
    assert torch.equal(x, torch.full((63,), 6.0))


def test_restore_value_copies_once_a_timed_launch_and_keeps_no_copy(sm_120):
    copies = []

    class Counted(torch.Tensor):
        def clone(self, **options):
            copy = super().clone(**options)
            copies.append(weakref.ref(copy))
            return copy

    kernel = tuned(FakeKernel(shape, on_launch=adds_one), restore_value=["x"])
    x = torch.zeros(63).as_subclass(Counted)
    kernel[(1,)](x, 100)
    kernel[(1,)](x, 100)
    gc.collect()
    assert len(copies) == 3 and all(copy() is None for copy in copies)
    assert x.sum().item() == 2 * 63


def test_without_restore_value_the_effects_of_timing_stay_as_with_stock(sm_120):
    totals = []
    for decorate in (triton.autotune, smart_autotune):
        fake = FakeKernel(shape, on_launch=adds_one)
        kernel = decorate(configs=blocks(4, 2, 8), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
        x = torch.zeros(63)
        kernel[(1,)](x, 100)
        totals.append(x[0].item())
    assert totals == [4.0, 4.0]


def test_restore_value_also_restores_after_a_config_that_fails_at_its_launch(sm_120):
    def adds_then_fails(values):
        values["x"].add_(1)
        if values["BLOCK"] == 2:
            raise RuntimeError("launch failed")

    kernel = tuned(FakeKernel(shape, on_launch=adds_then_fails), restore_value=["x"])
    x = torch.zeros(63)
    kernel[(1,)](x, 100)
    assert torch.equal(x, torch.ones(63))
    assert kernel.best_config is kernel.configs[0]


def test_reset_to_zero_is_applied_while_tuning_and_not_to_cached_calls_as_with_stock(sm_120):
    seen = []
    for decorate in (triton.autotune, smart_autotune):
        fake = FakeKernel(shape, on_launch=adds_one)
        kernel = decorate(
            configs=blocks(4, 2), key=["n"], reset_to_zero=["x"], do_bench=fake.bench(lambda v: v["BLOCK"])
        )(fake)
        x = torch.full((63,), 5.0)
        kernel[(1,)](x, 100)
        first = x[0].item()
        kernel[(1,)](x, 100)
        seen.append((first, x[0].item()))
    assert seen == [(1.0, 2.0), (1.0, 2.0)]


@pytest.mark.parametrize("option", ["restore_value", "reset_to_zero"])
def test_none_for_an_argument_to_restore_or_reset_is_skipped(sm_120, option):
    kernel = tuned(FakeKernel(three), key=(), **{option: ["a", "b"]})
    b = torch.ones(3)
    kernel[(1,)](None, b, None)
    assert b[0].item() == (1.0 if option == "restore_value" else 0.0)
    assert kernel.best_config is kernel.configs[1]


@pytest.mark.parametrize("option", ["restore_value", "reset_to_zero"])
def test_an_argument_to_restore_or_reset_that_is_not_passed_is_an_error_that_names_it(sm_120, option):
    kernel = tuned(FakeKernel(shape), **{option: ["y"]})
    with pytest.raises(ValueError, match=f"shape.*{option}.*'y'"):
        kernel[(1,)](torch.ones(3), 100)


def test_user_hooks_see_what_stock_shows_them(sm_120):
    seen = {}
    for decorate in (triton.autotune, smart_autotune):
        calls = seen[decorate] = []
        fake = FakeKernel(shape)

        def before(kwargs, reset_only=False, calls=calls):
            calls.append(("pre", reset_only, kwargs["n"], kwargs["BLOCK"], kwargs["num_warps"]))

        def after(kwargs, exception, calls=calls):
            calls.append(("post", exception, kwargs["n"], kwargs["BLOCK"], kwargs["num_warps"]))

        kernel = decorate(
            configs=blocks(4, 2), key=["n"], pre_hook=before, post_hook=after,
            do_bench=fake.bench(lambda v: v["BLOCK"]),
        )(fake)  # fmt: skip
        kernel[(1,)](None, 100)
        kernel[(1,)](None, 100)
    assert seen[smart_autotune] == seen[triton.autotune]
    assert ("pre", True, 100, 2, 4) in seen[smart_autotune]


def test_a_configs_own_hook_runs_before_each_of_its_launches_with_its_own_values(sm_120):
    seen = []
    configs = [
        triton.Config({"BLOCK": size}, pre_hook=lambda args: seen.append((args["BLOCK"], args["num_warps"], args["n"])))
        for size in (4, 2)
    ]
    kernel = tuned(FakeKernel(shape), configs)
    kernel[(1,)](None, 100)
    kernel[(1,)](None, n=100)
    assert seen == [(4, 4, 100), (2, 4, 100), (2, 4, 100), (2, 4, 100)]


def test_compiling_calls_no_hook_of_the_user(sm_120):
    called = []
    configs = [triton.Config({"BLOCK": size}, pre_hook=lambda args: called.append("config")) for size in (4, 2)]
    kernel = tuned(
        FakeKernel(shape, on_compile=lambda values: 200_000 if not called else None), configs,
        pre_hook=lambda kwargs, reset_only=False: called.append("pre"),
    )  # fmt: skip
    with settings.override(rescue=False), pytest.raises(NoConfigFits):
        kernel[(1,)](torch.zeros(3), 100)
    assert called == []


# ---- what is left behind --------------------------------------------------------------------------------------------


def dies_after(call, *, raises=None, collect=True):
    """Whether the tensor given to ``call`` is gone once the call is over (``collect``: after a garbage collection)."""
    x = torch.zeros(63)
    alive = weakref.ref(x)
    try:
        call(x)
    except Exception as error:
        assert raises is not None and isinstance(error, raises)
        error.__traceback__ = None
        del error
    else:
        assert raises is None
    del x
    if collect:
        gc.collect()
    return alive() is None


def test_the_arguments_are_not_kept_alive_by_a_tuning_or_a_cached_call(sm_120):
    kernel = tuned(FakeKernel(shape), restore_value=["x"])
    assert dies_after(lambda x: kernel[(1,)](x, 100))
    assert dies_after(lambda x: kernel[(1,)](x, 100))
    assert kernel.nargs is None


def test_the_arguments_are_not_kept_alive_after_real_compiles(sm_120):
    kernel = smart_autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=[])(
        fresh(scaled_copy)
    )

    def call(x):
        kernel[(1,)](x, torch.zeros(63), 63, 2.0)

    call(torch.zeros(63))
    for launch in sm_120.launches:
        launch.args = ()

    def and_forget_launches(x):
        call(x)
        sm_120.launches.clear()

    assert dies_after(and_forget_launches)


def test_the_arguments_are_not_kept_alive_by_a_launch_that_raises(sm_120):
    failing = []

    def fails_later(values):
        if failing:
            raise RuntimeError("launch failed")

    kernel = tuned(FakeKernel(shape, on_launch=fails_later))
    kernel[(1,)](torch.zeros(63), 100)
    failing.append(True)
    assert dies_after(lambda x: kernel[(1,)](x, 100), raises=RuntimeError)
    assert kernel.nargs is None


def test_the_arguments_are_not_kept_alive_by_a_tuning_that_fails(sm_120):
    def fails(values):
        held_by_a_frame = values["x"]
        raise RuntimeError(f"PassManager::run failed for {held_by_a_frame.shape}")

    kernel = tuned(FakeKernel(shape, on_compile=fails))
    assert dies_after(lambda x: kernel[(1,)](x, 100), raises=RuntimeError)
    kernel = tuned(FakeKernel(shape, on_launch=fails))
    assert dies_after(lambda x: kernel[(1,)](x, 100), raises=RuntimeError)
    kernel = tuned(FakeKernel(shape, on_compile=lambda values: 663_808))
    assert dies_after(lambda x: kernel[(1,)](x, 100), raises=NoConfigFits)


def test_one_failing_config_of_a_tuning_keeps_no_argument_alive(sm_120):
    def fails_for_2(values):
        held_by_a_frame = values["x"]
        if values["BLOCK"] == 2:
            raise RuntimeError(f"failed for {held_by_a_frame.shape}")

    gc.collect()
    gc.disable()  # device memory must not wait for a collection
    try:
        for stage in ("on_compile", "on_launch", "on_load"):
            kernel = tuned(FakeKernel(shape, **{stage: fails_for_2}))
            assert dies_after(lambda x, kernel=kernel: kernel[(1,)](x, 100), collect=False), stage
    finally:
        gc.enable()


def test_a_load_that_fails_otherwise_than_for_resources_is_that_configs_verdict(sm_120):
    def fails_for_2(values):
        if values["BLOCK"] == 2:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")

    kernel = tuned(FakeKernel(shape, on_load=fails_for_2))
    kernel[(1,)](None, 100)
    verdicts = {verdict.config.kwargs["BLOCK"]: verdict for verdict in kernel.records[-1].verdicts}
    assert verdicts[2].outcome is Outcome.LAUNCH_FAILED and "invalid argument" in verdicts[2].detail
    assert kernel.best_config is kernel.configs[0]


def test_an_error_of_the_winners_own_launch_reaches_the_caller_as_it_is(sm_120):
    failing = []

    class Mine(Exception):
        pass

    def fails(values):
        if failing:
            raise Mine("as it is")

    kernel = tuned(FakeKernel(shape, on_launch=fails))
    kernel[(1,)](None, 100)
    failing.append(True)
    with pytest.raises(Mine, match="as it is"):
        kernel[(1,)](None, 100)


# ---- our own faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "method"), [(Rankings, "_tune"), (KeyReader, "read")])
def test_a_fault_of_ours_raises_in_strict_mode_and_else_stock_takes_over_with_one_error_line(
    sm_120, caplog, monkeypatch, owner, method
):
    def broken(*args, **kwargs):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(owner, method, broken)
    fake = FakeKernel(shape)
    kernel = tuned(fake)
    with pytest.raises(KeyError, match="a fault of ours"):
        kernel[(1,)](None, 100)
    assert fake.launches == []
    with settings.override(strict=False):
        kernel[(1,)](None, 100)
    assert fake.launches[-1]["BLOCK"] == 2 and len(kernel.do_bench.timed) == 3
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "shape" in caplog.records[0].getMessage() and "a fault of ours" in caplog.records[0].getMessage()


def test_what_the_users_own_code_raises_is_never_taken_for_a_fault_of_ours(sm_120, caplog):
    def broken_prune(configs, named, **kwargs):
        raise KeyError("the user's fault")

    fake = FakeKernel(shape)
    kernel = tuned(fake, prune_configs_by={"early_config_prune": broken_prune})
    with settings.override(strict=False), pytest.raises(KeyError, match="the user's fault"):
        kernel[(1,)](None, 100)
    assert fake.launches == [] and caplog.records == []


# ---- heuristics -----------------------------------------------------------------------------------------------------


def evened(x, n, EVEN, BLOCK=1):
    """EVEN comes from heuristics."""


def test_heuristics_below_the_tuner_read_each_configs_own_values(sm_120):
    fake = FakeKernel(evened)
    below = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(fake)
    kernel = smart_autotune(configs=blocks(7, 4), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(below)
    kernel[(1,)](None, 63)
    assert {(values["BLOCK"], values["EVEN"]) for values in fake.compiles} == {(7, True), (4, False)}
    assert [(launch["BLOCK"], launch["EVEN"]) for launch in fake.launches] == [(7, True), (4, False), (4, False)]
    assert isinstance(kernel, Autotuner) and kernel.base_fn is evened


def test_heuristics_above_the_tuner_become_part_of_the_key(sm_120):
    fake = FakeKernel(evened)
    kernel = smart_autotune(configs=blocks(7, 4), key=["EVEN"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
    above = triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})(kernel)
    for n in (63, 100, 61):
        above[(1,)](None, n)
    assert [dict((name, value) for name, _, value in key.values)["EVEN"] for key in kernel.cache] == [False, True]
    assert [launch["EVEN"] for launch in fake.launches[-4:]][-1] is False


def test_heuristics_on_real_compiles_below_the_tuner(sm_120):
    below = triton.heuristics({"BLOCK": lambda args: 32 * args["num_warps"]})(fresh(scaled_copy))
    kernel = smart_autotune(configs=[triton.Config({}, num_warps=2), triton.Config({}, num_warps=4)], key=["n"])(below)
    kernel[(1,)](*copy_arguments())
    assert {launch.metadata.num_warps for launch in sm_120.launches} == {2, 4}


def test_a_key_name_that_heuristics_below_fill_in_is_part_of_the_key(sm_120):
    fake = FakeKernel(evened)
    below = triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})(fake)
    kernel = smart_autotune(configs=blocks(7, 4), key=["EVEN"], do_bench=fake.bench(lambda v: v["BLOCK"]))(below)
    for n in (63, 100, 61):
        kernel[(1,)](None, n)
    assert [key.values for key in kernel.cache] == [(("EVEN", "bool", False),), (("EVEN", "bool", True),)]


def test_a_key_name_that_heuristics_fill_in_from_a_configs_value_is_left_out_as_with_stock(sm_120):
    fake = FakeKernel(evened)
    below = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(fake)
    kernel = smart_autotune(configs=blocks(7, 4), key=["n", "EVEN"], do_bench=fake.bench(lambda v: v["BLOCK"]))(below)
    kernel[(1,)](None, 63)
    assert [key.values for key in kernel.cache] == [(("n", "int", 63),)]


# ---- across kernels -------------------------------------------------------------------------------------------------


def test_the_records_of_every_kernel_are_reachable_in_one_list_oldest_first(sm_120):
    before = len(package.records())
    kernels = [tuned(FakeKernel(shape)), tuned(FakeKernel(three), key=())]
    kernels[1][(1,)](None, None, None)
    kernels[0][(1,)](None, 100)
    assert [record.kernel for record in package.records()[before:]] == ["three", "shape"]


def test_a_tuner_is_freed_with_its_last_reference(sm_120):
    kernel = tuned(FakeKernel(shape))
    kernel[(1,)](None, 100)
    alive = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert alive() is None
