"""Kernels whose launches are compared with stock's: what matters is their signatures. They do nothing."""

import torch
import triton
import triton.language as tl

OMITTED = type("Omitted", (), {"__repr__": lambda self: "OMITTED"})()

FACTOR: tl.constexpr = tl.constexpr(3)

INTS = [
    0,
    1,
    16,
    17,
    -1,
    -16,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    2,
    48,
]
FLOATS = [0.0, -0.0, 1.0, 2.5, float("nan"), float("inf")]
SCALARS = [*INTS, *FLOATS, True, False, None]
# Equal in a dict, other types: stock keeps one kernel for all of them.
ALIKE = [1, True, 1.0, 0, False, 0.0, -0.0, None, "a", "b", 2, 3, 2.0, 48, tl.float32, tl.float16]
CONSTANTS = [2, 3.5, True, None, "a", "b", tl.float32, tl.float16, torch.float16, float("nan"), -7, 2**63]


def _tensors() -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = [None]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool):
        memory = torch.zeros(64, dtype=dtype)
        found += [memory, memory[1:], memory[16:], memory[:48].view(12, 4), memory[1:41].view(5, 8)]
    found += [torch.zeros(()), torch.zeros(0), torch.zeros(3, 4, 5), torch.nn.Parameter(torch.zeros(9))]
    return found


TENSORS = _tensors()
FEW_TENSORS = [TENSORS[1], TENSORS[2], TENSORS[6], TENSORS[8], TENSORS[14], None]


@triton.jit
def nothing():
    pass


@triton.jit
def only_blocks(BLOCK: tl.constexpr, WIDTH: tl.constexpr = 4):
    pass


@triton.jit
def copied(src, dst, n, scale, BLOCK: tl.constexpr):
    pass


@triton.jit
def wide(src, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr = 4):
    pass


@triton.jit
def batched(src, dst, num_tokens, scale, BLOCK: tl.constexpr):
    pass


@triton.jit
def optional(src, bias=None, residual=None, n=16, shift=2.5, causal=False, BLOCK: tl.constexpr = 64):
    pass


@triton.jit
def constants(src, n, MODE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    pass


@triton.jit(do_not_specialize=["n", 3], do_not_specialize_on_alignment=["dst", "m"])
def unspecialised(src, dst, n, k, m, BLOCK: tl.constexpr):
    pass


@triton.jit
def annotated(
    src: tl.const, n: tl.int64, m: "i32", flag: tl.int1, scale: tl.float32, k: "u64", BLOCK: tl.constexpr  # noqa: F821
):  # fmt: skip
    pass


@triton.jit
def colliding(
    x, y, z, size_, key_, device_, tuner, jit, settings, plans, p_x, c_BLOCK, head, start, BLOCK: tl.constexpr
):
    pass


@triton.jit
def builtins(len, repr, tuple, callable, cache, configs, driver, enter, MISSING, constant_9_, BLOCK: tl.constexpr = 1):
    pass


@triton.jit
def reserved(grid, warmup, learn, config_, BLOCK: tl.constexpr):
    pass


@triton.jit
def underscored(n__, plans__, p_n____, BLOCK: tl.constexpr):
    pass


@triton.jit
def uses_a_global(src, n, BLOCK: tl.constexpr):
    if n > FACTOR:
        pass


@triton.jit
def with_scratch(src, n, BLOCK: tl.constexpr):
    described = tl.make_tensor_descriptor(src, [n, n], [n, 1], [BLOCK, BLOCK])
    described.store([0, 0], described.load([0, 0]))
