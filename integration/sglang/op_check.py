"""SGLang's sparse-decode entry with our op in its place, against SGLang's own torch version of it, on a GPU.

    python integration/sglang/op_check.py [--json PATH]

Needs SGLang 0.5.14 and this package installed, so that SGLang's ``load_plugins`` finds ours. On a GPU that is no SM120
the plug-in is told to apply anyway. Eager and captured, one and two lists, all page sizes, padded heads that hold NaN,
padded rows as SGLang makes them. Nothing is timed. Exits 1 when a check fails or our op was not what ran.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ["SMART_AUTOTUNE"] = "1"
os.environ["SMART_AUTOTUNE_SPARSE_DECODE"] = "force"
os.environ["SMART_AUTOTUNE_STRICT"] = "1"  # SGLang's own must not stand in for a fault of ours
os.environ.setdefault("SMART_AUTOTUNE_MODE", "first_fit")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))

import torch
from common import print_table, write_json

TOLERANCE = 5e-3  # bf16 results
TOKENS = 20_000
CAPTURED = [1, 2, 4, 8, 16, 32, 64]
ORACLE_ROWS = 128  # at a time: it gathers every token


@dataclass(frozen=True)
class Case:
    """``heads`` real ones of ``padded``; ``extra``: the second list's width and its page size."""

    name: str
    rows: int
    heads: int = 16
    padded: int = 64
    window: int = 128
    extra: tuple[int, int] | None = (512, 64)
    as_uint8: bool = False


CASES = [
    Case("window only", 1, 64, extra=None),
    Case("window only", 32, 8, extra=None),
    Case("window of 192", 5, window=192, extra=None, as_uint8=True),
    Case("top-512", 1),
    Case("top-512", 3, 64),
    Case("top-512", 64, as_uint8=True),
    Case("top-1024, 128 heads", 4, 128, 128, extra=(1024, 64)),
    Case("compressed, 32k", 7, 8, extra=(320, 2)),
    Case("compressed, 1M", 1, extra=(8256, 2)),
    Case("compressed, 1M", 32, extra=(8256, 2)),
    Case("prefill", 2000),
]


def call_of(case: Case, seed: int) -> dict[str, Any]:
    """Keyword arguments as ``DeepseekV4AttnBackend`` gives them. Heads beyond the real ones are NaN and Inf."""
    from smart_autotune.kernels.sparse_decode.layout import random_cache

    generator = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(case.rows, 1, case.padded, 512, device="cuda", generator=generator).bfloat16()
    q[:, :, case.heads :: 2] = math.nan
    q[:, :, case.heads + 1 :: 2] = math.inf

    def cache(page_size: int) -> torch.Tensor:
        found = random_cache(-(-TOKENS // page_size), page_size, "cuda", seed)
        return found if case.as_uint8 else found.view(torch.float8_e4m3fn)

    def chosen(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.randint(0, TOKENS, (case.rows, 1, width), dtype=torch.int32, device="cuda", generator=generator)
        length = torch.randint(1, width + 1, (case.rows,), dtype=torch.int32, device="cuda", generator=generator)
        beyond = torch.arange(width, device="cuda")[None, None, :] >= length[:, None, None]
        return indices.masked_fill_(beyond, -1), length

    indices, length = chosen(case.window)
    call = {
        "q": q,
        "k_cache": cache(256),
        "head_dim_v": 512,
        "softmax_scale": 512**-0.5,
        "indices": indices,
        "topk_length": length,
        "attn_sink": torch.randn(case.padded, device="cuda", generator=generator),
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "extra_topk_length": None,
    }
    if case.extra is not None:
        width, page_size = case.extra
        extra_indices, extra_length = chosen(width)
        call |= {
            "extra_k_cache": cache(page_size),
            "extra_indices_in_kvcache": extra_indices,
            "extra_topk_length": extra_length,
        }
    pad_last_row(call, case)
    return call


def pad_last_row(call: dict[str, Any], case: Case) -> None:
    """SGLang's padding: one dummy token of the window, none of the second list although its length says one."""
    if case.rows < 3:
        return
    call["indices"][-1] = -1
    call["indices"][-1, 0, 0] = 0
    call["topk_length"][-1] = 1
    if case.extra is not None:
        call["extra_indices_in_kvcache"][-1] = -1
        call["extra_topk_length"][-1] = 1


ROWWISE = ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")


def oracle(module: Any, call: dict[str, Any], heads: int) -> torch.Tensor:
    """SGLang's ``_sm120_sparse_decode_fwd`` on the real heads, in slices of rows."""
    parts = []
    for start in range(0, call["q"].shape[0], ORACLE_ROWS):
        rows = slice(start, start + ORACLE_ROWS)
        part = {n: v[rows] if n in ROWWISE and v is not None else v for n, v in call.items()}
        out, _ = module._sm120_sparse_decode_fwd(
            part["q"][:, :, :heads],
            part["k_cache"],
            part["indices"],
            part["topk_length"],
            part["attn_sink"][:heads],
            part["head_dim_v"],
            part["softmax_scale"],
            part["extra_k_cache"],
            part["extra_indices_in_kvcache"],
            part["extra_topk_length"],
        )
        parts.append(out)
    return torch.cat(parts)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    if torch.isnan(found).any():
        return math.inf
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def through_layer(module: Any, call: dict[str, Any], heads: int) -> torch.Tensor:
    """The entry as a rank's attention layer calls it: late from its module, inside the layer's own call."""
    from smart_autotune.patches.sglang.sparse_decode import in_layer

    layer = SimpleNamespace(tp_q_head_num=heads)
    out: torch.Tensor = in_layer(
        lambda backend, layer: module.flash_mla_with_kvcache_sm120(**call)[0], None, layer=layer
    )
    return out


def eager(module: Any, case: Case, seed: int) -> float:
    call = call_of(case, seed)
    found = through_layer(module, call, case.heads)
    if found.shape != call["q"].shape or found.dtype != torch.bfloat16:
        raise AssertionError(f"{tuple(found.shape)} {found.dtype}")
    found[:, :, :1].mul_(1)  # what comes after writes into it
    return error_of(found[:, :, : case.heads], oracle(module, call, case.heads))


def captured(module: Any) -> float:
    """Descending sizes into one pool, dummy data; then each replayed on real data. The worst error."""
    case = Case("captured", max(CAPTURED))
    real = call_of(case, 99)
    held = {name: value.clone() if name in ROWWISE else value for name, value in real.items()}
    for name, value in (("topk_length", 1), ("extra_topk_length", 1), ("indices", 0), ("extra_indices_in_kvcache", -1)):
        held[name].fill_(value)

    def rows(size: int) -> dict[str, Any]:
        return {name: value[:size] if name in ROWWISE else value for name, value in held.items()}

    pool, stream, graphs = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), {}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for size in reversed(CAPTURED):
            for _ in range(2):
                torch.cuda.synchronize()
                through_layer(module, rows(size), case.heads)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                out = through_layer(module, rows(size), case.heads)
            graphs[size] = graph, out
    torch.cuda.synchronize()
    for name in ROWWISE:
        held[name].copy_(real[name])
    worst = 0.0
    for size, (graph, out) in graphs.items():
        graph.replay()
        torch.cuda.synchronize()
        expected = oracle(module, rows(size), case.heads)
        worst = max(worst, error_of(out[:, :, : case.heads], expected))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    import sglang
    from sglang.srt.layers.attention import flash_mla_sm120 as module
    from sglang.srt.plugins import load_plugins

    theirs = module.flash_mla_with_kvcache_sm120
    load_plugins()
    problems = []
    if module.flash_mla_with_kvcache_sm120 is theirs:
        problems.append("SGLang's load_plugins did not put our op in place")
    rows: list[tuple[str, float]] = []
    for seed, case in enumerate([] if problems else CASES):
        name = f"{case.name}, {case.rows} rows, {case.heads} of {case.padded} heads"
        rows.append(checked(name, lambda case=case, seed=seed: eager(module, case, seed), problems))
    if not problems:
        rows.append(checked(f"captured at {CAPTURED}, replayed", lambda: captured(module), problems))
        from smart_autotune.patches import sglang as patch

        status = patch.status()
        if not status.sparse_decode:
            problems.append(f"our op was not what ran: {status}")
    write_json(options.json, {"sglang": sglang.__version__, "problems": problems, "errors": dict(rows)})
    print_table("our op in SGLang's entry, against SGLang's torch version", [("case", "error"), *map(shown, rows)])
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


def checked(name: str, check: Any, problems: list[str]) -> tuple[str, float]:
    try:
        error: float = check()
    except Exception as failure:
        problems.append(f"{name}: {type(failure).__name__}: {failure}")
        return name, math.inf
    if not error < TOLERANCE:
        problems.append(f"{name}: off by {error}")
    return name, error


def shown(row: tuple[str, float]) -> tuple[str, str]:
    return row[0], f"{row[1]:.1e}"


if __name__ == "__main__":
    sys.exit(main())
