"""The reference against a second one: Python floats, one byte, one token and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch

from smart_autotune.kernels.sparse_decode.layout import page_bytes, random_cache, token_parts
from smart_autotune.kernels.sparse_decode.reference import dequantize_tokens, sparse_decode_reference


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def read_token(raw: bytes, page_size: int, index: int) -> list[float]:
    page, slot = divmod(index, page_size)
    data = page * page_bytes(page_size) + slot * 576
    scale = page * page_bytes(page_size) + page_size * 576 + slot * 8
    values = [e4m3(raw[data + d]) * 2.0 ** (raw[scale + d // 64] - 127) for d in range(448)]
    halves = torch.tensor(list(raw[data + 448 : data + 576]), dtype=torch.uint8).view(torch.bfloat16)
    return values + halves.tolist()


def naive(q, lists, sink, scale):  # type: ignore[no-untyped-def]
    """lists: (cache, page size, indices of one row, its length). One row of q: [H, 512]."""
    tokens = []
    for cache, page_size, indices, length in lists:
        raw = bytes(cache.untyped_storage().tolist())
        tokens += [read_token(raw, page_size, i) for i in indices[:length] if i >= 0]
    outs, lses = [], []
    for h, query in enumerate(q):
        terms = [math.exp(scale * sum(a * b for a, b in zip(query, token))) for token in tokens]
        total = sum(terms) + (math.exp(sink[h]) if sink is not None else 0.0)
        outs.append([sum(t * token[d] for t, token in zip(terms, tokens)) / (total or 1.0) for d in range(512)])
        lses.append(math.log(sum(terms)) if terms else -math.inf)
    return torch.tensor(outs), torch.tensor(lses)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
def test_agrees_with_a_loop_over_bytes(with_sink: bool, with_extra: bool) -> None:
    torch.manual_seed(1)
    main, extra = random_cache(3, 4, seed=1), random_cache(5, 2, seed=2)
    q = torch.randn(3, 1, 2, 512).bfloat16()
    indices = torch.tensor([[0, 5, -1, 11], [3, 3, 1, -1], [2, 9, 4, 0]], dtype=torch.int32)
    lengths = torch.tensor([3, 9, 0], dtype=torch.int32)
    extra_indices = torch.tensor([[9], [-1], [0]], dtype=torch.int32)
    extra_lengths = torch.tensor([1, 1, 0], dtype=torch.int32)
    sink = torch.tensor([0.7, -2.0]) if with_sink else None
    more = (extra, extra_indices[:, None], extra_lengths) if with_extra else (None, None, None)

    out, lse = sparse_decode_reference(q, main, indices[:, None], lengths, sink, *more, softmax_scale=0.04)

    for row in range(3):
        lists = [(main, 4, indices[row].tolist(), int(lengths[row]))]
        if with_extra:
            lists.append((extra, 2, extra_indices[row].tolist(), int(extra_lengths[row])))
        want, want_lse = naive(q[row, 0].tolist(), lists, None if sink is None else sink.tolist(), 0.04)
        torch.testing.assert_close(out[row, 0], want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[row, 0], want_lse, rtol=1e-5, atol=1e-5)
    assert (out[2] == 0).all() and (lse[2] == -math.inf).all()


def test_every_scale_byte_means_its_power_of_two() -> None:
    cache = random_cache(128, 2)
    nope, _, scales = token_parts(cache)
    nope.fill_(0x38)  # 1.0
    scales.copy_(torch.arange(256).to(torch.uint8).view(128, 2, 1).expand(-1, -1, 7))
    got = dequantize_tokens(cache, torch.arange(256))[:, 0]
    assert got[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert got[255].isnan()


def test_every_e4m3_code_decodes() -> None:
    cache = random_cache(128, 2)
    nope, _, scales = token_parts(cache)
    nope.copy_(torch.arange(256).to(torch.uint8).view(128, 2, 1).expand(-1, -1, 448))
    scales.fill_(127)
    got = dequantize_tokens(cache, torch.arange(256))[:, 447]
    torch.testing.assert_close(got, torch.tensor([e4m3(code) for code in range(256)]), rtol=0, atol=0, equal_nan=True)


def test_padding_heads_are_not_looked_at() -> None:
    q = torch.randn(1, 1, 4, 512).bfloat16()
    q[:, :, 3:] = math.nan
    indices = torch.arange(8, dtype=torch.int32)[None]
    out, lse = sparse_decode_reference(q, random_cache(4, 2), indices, softmax_scale=0.04, num_heads=3)
    assert out.shape == (1, 1, 3, 512) and lse.shape == (1, 1, 3)
    assert out.isfinite().all()
