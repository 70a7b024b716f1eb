"""Sparse decode on a real GPU against its reference: many shapes, graph replay, and every config that fits.

    python integration/gpu/sparse_decode_check.py [--json PATH]

Exits 1 when any check fails. The sweep of shapes does not tune; the last pass launches each config directly.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("SMART_AUTOTUNE_MODE", "first_fit")  # read when the tuner first runs
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.runtime.errors import OutOfResources

from smart_autotune.kernels import sparse_decode as op
from smart_autotune.kernels.sparse_decode.layout import random_cache, token_parts
from smart_autotune.kernels.sparse_decode.reference import sparse_decode_reference
from smart_autotune.kernels.sparse_decode.tuning import CONFIGS

TOLERANCE = 5e-3
THREADS = min(8, os.cpu_count() or 1)
SCALE = 512**-0.5 * 2  # scores with a spread of about 2: neither flat nor one-hot


@dataclass(frozen=True)
class Case:
    heads: int = 16
    padded: int = 64
    rows: int = 3
    page_size: int = 64
    width: int = 512
    lengths: str = "mixed"  # none | zero | one | 63 | full | mixed
    holes: bool = False
    sink: bool = True
    extra_width: int = 0
    extra_page_size: int = 64

    def __str__(self) -> str:
        extra = f" + {self.extra_width} on pages of {self.extra_page_size}" if self.extra_width else ""
        flags = " -1s" * self.holes + " sink" * self.sink
        lists = f"{self.width} on pages of {self.page_size}{extra}"
        return f"heads {self.heads}/{self.padded} rows {self.rows} width {lists} lengths {self.lengths}{flags}"


@dataclass
class Result:
    check: str
    error: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and self.error < TOLERANCE


def cases() -> Iterator[Case]:
    both = Case(page_size=256, width=128, extra_width=512)
    for heads in (1, 8, 16, 64, 128):
        for rows in (1, 3, 100):
            yield replace(both, heads=heads, padded=max(64, heads), rows=rows)
            yield Case(heads=heads, padded=heads, rows=rows, sink=False, lengths="full")
    for lengths in ("none", "zero", "one", "63", "full", "mixed"):
        for rows in (1, 100):
            yield Case(rows=rows, lengths=lengths)
            yield replace(both, rows=rows, lengths=lengths, holes=True, extra_width=1088, extra_page_size=2)
    for page_size in (2, 64, 256):
        for width in (1, 63, 100, 1000):
            yield Case(page_size=page_size, width=width, holes=True, sink=False)
    yield replace(both, rows=1, width=192, extra_width=8256, extra_page_size=2)
    yield replace(both, rows=2000, heads=8, lengths="mixed")


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """The op's arguments on the GPU. Token 0 of each cache is NaN and in no list: a hole may not read it."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def paged(page_size: int) -> torch.Tensor:
        cache = random_cache(-(-20_000 // page_size), page_size, "cuda", seed)
        nope, rope, _ = token_parts(cache)
        nope[0, 0], rope[0, 0] = 0x7F, math.nan
        return cache

    padded = max(case.padded, case.heads)
    q = torch.randn(case.rows, 1, padded, 512, device="cuda", generator=generator).bfloat16()
    q[:, :, case.heads :: 2] = math.nan
    q[:, :, case.heads + 1 :: 2] = math.inf
    extra = case.extra_width > 0
    return {
        "q": q,
        "cache": paged(case.page_size).view(torch.float8_e4m3fn),
        "indices": select(case, case.width, generator),
        "topk_length": lengths(case, case.width, generator),
        "sink": torch.randn(padded, device="cuda", generator=generator) + 3 if case.sink else None,
        "extra_cache": paged(case.extra_page_size) if extra else None,
        "extra_indices": select(case, case.extra_width, generator) if extra else None,
        "extra_topk_length": lengths(case, case.extra_width, generator) if extra else None,
    }


def select(case: Case, width: int, generator: torch.Generator) -> torch.Tensor:
    shape = (case.rows, 1, width)
    found = torch.randint(1, 20_000, shape, dtype=torch.int32, device="cuda", generator=generator)
    if case.holes:
        found[torch.rand(shape, device="cuda", generator=generator) < 0.3] = -1
        found[0, 0, :130] = -1  # whole blocks without a token
    return found


def lengths(case: Case, width: int, generator: torch.Generator) -> torch.Tensor | None:
    if case.lengths == "none":
        return None
    fixed = {"zero": 0, "one": 1, "63": 63, "full": width}.get(case.lengths)
    if fixed is not None:
        return torch.full((case.rows,), fixed, dtype=torch.int32, device="cuda")
    found = torch.randint(0, width + 1, (case.rows,), dtype=torch.int32, device="cuda", generator=generator)
    found[0] = width + 7
    found[1:2] = 0
    return found


def reference(given: dict[str, Any], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In slices of rows, so that the gathered tokens stay small."""
    rowwise = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    parts = []
    for start in range(0, given["q"].shape[0], 64):
        rows = slice(start, start + 64)
        part = {k: v[rows] if k in rowwise and v is not None else v for k, v in given.items()}
        parts.append(sparse_decode_reference(**part, softmax_scale=SCALE, num_heads=heads))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def compare(result: Result, given: dict[str, Any], heads: int, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    want, want_lse = reference(given, heads)
    got = out[:, :, :heads].float()
    size = want.norm().item()
    result.error = (got - want).norm().item() / size if size > 0 else (got - want).norm().item()
    if not math.isfinite(result.error):
        result.problems.append("not finite")
        result.error = math.inf
    empty = want_lse == -math.inf
    if not bool((got[empty] == 0).all()):
        result.problems.append("a row without tokens is not 0")
    if lse is not None:
        got_lse = lse[:, :, :heads]
        if not torch.equal(got_lse == -math.inf, empty):
            result.problems.append("lse is -inf in other places")
        elif not empty.all() and not (got_lse - want_lse)[~empty].abs().max().item() < 2e-3:
            result.problems.append("lse")
    if not bool(out[:, :, heads:].isnan().all()):
        result.problems.append("padding heads were written")
    return result


def check_case(case: Case) -> Result:
    given = make(case)
    out = torch.full_like(given["q"], math.nan)
    found = op.sparse_decode(**given, softmax_scale=SCALE, num_heads=case.heads, return_lse=True, out=out)
    return compare(Result(str(case)), given, case.heads, out, found[1])


def check_graph(case: Case) -> Result:
    """Captured once, replayed after every input but the shapes has changed in place."""
    given, other = make(case, 1), make(case, 2)
    out = torch.full_like(given["q"], math.nan)

    def call() -> None:
        op.sparse_decode(**given, softmax_scale=SCALE, num_heads=case.heads, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for name in ("q", "indices", "topk_length", "extra_indices", "extra_topk_length"):
        if given[name] is not None:
            given[name].copy_(other[name])
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return compare(Result(f"graph replay: {case}"), given, case.heads, out, None)


def check_config(case: Case, config: triton.Config, splits: int) -> Result | None:
    """None when the config does not fit this GPU."""
    given = make(case, 3)
    out = torch.full_like(given["q"], math.nan)
    lse = torch.full(out.shape[:3], math.nan, device="cuda")

    lists = op._lists(*(given[name] for name in given if name not in ("q", "sink")))
    try:
        op._launch(given["q"], lists, given["sink"], SCALE, case.heads, out, lse, config=config, splits=splits)
    except OutOfResources:
        return None
    return compare(Result(f"{config}, {splits} splits: {case}"), given, case.heads, out, lse)


def check_every_config() -> list[Result]:
    small = Case(heads=8, rows=3, page_size=256, width=128, extra_width=512, holes=True)
    large = Case(heads=64, rows=3, page_size=256, width=128, extra_width=520, extra_page_size=2)
    wanted = [(case, config, splits) for config in CONFIGS for case, splits in ((small, 3), (large, 1))]
    found = list(in_threads(lambda one: guarded(lambda: check_config(*one), str(one[1])), wanted))
    for config, first, second in zip(CONFIGS, found[::2], found[1::2]):
        print(f"config {config}: {'does not fit this GPU' if first is second is None else 'checked'}")
    return [result for result in found if result is not None]


def in_threads(check: Callable[[Any], Any], wanted: Iterable[Any]) -> Iterator[Any]:
    """Most of the time goes into compiling, which threads share."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(check, wanted)


def guarded(check: Callable[[], Any], name: str) -> Any:
    try:
        return check()
    except Exception as error:
        return Result(name, math.inf, [f"{type(error).__name__}: {str(error)[:300]}"])


def run() -> dict[str, list[Result]]:
    shapes = list(in_threads(lambda case: guarded(lambda: check_case(case), str(case)), cases()))
    replayed = [
        Case(rows=4, page_size=256, width=128, extra_width=512),
        Case(rows=4, heads=8, page_size=256, width=128, extra_width=1088, extra_page_size=2, holes=True),
        Case(rows=300, page_size=256, width=128),
    ]
    configs = check_every_config()
    torch.cuda.synchronize()
    graphs = [guarded(lambda case=case: check_graph(case), f"graph replay: {case}") for case in replayed]
    return {"shapes": shapes, "graphs": graphs, "configs": configs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    path = parser.parse_args().json
    began = time.monotonic()
    results = run()
    secs = time.monotonic() - began
    failed = [result for group in results.values() for result in group if not result.ok]
    if path is not None:
        summary = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "tolerance": TOLERANCE,
            "seconds": round(secs, 1),
            "max_error": {name: max((r.error for r in group), default=0.0) for name, group in results.items()},
            "failed": [vars(result) for result in failed],
            "checks": [vars(result) for group in results.values() for result in group],
        }
        path.write_text(json.dumps(summary, indent=1) + "\n")
    for result in failed:
        print(f"FAILED error {result.error:.2e} {'; '.join(result.problems)}: {result.check}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {secs:.0f} s")
    print(f"{'group':10} {'checks':>6} {'failed':>6} {'worst error':>12}   (allowed {TOLERANCE:.0e})")
    for name, group in results.items():
        worst = max((result.error for result in group), default=0.0)
        print(f"{name:10} {len(group):6} {sum(not result.ok for result in group):6} {worst:12.2e}")
    return 1 if failed or not all(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
