"""Sparse decode attention over DeepSeek-V4's paged FP8 cache, with real head counts and a tuned split kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from smart_autotune import settings
from smart_autotune.capture import is_capturing
from smart_autotune.kernels.sparse_decode.launcher import (
    INTERPRETED,
    has_dependent_launch,
    launch_options,
    launch_with,
    no_parts,
)
from smart_autotune.kernels.sparse_decode.layout import HEAD_DIM, TOKEN_BYTES
from smart_autotune.kernels.sparse_decode.tuning import (
    CONFIGS,
    drop_unsuited_head_blocks,
    rounded_width,
    split_kernel,
)

__all__ = ["sparse_decode"]

PAGE_ALIGN = 16


def sparse_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    num_heads: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token a row over the tokens that one or two index lists select.

    q: [T, 1, H, 512] bf16. cache, extra_cache: [P, S, 1, 584] uint8 or float8_e4m3fn, pages as in ``layout``.
    indices, extra_indices: [T, 1, W] or [T, W] int32 into the tokens of their cache; -1 is no token.
    topk_length, extra_topk_length: [T] int32, positions from there on do not count. sink: [H] fp32, one more
    term of the softmax's denominator. num_heads: the real heads, if fewer than H; the rest of q is not read.
    out: [T, 1, H, 512] bf16, or fp32 to be spared the rounding.

    Returns out, and with ``return_lse`` also lse [T, 1, H] fp32: natural, without the sink. A row without a
    valid token gives 0 and -inf. Heads from ``num_heads`` on are left as they were: what ``out`` held, or
    whatever memory a fresh result got.

    An index at or beyond the end of its cache is undefined behaviour; ``SMART_AUTOTUNE_STRICT=1`` raises
    ValueError for it (outside graph capture). Operands are fp16, sums fp32: |q| and the dequantised tokens
    must stay below 65,504, and parts of a token under 2^-15 lose bits.
    """
    heads = _check_query(q, num_heads)
    _check_list("", q, cache, indices, topk_length)
    _check_pairs(extra_cache, extra_indices, extra_topk_length)
    if extra_cache is not None and extra_indices is not None:
        _check_list("extra_", q, extra_cache, extra_indices, extra_topk_length)
    _check_rest(q, sink, softmax_scale, out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if q.shape[0] > 0:
        if settings.current().strict and not is_capturing():
            _check_indices("indices", cache, indices, topk_length)
            if extra_cache is not None and extra_indices is not None:
                _check_indices("extra_indices", extra_cache, extra_indices, extra_topk_length)
        lists = _lists(cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length)
        _launch(q, lists, sink, float(softmax_scale), heads, out, lse)
    return out if lse is None else (out, lse)


def _lists(
    cache: torch.Tensor,
    indices: torch.Tensor,
    length: torch.Tensor | None,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_length: torch.Tensor | None,
) -> dict[str, Any]:
    """The split kernel's arguments about the two lists."""
    width = indices.shape[-1]
    arguments: dict[str, Any] = {
        "cache_ptr": cache.view(torch.uint8),
        "indices_ptr": indices,
        "length_ptr": length,
        "extra_cache_ptr": None,
        "extra_indices_ptr": None,
        "extra_length_ptr": None,
        "topk": width,
        "extra_topk": 0,
        "page_bytes": cache.stride(0),
        "extra_page_bytes": 0,
        "stride_indices_row": indices.stride(0),
        "stride_extra_indices_row": 0,
        "topk_rounded": rounded_width(width),
        "extra_topk_rounded": 0,
        "PAGE_SIZE": cache.shape[1],
        "EXTRA_PAGE_SIZE": 1,
    }
    if extra_cache is not None and extra_indices is not None:
        extra_width = extra_indices.shape[-1]
        arguments |= {
            "extra_cache_ptr": extra_cache.view(torch.uint8),
            "extra_indices_ptr": extra_indices,
            "extra_length_ptr": extra_length,
            "extra_topk": extra_width,
            "extra_page_bytes": extra_cache.stride(0),
            "stride_extra_indices_row": extra_indices.stride(0),
            "extra_topk_rounded": rounded_width(extra_width),
            "EXTRA_PAGE_SIZE": extra_cache.shape[1],
        }
    return arguments


def _launch(
    q: torch.Tensor,
    lists: dict[str, Any],
    sink: torch.Tensor | None,
    softmax_scale: float,
    heads: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    config: triton.Config | None = None,
    splits: int | None = None,
    compute: Any = tl.float32 if INTERPRETED else tl.float16,
) -> None:
    """Split and, with more than one split a row, combine. Config, splits and compute are given by checks alone."""
    none = no_parts(q.device)
    arguments = {
        **lists,
        "q_ptr": q,
        "sink_ptr": sink,
        "out_ptr": out,
        "lse_ptr": lse,
        "part_ptr": none,
        "part_lse_ptr": none,
        "num_heads": heads,
        "num_splits": 1,
        "once": 1,
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(2),
        "stride_out_row": out.stride(0),
        "stride_out_head": out.stride(2),
        "stride_lse_row": 0 if lse is None else lse.stride(0),
        "softmax_scale": softmax_scale,
        "COMPUTE": compute,
        "EARLY": has_dependent_launch(q.device),
    }
    tuned = config is None and not INTERPRETED
    if tuned:
        config = split_kernel.config_for(**arguments, **launch_options(arguments))
    elif config is None:
        config = drop_unsuited_head_blocks(CONFIGS, arguments)[0]
    launch_with(arguments, config, splits=splits, through=split_kernel if tuned else None)


def _check_indices(name: str, cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None) -> None:
    """``SMART_AUTOTUNE_STRICT=1``: every index inside the cache. It reads them, so it waits for the GPU."""
    tokens = cache.shape[0] * cache.shape[1]
    flat = indices.reshape(indices.shape[0], -1)
    if length is not None:
        flat = flat.masked_fill(torch.arange(flat.shape[1], device=flat.device) >= length[:, None], -1)
    if flat.numel() and (largest := int(flat.max())) >= tokens:
        raise ValueError(f"{name}: expected indices below {tokens}, the tokens of its cache, got {largest}")


def _check(ok: bool, name: str, expected: str, tensor: Any) -> None:
    if not ok:
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: expected {expected}, got {tensor.dtype} {shape} strides {stride} on {tensor.device}")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def _check_query(q: torch.Tensor, num_heads: int | None) -> int:
    _check_tensor("q", q)
    shaped = q.dim() == 4 and q.shape[1] == 1 and q.shape[2] > 0 and q.shape[3] == HEAD_DIM
    _check(shaped and q.dtype == torch.bfloat16, "q", f"bf16 [T, 1, H, {HEAD_DIM}]", q)
    _check(q.stride(3) == 1, "q", "a last dimension of stride 1", q)
    _check(q.is_cuda or INTERPRETED, "q", "a CUDA tensor (a CPU one only under TRITON_INTERPRET=1)", q)
    if num_heads is None:
        return q.shape[2]
    if not isinstance(num_heads, int) or isinstance(num_heads, bool):
        raise TypeError(f"num_heads: expected an int or None, got {type(num_heads).__name__}")
    if not 1 <= num_heads <= q.shape[2]:
        raise ValueError(f"num_heads: expected 1 to {q.shape[2]}, the heads of q, got {num_heads}")
    return num_heads


def _check_list(
    prefix: str, q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None
) -> None:
    rows, name = q.shape[0], prefix + "cache"
    _check_tensor(name, cache)
    _check(cache.dtype in (torch.uint8, torch.float8_e4m3fn), name, "uint8 or float8_e4m3fn", cache)
    shaped = cache.dim() == 4 and min(cache.shape[:2]) > 0 and tuple(cache.shape[2:]) == (1, TOKEN_BYTES)
    _check(shaped and cache.stride(3) == 1, name, f"[P, S, 1, {TOKEN_BYTES}], last stride 1", cache)
    smallest = cache.shape[1] * TOKEN_BYTES
    paged = cache.stride(0) >= smallest and cache.stride(0) % PAGE_ALIGN == 0 and cache.data_ptr() % PAGE_ALIGN == 0
    _check(paged, name, f"pages of {smallest} bytes or more, {PAGE_ALIGN}-byte aligned", cache)
    _check(cache.device == q.device, name, f"on {q.device} as q is", cache)

    name = prefix + "indices"
    _check_tensor(name, indices)
    shaped = indices.dim() == 2 or (indices.dim() == 3 and indices.shape[1] == 1)
    shaped = shaped and indices.shape[0] == rows and indices.dtype == torch.int32
    _check(shaped, name, f"int32 [{rows}, 1, W] or [{rows}, W]", indices)
    _check(indices.stride(-1) == 1 or indices.shape[-1] == 1, name, "a last dimension of stride 1", indices)
    _check(indices.device == q.device, name, f"on {q.device} as q is", indices)
    if length is not None:
        _check_vector(prefix + "topk_length", length, rows, torch.int32, q.device)


def _check_vector(name: str, value: torch.Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    _check_tensor(name, value)
    _check(value.dtype == dtype and tuple(value.shape) == (size,), name, f"{dtype} [{size}]", value)
    _check(value.is_contiguous(), name, "contiguous", value)
    _check(value.device == device, name, f"on {device} as q is", value)


def _check_pairs(
    extra_cache: torch.Tensor | None, extra_indices: torch.Tensor | None, extra_length: torch.Tensor | None
) -> None:
    if (extra_cache is None) != (extra_indices is None):
        missing, given = ("extra_cache", "extra_indices") if extra_cache is None else ("extra_indices", "extra_cache")
        raise ValueError(f"{missing}: expected beside {given}, got None")
    if extra_cache is None and extra_length is not None:
        raise ValueError("extra_topk_length: expected only beside extra_cache and extra_indices, got it alone")


def _check_rest(q: torch.Tensor, sink: torch.Tensor | None, softmax_scale: float, out: torch.Tensor | None) -> None:
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale: expected a float, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: expected a finite number, got {softmax_scale}")
    if sink is not None:
        _check_vector("sink", sink, q.shape[2], torch.float32, q.device)
    if out is not None:
        _check_tensor("out", out)
        dtyped = out.dtype in (torch.bfloat16, torch.float32)
        _check(dtyped and out.shape == q.shape, "out", f"bf16 or fp32 {tuple(q.shape)}", out)
        _check(out.stride(3) == 1, "out", "a last dimension of stride 1", out)
        _check(out.device == q.device, "out", f"on {q.device} as q is", out)
