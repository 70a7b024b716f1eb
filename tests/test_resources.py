"""Registers and spills from the binary, compared with what the assembler itself says."""

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from smart_autotune import resources
from smart_autotune.audit import _for_target
from support import audited_kernels as kernels


def build(kernel, arch, config, arguments):
    function = _for_target(kernel, GPUTarget("cuda", arch, 32), lambda: None)
    return function.run(**arguments, **config.all_kwargs())


@pytest.fixture(scope="module")
def spilling():
    config = kernels.tile(128, 128, 32, stages=3, maxnreg=64)
    return build(kernels.plain, 80, config, kernels.square())


def test_a_kernel_within_its_registers_spills_nothing():
    found = resources.of(build(kernels.plain, 90, kernels.FITS, kernels.square()))
    assert 16 <= found.registers <= 255 and found.spill_bytes == 0


def test_spills_are_the_local_memory_of_a_thread(spilling):
    found = resources.of(spilling)
    assert found.registers == 64 and found.spill_bytes > 100


@pytest.mark.blackwell
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_binary_and_assembler_agree(arch):
    config = kernels.tile(128, 128, 32, stages=3, maxnreg=96)
    compiled = build(kernels.plain, arch, config, kernels.square())
    name = compiled.metadata.name
    assembled = resources.read_assembler(compiled.asm["ptx"], name, arch)
    assert assembled is not None
    assert resources.read_binary(compiled.asm["cubin"], name) == assembled


def test_without_the_binary_tool_the_assembler_answers(spilling, monkeypatch):
    found = resources.of(spilling)
    monkeypatch.setattr(resources, "read_binary", lambda cubin, name: None)
    assert resources.of(spilling) == found


def test_without_any_tool_nothing_is_claimed(spilling, monkeypatch):
    monkeypatch.setattr(resources, "_output", lambda *_: "")
    resources.read_binary.cache_clear()
    resources.read_assembler.cache_clear()
    assert resources.of(spilling) is None
    resources.read_binary.cache_clear()
    resources.read_assembler.cache_clear()


def test_a_tool_that_cannot_run_is_no_error():
    class Missing:
        path = "/no/such/tool"

    assert resources._output(Missing(), "-v") == ""


def test_a_binary_is_read_once(spilling, monkeypatch):
    first = resources.of(spilling)
    monkeypatch.setattr(resources.subprocess, "run", lambda *_, **__: pytest.fail("ran a tool again"))
    assert resources.of(spilling) == first


@triton.jit
def saying(c_ptr, M):
    value = tl.load(c_ptr)
    tl.device_print("value", value, M)


def test_local_arrays_of_the_kernel_are_not_spills():
    arguments = {"c_ptr": torch.empty(1, dtype=torch.int32, device="meta"), "M": 1024}
    compiled = build(saying, 90, triton.Config({}), arguments)
    frame = resources.read_binary(compiled.asm["cubin"], compiled.metadata.name)
    assert frame.spill_bytes > 0 and resources.of(compiled).spill_bytes == 0
