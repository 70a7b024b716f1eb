"""What the tuner may choose from, and on which inputs it times the choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from smart_autotune import smart_autotune
from smart_autotune.kernels.sparse_decode.kernel import _split_kernel
from smart_autotune.kernels.sparse_decode.launcher import timed
from smart_autotune.kernels.sparse_decode.layout import HEAD_DIM, TOKEN_BYTES, page_bytes

MIN_BLOCK_H = 8


def _config(
    block_t: int, block_h: int, warps: int, stages: int, waves: int, *, heads_first: bool = False, ahead: bool = False
) -> triton.Config:
    kwargs = {"BLOCK_T": block_t, "BLOCK_H": block_h, "HEADS_FIRST": heads_first, "AHEAD": ahead, "WAVES": waves}
    return triton.Config(kwargs, num_warps=warps, num_stages=stages)


# For GPUs with 227 KiB of shared memory a block and for those with 99; first_fit takes the first that fits.
# How often each was chosen on an H200 is in integration/benchmarks/sparse_decode.md. Tokens first without AHEAD: not
# offered until it has been timed there.
CONFIGS = [
    _config(32, 8, 2, 1, waves=2, ahead=True),
    _config(32, 8, 2, 1, waves=4, ahead=True),
    _config(64, 8, 4, 1, waves=2, ahead=True),
    _config(64, 8, 4, 1, waves=3, ahead=True),
    _config(32, 8, 4, 1, waves=2, ahead=True),
    _config(16, 16, 2, 1, waves=2, ahead=True),
    _config(16, 16, 2, 1, waves=3, ahead=True),
    _config(16, 16, 2, 1, waves=4, ahead=True),
    _config(32, 16, 4, 1, waves=2, ahead=True),
    _config(64, 64, 8, 1, waves=1, heads_first=True),
    _config(64, 64, 8, 2, waves=1, heads_first=True),
]


def rounded_width(width: int) -> int:
    """The next power of two: widths follow the context length, tuning keys must not."""
    return 0 if width == 0 else triton.next_power_of_2(width)


def drop_unsuited_head_blocks(
    configs: list[triton.Config], named_args: Mapping[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Without blocks wider than the heads need; above 16 heads, without blocks so narrow that many re-read."""
    num_heads = {**named_args, **kwargs}["num_heads"]
    widest = max(MIN_BLOCK_H, triton.next_power_of_2(num_heads))
    narrowest = MIN_BLOCK_H if num_heads <= 16 else 16
    kept = [config for config in configs if narrowest <= config.kwargs["BLOCK_H"] <= widest]
    return kept or [min(configs, key=lambda config: config.kwargs["BLOCK_H"])]


def random_tokens(rows: int, width: int, cache_tokens: int, device: torch.device) -> torch.Tensor:
    """[rows, width] token indices, drawn without repetition as far as the cache is large enough for it."""
    generator = torch.Generator(device).manual_seed(0)
    wanted = rows * width
    if cache_tokens < width:
        shape = (rows, width)
        return torch.randint(cache_tokens, shape, dtype=torch.int32, device=device, generator=generator)
    order = torch.randperm(cache_tokens, dtype=torch.int32, device=device, generator=generator)
    if cache_tokens >= wanted:
        return order[:wanted].view(rows, width)
    # Each row a different stretch of one permutation: distinct inside the row.
    starts = torch.randint(cache_tokens, (rows, 1), device=device, generator=generator)
    return order[(starts + torch.arange(width, device=device)) % cache_tokens]


def _strided_like(tokens: torch.Tensor, row_stride: int) -> torch.Tensor:
    """The lists at the row stride of the call's own, which may be a slice of a wider list or one row repeated."""
    rows, columns = tokens.shape
    storage = torch.full(((rows - 1) * row_stride + columns,), -1, dtype=tokens.dtype, device=tokens.device)
    lists = storage.as_strided((rows, columns), (row_stride, 1))
    if row_stride >= columns:
        lists.copy_(tokens)
    else:
        storage.copy_(tokens.flatten()[: storage.numel()])
    return lists


def full_lists(named_args: Mapping[str, Any]) -> dict[str, Any]:
    """Replacements while timing: both lists full, over random tokens of the real cache.

    Servers warm up with one token a row. What is tuned on that is tuned on nothing.
    """
    replaced: dict[str, Any] = {}
    for prefix, width, page_size in (("", "topk", "PAGE_SIZE"), ("extra_", "extra_topk", "EXTRA_PAGE_SIZE")):
        cache, indices = named_args[prefix + "cache_ptr"], named_args[prefix + "indices_ptr"]
        if cache is None:
            continue
        rows, columns = indices.shape[0], named_args[width]
        tokens = cache.shape[0] * named_args[page_size]
        replaced[prefix + "indices_ptr"] = _strided_like(
            random_tokens(rows, columns, tokens, indices.device), indices.stride(0)
        )
        if named_args[prefix + "length_ptr"] is not None:
            lengths = torch.full((rows,), columns, dtype=torch.int32, device=indices.device)
            replaced[prefix + "length_ptr"] = lengths
    return replaced


def _example(rows: int, num_heads: int, topk: int, extra_topk: int, extra_page_size: int) -> dict[str, Any]:
    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def paged(size: int) -> torch.Tensor:
        stride = page_bytes(size)
        return meta(1024, stride, dtype=torch.uint8).as_strided((1024, size, 1, TOKEN_BYTES), (stride, 584, 584, 1))

    has_extra = extra_topk > 0
    return {
        "q_ptr": meta(rows, 1, 64, HEAD_DIM, dtype=torch.bfloat16),
        "cache_ptr": paged(256),
        "indices_ptr": meta(rows, 1, topk, dtype=torch.int32),
        "length_ptr": meta(rows, dtype=torch.int32),
        "extra_cache_ptr": paged(extra_page_size) if has_extra else None,
        "extra_indices_ptr": meta(rows, 1, extra_topk, dtype=torch.int32) if has_extra else None,
        "extra_length_ptr": meta(rows, dtype=torch.int32) if has_extra else None,
        "sink_ptr": meta(64, dtype=torch.float32),
        "out_ptr": meta(rows, 1, 64, HEAD_DIM, dtype=torch.bfloat16),
        "lse_ptr": None,
        "part_ptr": meta(0, dtype=torch.float32),
        "part_lse_ptr": meta(0, dtype=torch.float32),
        "topk": topk,
        "extra_topk": extra_topk,
        "num_heads": num_heads,
        "num_splits": 1,
        "once": 1,
        "page_bytes": page_bytes(256),
        "extra_page_bytes": page_bytes(extra_page_size) if has_extra else 0,
        "stride_q_row": 64 * HEAD_DIM,
        "stride_q_head": HEAD_DIM,
        "stride_indices_row": topk,
        "stride_extra_indices_row": extra_topk,
        "stride_out_row": 64 * HEAD_DIM,
        "stride_out_head": HEAD_DIM,
        "stride_lse_row": 0,
        "softmax_scale": HEAD_DIM**-0.5,
        "topk_rounded": rounded_width(topk),
        "extra_topk_rounded": rounded_width(extra_topk),
        "PAGE_SIZE": 256,
        "EXTRA_PAGE_SIZE": extra_page_size if has_extra else 1,
        "COMPUTE": tl.float16,
        "EARLY": False,  # True from sm_90 on: one instruction more, the same needs
    }


def examples() -> dict[str, dict[str, Any]]:
    """Calls a server makes, for audits without a GPU: meta tensors and numbers by argument name."""
    return {
        "window + top-512, 64 heads, batch 32": _example(32, 64, 128, 512, 64),
        "window + c128 at 128k, 8 heads, batch 8": _example(8, 8, 128, 1088, 2),
    }


split_kernel = smart_autotune(
    configs=CONFIGS,
    key=["topk_rounded", "extra_topk_rounded", "num_heads", "PAGE_SIZE", "EXTRA_PAGE_SIZE"],
    prune_configs_by={"early_config_prune": drop_unsuited_head_blocks},
    batch="q_ptr",
    tune_args=full_lists,
    timed_call=timed,
    examples=examples,
)(_split_kernel)
