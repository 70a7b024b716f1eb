"""Offline audits with real compiles."""

import pytest
import torch
import triton

from smart_autotune import settings, smart_autotune
from smart_autotune.audit import audit, examples_of, tuner_of
from smart_autotune.verdict import Outcome
from support import audited_kernels as kernels


def outcomes(result):
    return [verdict.outcome for verdict in result.verdicts]


@pytest.mark.blackwell
def test_each_config_has_its_own_verdict_and_none_ends_the_audit():
    result = audit(kernels.matmul, "sm_120", "square", kernels.square())
    assert outcomes(result) == [
        Outcome.NOT_TIMED,
        Outcome.OVER_SHARED_MEMORY,
        Outcome.ASSEMBLER_FAILED,
        Outcome.COMPILE_FAILED,
        Outcome.PRUNED_BY_USER,
    ]
    assert [verdict.config for verdict in result.verdicts] == list(kernels.matmul.configs)
    fits, over, assembler, compiler, _ = result.verdicts
    assert (fits.need, fits.limit, fits.unit, fits.spill_bytes) == (8192, 101_376, "bytes", 0)
    assert fits.registers > 0 and fits.compile_secs > 0
    assert (over.need, over.excess) == (196_608, 196_608 - 101_376)
    assert "power of 2" in compiler.detail and "\n" not in assembler.detail + compiler.detail
    assert result.fits and not result.notes


@pytest.mark.blackwell
def test_the_need_is_the_compiled_one_of_each_arch():
    kernel = kernels.autotuned(kernels.tile(128, 256, 64, warps=8, stages=3))
    needs = {}
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        needs[arch] = audit(kernel, arch, "square", kernels.square()).verdicts[0].need
    assert needs == {"sm_80": 98_304, "sm_90": 147_456, "sm_100": 147_472, "sm_120": 98_304}


def test_an_unaligned_argument_changes_the_need():
    kernel = kernels.autotuned(kernels.tile(128, 128, 64, warps=8, stages=3))
    aligned = audit(kernel, "sm_90", "aligned", kernels.square(1024)).verdicts[0]
    unaligned = audit(kernel, "sm_90", "unaligned", kernels.square(1021)).verdicts[0]
    assert aligned.need == 98_304 and unaligned.need < aligned.need


def test_more_threads_than_a_block_may_have_are_over_threads():
    verdict = audit(kernels.autotuned(kernels.tile(64, 64, 32, warps=64)), "sm_90", "0", kernels.square()).verdicts[0]
    assert (verdict.outcome, verdict.need, verdict.limit) == (Outcome.OVER_THREADS, 2048, 1024)


def test_a_type_that_the_arch_cannot_load_is_a_verdict():
    arguments = {**kernels.square(), "a_ptr": torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="meta")}
    result = audit(kernels.autotuned(kernels.FITS), "sm_80", "fp8", arguments)
    assert outcomes(result) == [Outcome.COMPILE_FAILED] and "fp8e4nv" in result.verdicts[0].detail
    assert not result.fits


def test_a_what_if_cap_lowers_the_limit():
    with settings.override(shared_bytes_cap=8000):
        result = audit(kernels.autotuned(kernels.FITS), "sm_90", "square", kernels.square())
    assert (result.verdicts[0].limit, result.verdicts[0].fits, result.limits.what_if) == (8000, False, True)


def test_heuristics_below_the_tuner_see_the_config():
    below = triton.heuristics({"BLOCK_K": lambda args: args["BLOCK_M"] // 2})(kernels.plain)
    configs = [triton.Config({"BLOCK_M": m, "BLOCK_N": 64}, num_stages=2) for m in (64, 128)]
    kernel = smart_autotune(configs=configs, key=["M"])(below)
    result = audit(kernel, "sm_90", "square", kernels.square())
    assert [verdict.need for verdict in result.verdicts] == [16_384, 49_152]


def test_heuristics_above_the_tuner_fill_its_arguments():
    arguments = kernels.square()
    del arguments["K"]
    kernel = triton.heuristics({"K": lambda args: args["M"]})(kernels.autotuned(kernels.FITS))
    assert outcomes(audit(kernel, "sm_90", "square", arguments)) == [Outcome.NOT_TIMED]
    assert tuner_of(kernel) is kernel.fn


def test_a_config_hook_shapes_copies_of_the_descriptors():
    (arguments,) = examples_of(kernels.with_descriptor).values()
    result = audit(kernels.with_descriptor, "sm_90", "0", arguments)
    assert [verdict.need > 0 for verdict in result.verdicts] == [True, True]
    assert result.verdicts[1].need > result.verdicts[0].need
    assert arguments["a_desc"].block_shape == [1, 1]


def test_a_prune_that_cannot_run_offline_is_said_and_every_config_is_audited():
    def prune(configs, named_args, **kwargs):
        raise RuntimeError("0 active drivers")

    kernel = kernels.autotuned(kernels.FITS, kernels.UNWANTED, prune_configs_by={"early_config_prune": prune})
    result = audit(kernel, "sm_90", "square", kernels.square())
    assert outcomes(result) == [Outcome.NOT_TIMED] * 2
    assert "0 active drivers" in result.notes[0]


def test_a_prune_that_leaves_nothing_leaves_nothing_that_fits():
    kernel = kernels.autotuned(kernels.FITS, prune_configs_by={"early_config_prune": lambda *args, **kwargs: []})
    result = audit(kernel, "sm_90", "square", kernels.square())
    assert outcomes(result) == [Outcome.PRUNED_BY_USER] and not result.fits and result.notes


def test_a_performance_model_prunes_by_its_top_k():
    def smaller_is_better(BLOCK_M, **rest):
        return BLOCK_M

    model = {"perf_model": smaller_is_better, "top_k": 1}
    result = audit(
        kernels.autotuned(kernels.FITS, kernels.UNWANTED, prune_configs_by=model), "sm_90", "0", kernels.square()
    )
    assert outcomes(result) == [Outcome.PRUNED_BY_USER, Outcome.NOT_TIMED]


def test_configs_that_a_prune_makes_anew_come_last():
    def fewer_stages(configs, named_args, **kwargs):
        return [kernels.tile(64, 64, 32, stages=1)]

    kernel = kernels.autotuned(kernels.FITS, prune_configs_by={"early_config_prune": fewer_stages})
    result = audit(kernel, "sm_90", "square", kernels.square())
    assert outcomes(result) == [Outcome.PRUNED_BY_USER, Outcome.NOT_TIMED]
    assert result.verdicts[1].config.num_stages == 1


def test_each_compile_is_reported_while_it_goes_on():
    seen = []
    audit(kernels.matmul, "sm_90", "square", kernels.square(), compiled=lambda: seen.append(1))
    assert len(seen) == 4  # the fifth is pruned


def test_an_example_that_lacks_an_argument_is_named():
    arguments = kernels.square()
    del arguments["K"]
    with pytest.raises(ValueError, match="example 'square' lacks K"):
        audit(kernels.autotuned(kernels.FITS), "sm_90", "square", arguments)


def test_a_kernel_that_is_not_smart_autotuned_is_refused():
    with pytest.raises(ValueError, match="not smart-autotuned"):
        audit(kernels.plain, "sm_90", "square", kernels.square())


def test_a_list_of_examples_gets_numbers_as_names():
    kernel = kernels.autotuned(kernels.FITS, examples=lambda: [kernels.square(), kernels.square(64)])
    assert list(examples_of(kernel)) == ["0", "1"]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (None, "has no examples"),
        (dict, "examples returned none"),
        (lambda: ["x"], "'0' is a str"),
        (lambda: 1 // 0, "ZeroDivisionError"),
        (lambda: 7, "'int' object is not iterable"),
    ],
)
def test_examples_that_cannot_be_used_are_an_error_that_names_the_kernel(build, text):
    with pytest.raises(ValueError, match=text) as caught:
        examples_of(kernels.autotuned(kernels.FITS, examples=build))
    assert "kernel plain" in str(caught.value)
