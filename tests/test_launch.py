"""A config's compile for one call: host descriptors shaped by each config's hook, live arguments left alone."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError
from triton.tools.tensor_descriptor import TensorDescriptor

from smart_autotune import Outcome, smart_autotune
from smart_autotune.launch import Call
from support.fake_kernel import FakeKernel
from support.kernels import fresh, scaled_copy, tile_arguments
from support.stub_driver import ScriptedBench


@triton.jit
def descriptor_copy(source, target, BLOCK: triton.language.constexpr):
    tile = source.load([0, 0])
    target.store([0, 0], tile)


def set_blocks(arguments):
    """What authors write: the hook shapes both descriptors by the config's own value."""
    for name in ("source", "target"):
        arguments[name].block_shape = [arguments["BLOCK"], arguments["BLOCK"]]


def clear_and_set_blocks(arguments):
    arguments["target"].base.zero_()
    set_blocks(arguments)


def descriptors():
    return [TensorDescriptor.from_tensor(torch.ones(128, 128, dtype=torch.float16), [16, 16]) for _ in range(2)]


def block_of(compiled):
    """The block shape that a compiled kernel's first descriptor has."""
    return re.search(r"\[(.+)\]", compiled.src.signature["source"])[1]


def test_each_config_is_compiled_with_the_block_shape_that_its_own_hook_sets(sm_90):
    configs = [triton.Config({"BLOCK": size}, pre_hook=set_blocks) for size in (64, 32)]
    kernel = smart_autotune(configs=configs, key=[])(triton.jit(descriptor_copy.fn))
    source, target = descriptors()
    call = kernel._engine.call((source, target), {"grid": (1,), "warmup": False})
    compiled = [call.compile(config) for config in configs]
    assert [block_of(kernel) for kernel in compiled] == ["64, 64", "32, 32"]
    assert source.block_shape == target.block_shape == [16, 16]


def test_compiling_runs_no_hook_on_a_live_tensor_or_descriptor(sm_90):
    configs = [triton.Config({"BLOCK": size}, pre_hook=clear_and_set_blocks) for size in (64, 32)]
    kernel = smart_autotune(configs=configs, key=[])(triton.jit(descriptor_copy.fn))
    source, target = descriptors()
    assert len(kernel.warmup(source, target, grid=(1,))) == 2
    call = kernel._engine.call((source, target), {"grid": (1,), "warmup": False})
    for config in configs:
        call.compile(config)
    assert source.block_shape == [16, 16] and target.block_shape == [16, 16]
    assert torch.all(target.base == 1)


def test_the_winners_hook_runs_last_so_that_its_launch_has_its_block_shape(sm_90):
    configs = [triton.Config({"BLOCK": size}, pre_hook=set_blocks, num_warps=w) for size, w in ((64, 4), (32, 2))]
    bench = ScriptedBench(sm_90, lambda launch: float(8 - launch.metadata.num_warps))
    kernel = smart_autotune(configs=configs, key=[], do_bench=bench)(triton.jit(descriptor_copy.fn))
    source, target = descriptors()
    for _ in range(2):
        compiled = kernel[(1,)](source, target)
        assert kernel.best_config is configs[0]
        assert source.block_shape == [64, 64] and compiled.metadata.num_warps == 4
    assert all(verdict.fits for verdict in kernel.records[0].verdicts)
    assert [launch.metadata.num_warps for launch in sm_90.launches] == [4, 2, 4, 4]


def test_a_stand_in_never_reaches_the_launch(sm_90):
    configs = [triton.Config({"BLOCK": size}, pre_hook=set_blocks) for size in (64, 32)]
    kernel = smart_autotune(configs=configs, key=[])(triton.jit(descriptor_copy.fn))
    source, target = descriptors()
    kernel[(1,)](source, target)
    for launch in sm_90.launches:
        assert launch.args[0] is source and launch.args[1] is target


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def test_a_hook_that_fails_on_stand_ins_costs_its_config_alone(sm_90):
    def reads_values(arguments):
        arguments["source"].base[0, 0].item()
        set_blocks(arguments)

    configs = [triton.Config({"BLOCK": 64}, pre_hook=reads_values), triton.Config({"BLOCK": 32}, pre_hook=set_blocks)]
    kernel = smart_autotune(configs=configs, key=[])(triton.jit(descriptor_copy.fn))
    kernel[(1,)](*descriptors())
    outcomes = {v.config.kwargs["BLOCK"]: v.outcome for v in kernel.records[0].verdicts}
    assert outcomes == {64: Outcome.COMPILE_FAILED, 32: Outcome.WON}


def test_arguments_may_be_replaced_whichever_way_they_were_passed(sm_120):
    kernel = smart_autotune(configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 2})], key=["n"])(
        FakeKernel(shape)
    )
    for args, kwargs in (((None, 63), {}), ((None,), {"n": 63}), ((), {"x": None, "n": 63})):
        call = kernel._engine.call(args, {**kwargs, "grid": (1,), "warmup": False}).replaced({"n": 100})
        assert call.hook_arguments(kernel.configs[0])["n"] == 100
        assert call.named == {"x": None, "n": 100}
        assert call.run(kernel.configs[0]).values["n"] == 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_compile_is_for_the_dtypes_of_its_call(sm_120, dtype):
    kernel = smart_autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 32})], key=[])(
        fresh(scaled_copy)
    )
    x = tile_arguments()[0].to(dtype)
    compiled = kernel._engine.call((x, x, 63, 2.0), {"grid": (1,), "warmup": False}).compile(kernel.configs[0])
    assert compiled.src.signature["x"] == {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]


PARSE_RACE = SystemError("AST constructor recursion depth mismatch (before=216, after=122)")


def raised_by_tritons_front_end(about: str) -> Exception:
    """As it wraps what was raised while it compiled a function that the kernel calls."""
    try:
        try:
            raise PARSE_RACE
        except SystemError as error:
            message = repr(error) if about == "message" else None
            raise CompilationError("def f(): pass", None, message) from (None if about == "message" else error)
    except CompilationError as wrapped:
        return wrapped


@pytest.mark.parametrize(
    "race", [PARSE_RACE, raised_by_tritons_front_end("message"), raised_by_tritons_front_end("cause")]
)
def test_threads_that_meet_in_the_parser_lose_no_config(race):
    raised = [race, race]

    class Fake:
        def run(self, *args, **kwargs):
            if raised:
                raise raised.pop()
            return "compiled"

    call = Call(Fake(), (), (), {}, {}, {})
    assert call.compile(triton.Config({})) == "compiled"


def test_another_error_of_the_front_end_is_raised_at_once():
    class Fake:
        runs = 0

        def run(self, *args, **kwargs):
            self.runs += 1
            raise CompilationError("def f(): pass", None, "no such name")

    fake = Fake()
    with pytest.raises(CompilationError):
        Call(fake, (), (), {}, {}, {}).compile(triton.Config({}))
    assert fake.runs == 1
