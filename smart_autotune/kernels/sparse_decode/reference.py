"""Sparse decode attention in plain PyTorch, fp32 throughout: what the kernel has to agree with."""

from __future__ import annotations

import torch

from smart_autotune.kernels.sparse_decode.layout import GROUP_DIMS, SCALE_BIAS, token_parts


def dequantize_tokens(cache: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of the cache as fp32 [..., 512], for token indices of any shape.

    A scale byte b means 2^(b-127) for every b from 0 to 254; 255 is NaN, as the format has it.
    """
    nope, rope, scales = token_parts(cache)
    page_size = nope.shape[1]
    page, slot = tokens.long() // page_size, tokens.long() % page_size
    exponent = scales[page, slot].int() - SCALE_BIAS
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=exponent.device), exponent)
    scale = scale.masked_fill(exponent == 255 - SCALE_BIAS, float("nan")).float()
    values = nope[page, slot].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP_DIMS))
    return torch.cat([(values * scale[..., None]).flatten(-2), rope[page, slot].float()], dim=-1)


def _gather(
    cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selected tokens [T, W, 512], zero where not valid, and which are valid [T, W]."""
    indices = indices.reshape(indices.shape[0], -1)
    width = indices.shape[1]
    valid = indices >= 0
    if length is not None:
        valid &= torch.arange(width, device=indices.device)[None, :] < length[:, None]
    tokens = dequantize_tokens(cache, indices.masked_fill(~valid, 0))
    return tokens.masked_fill(~valid[..., None], 0.0), valid


def sparse_decode_reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, 1, num_heads, 512], lse [T, 1, num_heads]), both fp32; lse is natural and without the sink."""
    heads = q.shape[2] if num_heads is None else num_heads
    query = q[:, 0, :heads].float()
    kv, valid = _gather(cache, indices, topk_length)
    if extra_cache is not None and extra_indices is not None:
        extra_kv, extra_valid = _gather(extra_cache, extra_indices, extra_topk_length)
        kv, valid = torch.cat([kv, extra_kv], dim=1), torch.cat([valid, extra_valid], dim=1)

    scores = torch.einsum("thd,twd->thw", query, kv) * softmax_scale
    scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=2)
    denominator = lse if sink is None else torch.logaddexp(lse, sink[:heads].float()[None, :])
    none_valid = ~valid.any(dim=1)[:, None, None]
    weights = torch.exp(scores - denominator[:, :, None]).masked_fill(none_valid, 0.0)
    out = torch.einsum("thw,twd->thd", weights, kv)
    return out[:, None], lse[:, None]
