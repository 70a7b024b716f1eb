"""The kernels' numerics, with fp32 operands, in Triton's interpreter.

The interpreter is chosen when a kernel is decorated, so all cases run in one child process, which is this file.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    heads: int = 8
    padded: int = 0
    rows: int = 1
    page_size: int = 64
    width: int = 100
    lengths: tuple[int, ...] | None = None
    holes: bool = False
    sink: float | None = None
    extra_width: int = 0
    extra_lengths: tuple[int, ...] | None = None
    extra_page_size: int = 2
    splits: int = 2
    block_t: int = 32
    block_h: int = 8
    heads_first: bool = False
    ahead: bool = True  # tokens first only
    by_bits: bool = False  # as on GPUs that do not convert e4m3


CASES = {
    "one head, one row, one split": Case(heads=1, splits=1),
    "one head of 64, the rest NaN": Case(heads=1, padded=64, splits=2),
    "8 heads of 64, the rest NaN, one split": Case(heads=8, padded=64, splits=1, sink=0.5),
    "16 heads in two blocks": Case(heads=16, splits=3, sink=3.0),
    "64 heads in one block": Case(heads=64, block_h=64, width=70, splits=1),
    "128 heads in two blocks": Case(heads=128, block_h=64, width=70, splits=2, sink=1.0),
    "tokens in their own turn": Case(heads=5, padded=16, rows=3, lengths=(0, 1, 77), holes=True, ahead=False, sink=0.5),
    "tokens in their own turn, one split, both lists": Case(
        heads=16, block_h=16, rows=3, splits=1, extra_width=70, extra_lengths=(65, 0, 33), sink=0.5, ahead=False
    ),
    "tokens in their own turn, splits of both lists": Case(
        rows=2, lengths=(0, 100), extra_width=70, splits=4, block_t=16, page_size=12, ahead=False
    ),
    "heads first": Case(heads=16, block_h=16, heads_first=True, splits=2, sink=0.5),
    "heads first, one split, both lists": Case(
        heads=5, padded=16, block_h=16, heads_first=True, splits=1, sink=0.5, extra_width=70, rows=2, lengths=(0, 77)
    ),
    "heads that no block divides": Case(heads=13, padded=16, splits=2),
    "pages of 2": Case(page_size=2, splits=2),
    "pages of 256": Case(page_size=256, splits=2),
    "a page size that is no power of two": Case(page_size=12, splits=2),
    "mixed lengths": Case(rows=3, lengths=(0, 1, 63), splits=3, sink=0.0),
    "mixed lengths, one split": Case(rows=3, lengths=(63, 0, 100), splits=1, sink=0.0),
    "lengths beyond the width and below zero": Case(rows=3, lengths=(1000, -5, 100), splits=2),
    "no token at all, no sink": Case(rows=3, lengths=(0, 0, 0), splits=1),
    "no token at all, two splits": Case(rows=3, lengths=(0, 0, 0), splits=2),
    "-1 inside the length": Case(rows=3, holes=True, lengths=(100, 64, 33), splits=2),
    "-1 inside the length, one split": Case(rows=1, holes=True, splits=1),
    "width 1": Case(width=1, splits=1),
    "width 63": Case(width=63, splits=4, block_t=16),
    "more splits than blocks": Case(width=40, splits=7, lengths=(33,), sink=0.0),
    "both lists": Case(rows=3, extra_width=70, splits=2),
    "both lists and the sink": Case(rows=3, extra_width=70, sink=3.0, splits=3, page_size=256),
    "both lists and the sink, one split": Case(rows=3, extra_width=70, sink=3.0, splits=1, page_size=256),
    "both lists, mixed lengths": Case(
        rows=3, lengths=(0, 1, 100), extra_width=65, extra_lengths=(65, 0, 33), splits=3, sink=-1.0, holes=True
    ),
    "both lists, lengths of the extra one alone": Case(rows=3, extra_width=40, extra_lengths=(0, 1, 40), splits=2),
    "both lists, each empty somewhere": Case(
        rows=3, lengths=(0, 50, 0), extra_width=40, extra_lengths=(20, 0, 0), splits=1, sink=0.0
    ),
    "shares of different size": Case(width=300, splits=4, lengths=(300,), extra_width=64, block_t=16),
    "a sink far above all scores": Case(sink=80.0, splits=2),
    "a sink far above all scores, one split": Case(sink=80.0, splits=1),
    "a sink far below all scores": Case(sink=-200.0, splits=2),
    "e4m3 by its bits": Case(rows=2, extra_width=70, sink=1.0, splits=2, by_bits=True),
    "e4m3 by its bits, heads first, one split": Case(heads=16, block_h=16, heads_first=True, splits=1, by_bits=True),
    "e4m3 by its bits, tokens in their own turn": Case(rows=2, extra_width=70, splits=2, ahead=False, by_bits=True),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    assert "raised" not in result, result["raised"]
    assert result["error"] < TOLERANCE
    assert result["lse_error"] < TOLERANCE
    assert result["reads_outside"] == 0
    assert result["empty_rows_are_zero"]
    assert result["padding_untouched"]
    for changed, error in result["if_ignored"].items():
        assert error > 10 * TOLERANCE, f"this case would not notice that {changed} is ignored"


def test_cases_would_notice_what_is_ignored(results: dict[str, Any]) -> None:
    noticed = {changed for result in results.values() for changed in result["if_ignored"]}
    assert noticed == {"sink", "extra list", "lengths", "extra lengths"}


def test_the_bits_of_every_e4m3_byte_give_its_value(results: dict[str, Any]) -> None:
    """All 256 but the two for NaN, subnormals and both zeros among them, to the last bit."""
    assert results["every byte"]["wrong"] == []
    assert results["every byte"]["nan"] == [480.0, -480.0]


def test_the_op_itself_runs_in_the_interpreter(results: dict[str, Any]) -> None:
    assert results["the op"]["error"] < 4e-3  # the result is bf16


# ---- the child ------------------------------------------------------------------------------------------------


def make(case: Case, seed: int) -> dict[str, Any]:
    """Arguments by the op's names. Token 0 of each cache is NaN and no list has it, so a hole may not read it."""
    from smart_autotune.kernels.sparse_decode.layout import random_cache, token_parts

    generator = torch.Generator().manual_seed(seed)

    def paged(page_size: int, tokens: int) -> torch.Tensor:
        cache = random_cache(-(-tokens // page_size), page_size, seed=seed)
        nope, rope, _ = token_parts(cache)
        nope[0, 0] = 0x7F
        rope[0, 0] = math.nan
        return cache

    def select(width: int, tokens: int) -> torch.Tensor:
        found = torch.randint(1, tokens, (case.rows, 1, width), dtype=torch.int32, generator=generator)
        if case.holes:
            found[torch.rand(found.shape, generator=generator) < 0.3] = -1
            found[0, 0, :40] = -1  # a first block without any token
        return found

    def lengths(values: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    padded = max(case.padded, case.heads)
    q = torch.randn(case.rows, 1, padded, 512, generator=generator).bfloat16()
    q[:, :, case.heads :] = math.nan
    sink = None if case.sink is None else case.sink + 0.1 * torch.randn(padded, generator=generator)
    extra = case.extra_width > 0
    return {
        "q": q,
        "cache": paged(case.page_size, 150),
        "indices": select(case.width, 150),
        "topk_length": lengths(case.lengths),
        "sink": sink,
        "extra_cache": paged(case.extra_page_size, 90) if extra else None,
        "extra_indices": select(case.extra_width, 90) if extra else None,
        "extra_topk_length": lengths(case.extra_lengths),
    }


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    difference, size = (got - want).norm().item(), want.norm().item()
    return difference / size if size > 0 else difference


@contextmanager
def watched_loads(tensors: Iterable[Any]) -> Iterator[list[int]]:
    """Addresses read outside these tensors and the scratch: a GPU may fault there, the interpreter does not."""
    from triton.runtime.interpreter import InterpreterBuilder

    from smart_autotune.kernels.sparse_decode import launcher

    ranges: list[tuple[int, int]] = []
    strays: list[int] = []

    def know(tensors: Iterable[Any]) -> None:
        for one in tensors:
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        addresses = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data.astype(bool)].ravel()
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(addresses.shape, bool)
        for start, end in ranges:
            inside |= (addresses >= start) & (addresses + size <= end)
        strays.extend(addresses[~inside].tolist())
        return original_load(builder, ptrs, mask, *rest)

    def combine(arguments: Any, *rest: Any) -> None:
        know((arguments["part_ptr"], arguments["part_lse_ptr"]))
        original_combine(arguments, *rest)

    original_load, original_combine = InterpreterBuilder.create_masked_load, launcher._combine
    know(tensors)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", load)
        patched.setattr(launcher, "_combine", combine)
        yield strays


def run_case(case: Case, seed: int) -> dict[str, Any]:
    from smart_autotune.kernels import sparse_decode as op
    from smart_autotune.kernels.sparse_decode.reference import sparse_decode_reference

    kwargs = {
        "BLOCK_T": case.block_t,
        "BLOCK_H": case.block_h,
        "HEADS_FIRST": case.heads_first,
        "AHEAD": case.ahead and not case.heads_first,
        "WAVES": 1,
    }
    config = triton.Config(kwargs)
    given = make(case, seed)
    q, sink = given["q"], given["sink"]
    out = torch.full(q.shape, math.nan)
    lse = torch.full(q.shape[:3], math.nan)
    lists = op._lists(*(given[name] for name in given if name not in ("q", "sink")))
    with pytest.MonkeyPatch.context() as patched:
        if case.by_bits:
            patched.setattr("smart_autotune.kernels.sparse_decode.tokens._converts_e4m3", lambda: False)
        with watched_loads((*given.values(), out, lse)) as strays:
            op._launch(q, lists, sink, 0.04, case.heads, out, lse, config=config, splits=case.splits)

    known = {"softmax_scale": 0.04, "num_heads": case.heads}
    want, want_lse = sparse_decode_reference(**given, **known)
    got, got_lse = out[:, :, : case.heads], lse[:, :, : case.heads]
    empty = want_lse == -math.inf
    both = torch.equal(empty, got_lse == -math.inf)

    def ignoring(*names: str) -> float:
        return relative(sparse_decode_reference(**{**given, **dict.fromkeys(names)}, **known)[0], want)

    ignored = {}
    if case.sink is not None and case.sink > -10 and not empty.all():
        ignored["sink"] = ignoring("sink")
    if case.extra_width and not (case.extra_lengths and max(case.extra_lengths) == 0):
        ignored["extra list"] = ignoring("extra_cache", "extra_indices", "extra_topk_length")
    if case.lengths is not None and min(case.lengths) < case.width:
        ignored["lengths"] = ignoring("topk_length")
    if case.extra_lengths is not None:
        ignored["extra lengths"] = ignoring("extra_topk_length")
    return {
        "error": relative(got, want),
        "lse_error": (got_lse - want_lse)[~empty].abs().max().item() if both and not empty.all() else float(not both),
        "reads_outside": len(strays),
        "empty_rows_are_zero": bool((got[empty] == 0).all()),
        "padding_untouched": bool(out[:, :, case.heads :].isnan().all() and lse[:, :, case.heads :].isnan().all()),
        "if_ignored": ignored,
    }


def run_op() -> dict[str, Any]:
    from smart_autotune.kernels.sparse_decode import sparse_decode
    from smart_autotune.kernels.sparse_decode.reference import sparse_decode_reference

    given = make(Case(rows=2, extra_width=70, sink=0.2), 5)
    given["cache"] = given["cache"].view(torch.float8_e4m3fn)
    out = sparse_decode(**given, softmax_scale=0.04)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    want, _ = sparse_decode_reference(**given, softmax_scale=0.04)
    return {"error": relative(out.float(), want), "if_ignored": {}}


@triton.jit
def values_of(byte_ptr, value_ptr):
    from smart_autotune.kernels.sparse_decode.tokens import _e4m3_value

    places = tl.arange(0, 256)
    tl.store(value_ptr + places, _e4m3_value(tl.load(byte_ptr + places)))


def run_every_byte() -> dict[str, Any]:
    every = torch.arange(256, dtype=torch.uint8)
    got, want = torch.empty(256, dtype=torch.float16), every.view(torch.float8_e4m3fn).to(torch.float16)
    values_of[(1,)](every, got)
    is_nan = want.isnan()
    same = got.view(torch.int16) == want.view(torch.int16)
    return {"wrong": every[~same & ~is_nan].tolist(), "nan": got[is_nan].tolist(), "if_ignored": {}}


def main() -> None:
    real_empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = real_empty(*args, **kwargs)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

    torch.empty = poisoned_empty
    found: dict[str, Any] = {}
    for seed, (name, case) in enumerate(CASES.items()):
        try:
            found[name] = run_case(case, seed)
        except Exception as error:
            found[name] = {"raised": repr(error), "if_ignored": {}}
    found["the op"] = run_op()
    found["every byte"] = run_every_byte()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
