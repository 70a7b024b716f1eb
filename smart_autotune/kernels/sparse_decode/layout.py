"""The paged FP8 cache of DeepSeek-V4, byte by byte.

A page of S tokens, padded with zeros to a multiple of 576 bytes:

    [0, S*576)        token t at t*576:         448 x e4m3 (no-rope part), then 64 x bf16 (rope part)
    [S*576, S*584)    token t at S*576 + 8*t:   7 x UE8M0 scale, one per 64 no-rope dims, and 1 pad byte

The tensor arrives as [P, S, 1, 584]. Only its page stride is physical: 584 bytes a token is a total, not a step.
"""

from __future__ import annotations

import torch

NOPE_DIMS = 448
ROPE_DIMS = 64
HEAD_DIM = NOPE_DIMS + ROPE_DIMS
GROUP_DIMS = 64
SCALE_GROUPS = NOPE_DIMS // GROUP_DIMS
TOKEN_DATA_BYTES = NOPE_DIMS + 2 * ROPE_DIMS
TOKEN_SCALE_BYTES = 8
TOKEN_BYTES = TOKEN_DATA_BYTES + TOKEN_SCALE_BYTES
PAGE_ALIGN_BYTES = 576

E4M3_MAX = 448.0
SCALE_BIAS = 127


def page_bytes(page_size: int) -> int:
    """Bytes from one page of `page_size` tokens to the next."""
    return -(-page_size * TOKEN_BYTES // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def view_cache(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """The [P, S, 1, 584] view that servers pass around, of contiguous uint8 pages [P, page_bytes]."""
    stride = page_bytes(page_size)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or not pages.is_contiguous() or pages.shape[1] != stride:
        raise ValueError(
            f"pages: expected contiguous uint8 [P, {stride}] for page size {page_size}, "
            f"got {pages.dtype} {tuple(pages.shape)} with strides {pages.stride()}"
        )
    return pages.as_strided((pages.shape[0], page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))


def token_parts(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three views of a cache: e4m3 bytes [P, S, 448], bf16 rope [P, S, 64], scale bytes [P, S, 7].

    The cache may be uint8 or float8_e4m3fn. Writing to a part writes to the cache.
    """
    raw = cache.view(torch.uint8)
    pages, page_size, stride = raw.shape[0], raw.shape[1], raw.stride(0)
    start = raw.storage_offset()
    data = (stride, TOKEN_DATA_BYTES, 1)
    nope = raw.as_strided((pages, page_size, NOPE_DIMS), data, start)
    rope = raw.as_strided((pages, page_size, 2 * ROPE_DIMS), data, start + NOPE_DIMS).view(torch.bfloat16)
    footer = start + page_size * TOKEN_DATA_BYTES
    scales = raw.as_strided((pages, page_size, SCALE_GROUPS), (stride, TOKEN_SCALE_BYTES, 1), footer)
    return nope, rope, scales


def pack_cache(kv: torch.Tensor, page_size: int) -> torch.Tensor:
    """Quantise tokens [N, 512] into a fresh uint8 cache of ceil(N / page_size) pages, token i at index i.

    Each group of 64 no-rope dims takes the smallest power of two that keeps it inside e4m3's range.
    """
    if kv.dim() != 2 or kv.shape[1] != HEAD_DIM:
        raise ValueError(f"kv: expected [N, {HEAD_DIM}], got {tuple(kv.shape)}")
    tokens = kv.shape[0]
    num_pages = -(-tokens // page_size)
    padded = torch.zeros(num_pages * page_size, HEAD_DIM, dtype=torch.float32, device=kv.device)
    padded[:tokens] = kv.float()
    groups = padded[:, :NOPE_DIMS].unflatten(1, (SCALE_GROUPS, GROUP_DIMS))

    peak = groups.abs().amax(dim=2)
    exponent = torch.ceil(torch.log2(torch.clamp(peak / E4M3_MAX, min=2.0**-100)))
    exponent = exponent.clamp(1 - SCALE_BIAS, 254 - SCALE_BIAS)
    quantised = (groups * torch.exp2(-exponent)[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    pages = torch.zeros(num_pages, page_bytes(page_size), dtype=torch.uint8, device=kv.device)
    cache = view_cache(pages, page_size)
    nope, rope, scales = token_parts(cache)
    shape = (num_pages, page_size, -1)
    nope.copy_(quantised.view(torch.uint8).reshape(shape))
    rope.copy_(padded[:, NOPE_DIMS:].to(torch.bfloat16).reshape(shape))
    scales.copy_((exponent + SCALE_BIAS).to(torch.uint8).reshape(shape))
    return cache


def random_cache(num_pages: int, page_size: int, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """A full cache of random bytes that decode to values of order one, made without a float copy.

    Every e4m3 code but NaN occurs, scales are 2^-9 .. 2^-7 and the rope part is normal.
    """
    generator = torch.Generator(device).manual_seed(seed)
    pages = torch.zeros(num_pages, page_bytes(page_size), dtype=torch.uint8, device=device)
    cache = view_cache(pages, page_size)
    nope, rope, scales = token_parts(cache)
    codes = torch.randint(0, 127, nope.shape, dtype=torch.uint8, device=device, generator=generator)
    signs = torch.randint(0, 2, nope.shape, dtype=torch.uint8, device=device, generator=generator)
    nope.copy_(codes | signs << 7)
    rope.copy_(torch.randn(rope.shape, device=device, generator=generator))
    scales.copy_(torch.randint(118, 121, scales.shape, dtype=torch.uint8, device=device, generator=generator))
    return cache
