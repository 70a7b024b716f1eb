"""What becomes of configs that cannot run: real compiles for real, compiler failures and device limits by stand-ins."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from smart_autotune import Outcome, prefilter, settings, smart_autotune
from smart_autotune.limits import DeviceLimits
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy, tile, tile_arguments, tile_product
from support.stub_driver import StubDriver, active

SM_120 = DeviceLimits("sm_120", 101_376)


def verdicts_of(kernel):
    return {verdict.config: verdict for verdict in kernel.records[-1].verdicts}


def shape(x, n, BLOCK=1):
    """The signature of the fake kernels here."""


def blocks(*sizes):
    return [triton.Config({"BLOCK": size}) for size in sizes]


# ---- shared memory, on compiled numbers -----------------------------------------------------------------------------


def test_a_config_over_the_cap_of_sm_120_is_never_loaded_or_launched_and_the_others_are_tuned(sm_120):
    configs = [tile(8), tile(2), tile(3)]
    kernel = smart_autotune(configs=configs, key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    over = verdicts_of(kernel)[configs[0]]
    assert (over.outcome, over.need, over.limit, over.unit) == (Outcome.OVER_SHARED_MEMORY, 114_688, 101_376, "bytes")
    assert over.excess == 114_688 - 101_376
    assert over.median_us is None and over.registers is None
    assert {launch.metadata.num_stages for launch in sm_120.launches} == {2, 3}
    assert {shared for _, shared in sm_120.loaded} == {16_384, 32_768}
    assert [v.outcome for v in verdicts_of(kernel).values()].count(Outcome.WON) == 1
    assert kernel.best_config in configs[1:]


def test_the_same_config_fits_sm_90_because_the_device_is_asked_and_not_its_capability(sm_90):
    configs = [tile(8), tile(2)]
    kernel = smart_autotune(configs=configs, key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    assert all(verdict.fits for verdict in verdicts_of(kernel).values())
    assert {verdict.limit for verdict in verdicts_of(kernel).values()} == {232_448}
    assert {launch.metadata.num_stages for launch in sm_90.launches} == {2, 8}


def test_a_device_of_capability_12_with_a_bigger_cap_gets_the_bigger_cap():
    with active(StubDriver(120, shared_bytes=150_000)):
        kernel = smart_autotune(configs=[tile(8), tile(2)], key=[])(fresh(tile_product))
        kernel[(1,)](*tile_arguments())
    assert all(verdict.fits and verdict.limit == 150_000 for verdict in verdicts_of(kernel).values())


def test_the_need_is_what_the_compiler_says_and_follows_no_formula_that_holds_on_two_archs():
    configs = [tile(stages) for stages in (1, 2, 3)]
    needs = {}
    for arch in (120, 90):
        with active(StubDriver(arch)):
            kernel = smart_autotune(configs=configs, key=[])(fresh(tile_product))
            kernel[(1,)](*tile_arguments())
            compiled = [
                fresh(tile_product).warmup(*tile_arguments(), grid=(1,), **config.all_kwargs()).metadata.shared
                for config in configs
            ]
        needs[arch] = [verdicts_of(kernel)[config].need for config in configs]
        assert needs[arch] == compiled
    naive = [stages * 2 * 64 * 64 * 2 for stages in (1, 2, 3)]  # stages x (A tile + B tile) x 2 bytes
    assert needs[90] == naive
    assert needs[120] != naive


def test_registers_and_spill_bytes_of_fitting_configs_are_recorded(sm_120):
    sm_120.utils.load_binary = lambda name, binary, shared, device: ("module", name, 77, 3, 1024)
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    assert {(v.registers, v.spill_bytes) for v in kernel.records[-1].verdicts} == {(77, 12)}
    assert all(v.fits for v in kernel.records[-1].verdicts), "spills are shown, never pruned on"


def test_a_config_of_the_author_is_never_edited_and_the_winner_is_that_very_object(sm_120):
    configs = [tile(8), tile(2), tile(3)]
    before = [dict(vars(config), kwargs=dict(config.kwargs)) for config in configs]
    kernel = smart_autotune(configs=configs, key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    assert [vars(config) for config in configs] == before
    assert kernel.configs is configs
    assert any(kernel.best_config is config for config in configs)
    assert all(any(verdict.config is config for config in configs) for verdict in kernel.records[-1].verdicts)


# ---- threads --------------------------------------------------------------------------------------------------------


def test_more_threads_than_a_block_may_have_is_seen_without_loading(sm_120):
    configs = [triton.Config({"BLOCK": 2048}, num_warps=64), triton.Config({"BLOCK": 128})]
    kernel = smart_autotune(configs=configs, key=[])(fresh(scaled_copy))
    kernel[(1,)](*copy_arguments())
    over = verdicts_of(kernel)[configs[0]]
    assert (over.outcome, over.need, over.limit, over.unit) == (Outcome.OVER_THREADS, 2048, 1024, "threads")
    assert len(sm_120.loaded) == 1
    assert kernel.best_config is configs[1]


def test_the_functions_own_thread_limit_is_checked_after_the_load_and_such_a_config_is_never_launched(sm_120):
    sm_120.threads_of = lambda name: 128
    configs = [triton.Config({"BLOCK": 256}, num_warps=8), triton.Config({"BLOCK": 128}, num_warps=4)]
    kernel = smart_autotune(configs=configs, key=[])(fresh(scaled_copy))
    kernel[(1,)](*copy_arguments())
    over = verdicts_of(kernel)[configs[0]]
    assert (over.outcome, over.need, over.limit, over.unit) == (Outcome.OVER_THREADS, 256, 128, "threads")
    assert {launch.metadata.num_warps for launch in sm_120.launches} == {4}


def test_tensor_memory_is_compared_in_columns():
    metadata = SimpleNamespace(shared=100, tmem_size=640, num_warps=4)
    verdict = prefilter.judge(tile(2), metadata, SM_120)
    assert (verdict.outcome, verdict.need, verdict.limit, verdict.unit) == (
        Outcome.OVER_TENSOR_MEMORY, 640, 512, "columns",
    )  # fmt: skip


@pytest.mark.parametrize(("shared", "fits"), [(101_376, True), (101_377, False)])
def test_a_need_equal_to_the_limit_fits_and_one_byte_more_does_not(shared, fits):
    metadata = SimpleNamespace(shared=shared, tmem_size=None, num_warps=32)
    assert prefilter.judge(tile(2), metadata, SM_120).fits is fits


def test_metadata_that_says_nothing_counts_as_fitting():
    assert prefilter.judge(tile(2), None, SM_120).fits


# ---- failures of one config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome", "need"),
    [
        (OutOfResources(663_808, 101_376, "shared memory"), Outcome.OVER_SHARED_MEMORY, 663_808),
        (OutOfResources(640, 512, "tensor memory"), Outcome.OVER_TENSOR_MEMORY, 640),
        (OutOfResources(2048, 1024, "threads"), Outcome.OVER_THREADS, 2048),
        (OutOfResources(5, 4, "something new"), Outcome.COMPILE_FAILED, None),
        (PTXASError("`ptxas` failed\nptxas fatal : Register allocation failed"), Outcome.ASSEMBLER_FAILED, None),
        (RuntimeError("PassManager::run failed"), Outcome.COMPILE_FAILED, None),
        (AssertionError("num_warps must be a power of 2"), Outcome.COMPILE_FAILED, None),
        (CompilationError("x", None, "shape"), Outcome.COMPILE_FAILED, None),
        (CompileTimeAssertionFailure("x", None, "static"), Outcome.COMPILE_FAILED, None),
        (MemoryError(), Outcome.OUT_OF_DEVICE_MEMORY, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_way_of_failing_to_compile_is_a_verdict_of_that_config_alone(sm_120, error, outcome, need):
    def fails_for_2(values):
        if values["BLOCK"] == 2:
            raise error

    fake = FakeKernel(shape, on_compile=fails_for_2)
    kernel = smart_autotune(configs=blocks(1, 2, 4), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
    kernel[(1,)](None, 100)
    verdict = verdicts_of(kernel)[kernel.configs[1]]
    assert (verdict.outcome, verdict.need) == (outcome, need)
    assert kernel.best_config is kernel.configs[0]
    assert [verdicts_of(kernel)[c].median_us for c in kernel.configs] == [1000.0, None, 4000.0]


def test_three_configs_that_fail_in_three_ways_are_all_told_apart_in_the_record_and_the_table(sm_120):
    def fails(values):
        if values["BLOCK"] == 1:
            raise RuntimeError("PassManager::run failed")
        if values["BLOCK"] == 2:
            raise PTXASError("ptxas fatal : Register allocation failed with register count of '8'")
        return {4: 200_704}.get(values["BLOCK"], 1024)

    fake = FakeKernel(shape, on_compile=fails)
    kernel = smart_autotune(configs=blocks(1, 2, 4, 8), key=["n"])(fake)
    kernel[(1,)](None, 63)
    found = [verdicts_of(kernel)[config] for config in kernel.configs]
    assert [str(v.outcome) for v in found] == ["COMPILE_FAILED", "ASSEMBLER_FAILED", "OVER_SHARED_MEMORY", "WON"]
    assert "PassManager::run failed" in found[0].detail
    assert "Register allocation failed" in found[1].detail
    assert (found[2].need, found[2].limit, found[2].excess) == (200_704, 101_376, 99_328)
    table = kernel.explain()
    for text in ("PassManager::run failed", "Register allocation failed", "200,704", "101,376", "99,328"):
        assert text in table
    assert dict(kernel.records[-1].dropped) == {"COMPILE_FAILED": 1, "ASSEMBLER_FAILED": 1, "OVER_SHARED_MEMORY": 1}


def test_when_every_config_fails_to_compile_the_first_error_itself_is_raised_and_nothing_is_kept(sm_120):
    def fails(values):
        raise RuntimeError(f"PassManager::run failed for block {values['BLOCK']}")

    kernel = smart_autotune(configs=blocks(1, 2), key=["n"])(FakeKernel(shape, on_compile=fails))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="block 1"):
            kernel[(1,)](None, 100)
    assert kernel.cache == {} and kernel.records == []


def test_an_assembler_failure_is_a_verdict_and_its_ptx_stays_off_stdout(sm_120, capfd):
    configs = [tile(2, maxnreg=8), tile(2)]
    kernel = smart_autotune(configs=configs, key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    assert verdicts_of(kernel)[configs[0]].outcome is Outcome.ASSEMBLER_FAILED
    assert kernel.best_config is configs[1]
    assert capfd.readouterr().out == ""


def test_print_works_again_in_tritons_backend_after_compiling(sm_120, capsys):
    from triton.backends.nvidia import compiler as backend

    with prefilter.quiet_assembler():
        backend.print("not about the assembler")
    assert capsys.readouterr().out == "not about the assembler\n"
    assert "print" not in vars(backend)


@triton.jit
def warp_specialized(a, b, c, K, BLOCK: tl.constexpr, SPECIALIZE: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in tl.range(0, K, BLOCK, warp_specialize=SPECIALIZE):
        x = tl.load(a + rows[:, None] * K + (start + rows)[None, :])
        y = tl.load(b + (start + rows)[:, None] * BLOCK + rows[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * BLOCK + rows[None, :], acc)


@pytest.mark.parametrize("arch", [120, 90])
def test_a_warp_specialised_loop_that_this_arch_cannot_compile_does_not_end_the_sweep(arch, capfd):
    configs = [triton.Config({"BLOCK": 64, "SPECIALIZE": special}) for special in (True, False)]
    a, b, c, k, *_ = tile_arguments()
    with active(StubDriver(arch)):
        kernel = smart_autotune(configs=configs, key=[])(fresh(warp_specialized))
        kernel[(1,)](a, b, c, k)
    assert verdicts_of(kernel)[configs[0]].outcome is Outcome.COMPILE_FAILED
    assert "PassManager::run failed" in verdicts_of(kernel)[configs[0]].detail
    assert kernel.best_config is configs[1]


def test_a_config_that_sits_in_the_compiler_is_given_up_on_and_the_others_are_served(sm_120):
    released = threading.Event()

    def hangs_for_2(values):
        if values["BLOCK"] == 2:
            released.wait(60)

    fake = FakeKernel(shape, on_compile=hangs_for_2)
    kernel = smart_autotune(configs=blocks(2, 1, 4, 8), key=["n"])(fake)
    try:
        with settings.override(compile_timeout_secs=1.0, compile_workers=1):
            kernel[(1,)](None, 100)
    finally:
        released.set()
    assert verdicts_of(kernel)[kernel.configs[0]].outcome is Outcome.COMPILE_TIMEOUT
    assert "no result after" in verdicts_of(kernel)[kernel.configs[0]].detail
    assert kernel.best_config is kernel.configs[1]
    assert [v.outcome for v in kernel.records[-1].verdicts].count(Outcome.SLOWER) == 2


# ---- nothing launched, nothing mixed up -----------------------------------------------------------------------------


def test_compiling_launches_nothing_and_loads_nothing(sm_120):
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[])(fresh(tile_product))
    call = kernel._engine.call(tile_arguments(), {"grid": (1,), "warmup": False})
    found = prefilter.compile_candidates(call, kernel.configs, SM_120)
    assert [candidate.verdict.need for candidate in found] == [16_384, 32_768]
    assert sm_120.launches == [] and sm_120.loaded == []


def test_configs_that_differ_only_in_ir_override_are_two_configs(sm_120):
    configs = [triton.Config({"BLOCK": 4}, ir_override=name) for name in ("a.ttgir", "b.ttgir")]
    fake = FakeKernel(shape)
    bench = fake.bench(lambda values: {"a.ttgir": 2.0, "b.ttgir": 1.0}[values["ir_override"]])
    kernel = smart_autotune(configs=configs, key=["n"], do_bench=bench)(fake)
    kernel[(1,)](None, 100)
    assert kernel.best_config is configs[1]
    assert [launch["ir_override"] for launch in bench.timed] == ["a.ttgir", "b.ttgir"]
    assert fake.launches[-1]["ir_override"] == "b.ttgir"


# ---- nothing fits: the rescue ladder --------------------------------------------------------------------------------


def test_when_no_config_fits_the_same_config_with_fewer_stages_is_served_and_a_warning_says_so(sm_120, caplog):
    configs = [tile(9), tile(8)]
    kernel = smart_autotune(configs=configs, key=[])(fresh(tile_product))
    kernel[(1,)](*tile_arguments())
    assert kernel.best_config.num_stages == 7 and kernel.best_config.kwargs == configs[0].kwargs
    assert [config.num_stages for config in configs] == [9, 8]
    assert kernel.configs is configs
    assert {launch.metadata.num_stages for launch in sm_120.launches} == {7}
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "tile_product" in warned[0] and "num_stages=7" in warned[0]
    assert kernel.records[-1].served_by == "rescue"
    outcomes = [str(verdict.outcome) for verdict in kernel.records[-1].verdicts]
    assert outcomes == ["WON", "OVER_SHARED_MEMORY", "OVER_SHARED_MEMORY"]


def test_a_rescued_config_serves_later_calls_without_compiling_or_warning_again(sm_120, caplog):
    fake = FakeKernel(shape, on_compile=lambda values: 60_000 * (values["num_stages"] - 1))
    kernel = smart_autotune(configs=blocks(1, 2), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
    kernel[(1,)](None, 100)
    assert fake.launches[-1]["num_stages"] == 2
    compiles = len(fake.compiles)
    caplog.clear()
    kernel[(1,)](None, 100)
    assert len(fake.compiles) == compiles and caplog.records == []
    assert (fake.launches[-1]["num_stages"], fake.launches[-1]["BLOCK"]) == (2, 1)


def test_the_ladder_also_catches_what_only_the_compiler_or_the_load_refuses(sm_120):
    def refuses(values):
        if values["num_stages"] > 1:
            raise OutOfResources(663_808, 101_376, "shared memory")

    fake = FakeKernel(shape, on_compile=refuses)
    kernel = smart_autotune(configs=blocks(1), key=["n"])(fake)
    kernel[(1,)](None, 100)
    assert [launch["num_stages"] for launch in fake.launches][-1] == 1


def test_the_rescue_can_be_turned_off(sm_120):
    kernel = smart_autotune(configs=[tile(9), tile(8)], key=[])(fresh(tile_product))
    with settings.override(rescue=False), pytest.raises(triton.runtime.errors.AutotunerError, match="114,688"):
        kernel[(1,)](*tile_arguments())
    assert sm_120.launches == []


def test_configs_equal_after_taking_stages_away_are_compiled_once():
    compiled = []

    def compile_all(configs):
        compiled.extend(configs)
        return [prefilter.Candidate(c, prefilter.judge(c, SimpleNamespace(shared=1), SM_120)) for c in configs]

    found = prefilter.rescue([tile(9), tile(8), tile(9, size=32)], compile_all)
    assert [candidate.config.num_stages for candidate in found] == [8, 8]
    assert len(compiled) == 2
