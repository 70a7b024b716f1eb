"""What the op refuses, and how it says so. Its numbers are in test_kernel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smart_autotune import settings
from smart_autotune.kernels import sparse_decode as op
from smart_autotune.kernels.sparse_decode.layout import random_cache


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments that pass; nothing is launched."""
    monkeypatch.setattr(op, "INTERPRETED", True)
    monkeypatch.setattr(op, "_launch", lambda *args, **kwargs: None)
    return {
        "q": torch.zeros(3, 1, 8, 512, dtype=torch.bfloat16),
        "cache": random_cache(4, 64),
        "indices": torch.zeros(3, 1, 100, dtype=torch.int32),
        "topk_length": torch.zeros(3, dtype=torch.int32),
        "sink": torch.zeros(8),
        "extra_cache": random_cache(4, 2),
        "extra_indices": torch.zeros(3, 20, dtype=torch.int32),
        "extra_topk_length": torch.zeros(3, dtype=torch.int32),
        "softmax_scale": 0.04,
    }


def test_a_call_that_passes_returns_what_was_asked(call: dict[str, Any]) -> None:
    out = op.sparse_decode(**call)
    assert isinstance(out, torch.Tensor) and out.shape == (3, 1, 8, 512) and out.dtype == torch.bfloat16
    given = torch.zeros(3, 1, 8, 512)
    same, lse = op.sparse_decode(**call, out=given, return_lse=True, num_heads=3)
    assert same is given and lse.shape == (3, 1, 8) and lse.dtype == torch.float32


@pytest.mark.parametrize("name", ["cache", "extra_cache"])
def test_the_e4m3_view_of_a_cache_passes(call: dict[str, Any], name: str) -> None:
    call[name] = call[name].view(torch.float8_e4m3fn)
    op.sparse_decode(**call)


def test_no_rows_launch_nothing(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_launch", lambda *args, **kwargs: pytest.fail("launched"))
    for name in ("q", "indices", "topk_length", "extra_indices", "extra_topk_length"):
        call[name] = call[name][:0]
    assert op.sparse_decode(**call).shape == (0, 1, 8, 512)  # type: ignore[union-attr]


WRONG: dict[str, tuple[str, Any, str]] = {
    "q of fp16": ("q", torch.zeros(3, 1, 8, 512, dtype=torch.float16), r"q: expected bf16 .* got torch.float16"),
    "q without its middle": ("q", torch.zeros(3, 8, 512, dtype=torch.bfloat16), r"q: .*\(3, 8, 512\)"),
    "q of other dims": ("q", torch.zeros(3, 1, 8, 576, dtype=torch.bfloat16), "q: expected bf16"),
    "q with strided dims": ("q", torch.zeros(3, 1, 8, 1024, dtype=torch.bfloat16)[..., ::2], "q: .* stride 1"),
    "q on another device": ("q", torch.zeros(3, 1, 8, 512, dtype=torch.bfloat16, device="meta"), "cache: .*meta"),
    "a cache of bf16": ("cache", torch.zeros(4, 64, 1, 584, dtype=torch.bfloat16), "cache: expected uint8 or float8"),
    "a cache without its middle": ("cache", torch.zeros(4, 64, 584, dtype=torch.uint8), r"cache: expected \[P, S, 1"),
    "an empty cache": ("cache", torch.zeros(0, 64, 1, 584, dtype=torch.uint8), r"cache: expected \[P, S, 1"),
    "pages too short": (
        "cache",
        torch.zeros(200_000, dtype=torch.uint8).as_strided((4, 64, 1, 584), (36_864, 584, 584, 1)),
        "cache: expected pages of 37376 bytes or more.* strides .36864",
    ),
    "pages not aligned": (
        "cache",
        torch.zeros(200_000, dtype=torch.uint8).as_strided((4, 64, 1, 584), (37_441, 584, 584, 1)),
        "cache: .* 16-byte aligned",
    ),
    "a cache at an odd address": (
        "extra_cache",
        torch.zeros(20_000, dtype=torch.uint8).as_strided((4, 2, 1, 584), (1728, 584, 584, 1), 8),
        "extra_cache: .* 16-byte aligned",
    ),
    "indices of int64": ("indices", torch.zeros(3, 1, 100, dtype=torch.int64), "indices: expected int32"),
    "indices of other rows": ("extra_indices", torch.zeros(2, 20, dtype=torch.int32), r"extra_indices: .*\[3, W\]"),
    "indices per head": ("indices", torch.zeros(3, 8, 100, dtype=torch.int32), "indices: expected int32"),
    "strided indices": ("indices", torch.zeros(3, 1, 200, dtype=torch.int32)[..., ::2], "indices: .* stride 1"),
    "lengths of other rows": ("topk_length", torch.zeros(2, dtype=torch.int32), r"topk_length: .*\[3\]"),
    "lengths of int64": ("extra_topk_length", torch.zeros(3, dtype=torch.int64), "extra_topk_length: .*int32"),
    "strided lengths": ("topk_length", torch.zeros(6, dtype=torch.int32)[::2], "topk_length: expected contiguous"),
    "a sink of bf16": ("sink", torch.zeros(8, dtype=torch.bfloat16), "sink: expected torch.float32"),
    "a sink of other heads": ("sink", torch.zeros(4), r"sink: .*\[8\]"),
    "an extra list without its cache": ("extra_cache", None, "extra_cache: expected beside extra_indices"),
    "an extra cache without its list": ("extra_indices", None, "extra_indices: expected beside extra_cache"),
    "a scale that is not finite": ("softmax_scale", float("nan"), "softmax_scale: expected a finite"),
    "no heads": ("num_heads", 0, "num_heads: expected 1 to 8"),
    "more heads than q has": ("num_heads", 9, "num_heads: expected 1 to 8.* got 9"),
    "out of another shape": ("out", torch.zeros(3, 1, 4, 512, dtype=torch.bfloat16), "out: .*3, 1, 8, 512"),
    "out of fp16": ("out", torch.zeros(3, 1, 8, 512, dtype=torch.float16), "out: expected bf16 or fp32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named(case: str, call: dict[str, Any]) -> None:
    name, value, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        op.sparse_decode(**{**call, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softmax_scale", torch.tensor(0.04)),
        ("softmax_scale", True),
        ("num_heads", 4.0),
        ("num_heads", True),
        ("q", [1.0]),
        ("cache", None),
        ("indices", [0]),
        ("topk_length", 5),
        ("sink", 0.0),
        ("out", "out"),
    ],
)
def test_a_wrong_type_is_named(name: str, value: Any, call: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected"):
        op.sparse_decode(**{**call, name: value})


def test_lengths_of_an_extra_list_that_is_not_there_are_refused(call: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="extra_topk_length: expected only beside"):
        op.sparse_decode(**{**call, "extra_cache": None, "extra_indices": None})


def test_cpu_tensors_are_refused_outside_the_interpreter(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "INTERPRETED", False)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor"):
        op.sparse_decode(**call)


@pytest.mark.parametrize(("name", "tokens"), [("indices", 256), ("extra_indices", 8)])
def test_strict_refuses_an_index_beyond_the_cache(call: dict[str, Any], name: str, tokens: int) -> None:
    call[name][1, ..., 7] = tokens
    length = "topk_length" if name == "indices" else "extra_topk_length"
    with settings.override(strict=False):
        op.sparse_decode(**call)
    with settings.override(strict=True):
        op.sparse_decode(**call)  # beyond the length it does not count
        call[length][1] = 8
        with pytest.raises(ValueError, match=f"{name}: expected indices below {tokens}, .* got {tokens}"):
            op.sparse_decode(**call)
