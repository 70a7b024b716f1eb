from __future__ import annotations

import pytest
import torch

from smart_autotune.kernels.sparse_decode import layout
from smart_autotune.kernels.sparse_decode.reference import dequantize_tokens


@pytest.mark.parametrize(("page_size", "expected"), [(256, 149_760), (64, 37_440), (2, 1_728), (1, 1_152)])
def test_a_page_is_padded_to_576_bytes(page_size: int, expected: int) -> None:
    assert layout.page_bytes(page_size) == expected


def test_a_token_lies_where_the_format_says() -> None:
    kv = torch.zeros(5, 512)
    kv[3, 64:128] = 448.0  # group 1 of token 3: code 0x7E, scale 2^0
    kv[3, 448] = 1.0
    raw = layout.pack_cache(kv, 2).untyped_storage()
    page = torch.tensor(raw.tolist(), dtype=torch.uint8).view(3, 1728)[1]

    assert page[576 + 63 : 576 + 129].tolist() == [0] + [0x7E] * 64 + [0]
    assert page[576 + 448 : 576 + 450].tolist() == [0x80, 0x3F]
    assert page[1152 + 8 + 1] == 127
    assert not page[1168:].any()


@pytest.mark.parametrize("page_size", [2, 64, 256])
def test_packing_loses_at_most_half_a_step_of_e4m3(page_size: int) -> None:
    kv = torch.randn(131, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 131)[:, None]
    kv[7] = 0.0
    cache = layout.pack_cache(kv, page_size)
    got = dequantize_tokens(cache, torch.arange(131))

    peak = kv[:, :448].unflatten(1, (7, 64)).abs().amax(2).repeat_interleave(64, dim=1)
    step = torch.maximum(kv[:, :448].abs() * 2.0**-4, peak * 2.0**-17)
    assert ((got - kv)[:, :448].abs() <= step).all()
    assert torch.equal(got[:, 448:], kv[:, 448:].bfloat16().float())
    assert cache.stride(0) == layout.page_bytes(page_size)


def test_values_that_the_format_holds_survive_packing() -> None:
    kv = torch.tensor([448.0, -240.0, 0.5, 0.0]).repeat(2, 128)
    assert torch.equal(dequantize_tokens(layout.pack_cache(kv, 64), torch.arange(2)), kv.bfloat16().float())


def test_a_random_cache_is_finite_and_of_order_one() -> None:
    cache = layout.random_cache(4, 64)
    kv = dequantize_tokens(cache, torch.arange(256))
    assert kv.isfinite().all()
    assert 0.1 < kv[:, :448].std() < 2 and 0.9 < kv[:, 448:].std() < 1.1


def test_both_cache_dtypes_decode_alike() -> None:
    cache = layout.random_cache(2, 64)
    tokens = torch.arange(128)
    assert torch.equal(dequantize_tokens(cache, tokens), dequantize_tokens(cache.view(torch.float8_e4m3fn), tokens))


def test_pages_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pages: expected contiguous uint8 .* for page size 64"):
        layout.view_cache(torch.zeros(3, 37_376, dtype=torch.uint8), 64)
    with pytest.raises(ValueError, match=r"kv: expected \[N, 512\]"):
        layout.pack_cache(torch.zeros(3, 448), 64)
