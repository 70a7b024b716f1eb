"""Stock-autotuned and our own kernels to record and to compile again; each has something that a record must carry."""

import enum
from typing import NamedTuple

import triton
import triton.language as tl

from smart_autotune import smart_autotune
from support import audited_kernels as audited
from support.kernels import scaled_copy, tile


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


class Pair(NamedTuple):
    left: int
    right: int


@triton.jit
def doubled(x):
    return x * 2


@triton.jit
def odd_arguments(
    x, y, bias, n, one, scale, pair, OP: tl.constexpr, DTYPE: tl.constexpr, FACTOR: tl.constexpr, SIZES: tl.constexpr,
    NAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, y: tensors. bias: a tensor or None. one: 1. pair: two ints. The rest: constants of many types."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n) * scale * FACTOR + pair[0] + SIZES[1] + one
    if bias is not None:
        value += tl.load(bias + offsets, mask=offsets < n)
    tl.store(y + offsets, OP(value).to(DTYPE), mask=offsets < n)


odd = triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])(odd_arguments)


@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def with_a_heuristic(x, y, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y + offsets, tl.load(x + offsets))
    else:
        tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


below = smart_autotune(configs=[triton.Config({"BLOCK": size}) for size in (64, 1024)], key=["n"])(with_a_heuristic)
above = triton.heuristics({"scale": lambda args: 2.0})(
    smart_autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)], key=["n"])(
        scaled_copy
    )
)
described = audited.with_descriptor


@triton.jit
def product(a, b, c, stride_a, stride_b, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[BM, BN] = a[BM, K] @ b[K, BN] of row-major fp16."""
    rows = tl.arange(0, BM)
    columns = tl.arange(0, BN)
    steps = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + rows[:, None] * stride_a + (start + steps)[None, :])
        y = tl.load(b + (start + steps)[:, None] * stride_b + columns[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * stride_b + columns[None, :], acc)


CONFIGS = [tile(2), tile(3), tile(3, maxnreg=128), tile(9, warps=8), tile(3, size=7)]
tuned = smart_autotune(configs=CONFIGS, key=["K"])(product)
tight = smart_autotune(configs=[tile(9, warps=8), tile(10, warps=8)], key=["K"])(product)
