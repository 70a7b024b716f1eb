"""Small kernels that compile in well under a second."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def scaled_copy(x, y, n, scale, BLOCK: tl.constexpr):
    """y[n] = x[n] * scale. BLOCK cuts n."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * scale, mask=offsets < n)


@triton.jit
def tile_product(a, b, c, stride_a, stride_b, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[BM, BN] = a[BM, K] @ b[K, BN] of row-major fp16. BK cuts K; the loop is pipelined, so stages cost memory."""
    rows = tl.arange(0, BM)
    columns = tl.arange(0, BN)
    steps = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + rows[:, None] * stride_a + (start + steps)[None, :])
        y = tl.load(b + (start + steps)[:, None] * stride_b + columns[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * stride_b + columns[None, :], acc)


def fresh(kernel: Any) -> Any:
    """The same kernel without what it compiled so far (a jit function keeps kernels of the driver it first met)."""
    return triton.jit(kernel.fn)


def tile(stages: int, size: int = 64, warps: int = 4, **options: Any) -> triton.Config:
    """On sm_120 with 16-divisible strides and size 64 the need is 16,384 bytes for each stage after the first."""
    return triton.Config({"BM": size, "BN": size, "BK": size}, num_warps=warps, num_stages=stages, **options)


def tile_arguments(k: int = 64) -> tuple[Any, ...]:
    """Arguments of ``tile_product`` with K = strides = k; a k that 16 divides lets loads be asynchronous and wide."""
    operand = torch.zeros(k, k, dtype=torch.float16)
    return operand, operand, torch.zeros(k, k), k, k, k


def copy_arguments(n: int = 1000, **options: Any) -> tuple[Any, ...]:
    return torch.zeros(n, **options), torch.zeros(n, **options), n, 2.0
