"""The capture loop of SGLang, its own class, with our tuner on kernels whose time depends on the lengths.

    python integration/sglang/capture_check.py [--json PATH]

Needs SGLang 0.5.14 and this package importable, and a GPU. Descending batch sizes, two warm-ups each, a side stream,
one pool, global capture mode, and length 1 in every row, as ``DecodeCudaGraphRunner`` does it. Checked for our
decorator with ``tune_args`` and for a stock decorator under the patch: every capture ends, every size replays right
with real lengths, nothing is served cold, and what was tuned was tuned on the lengths that it should be. Exits 1
otherwise.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

os.environ["SMART_AUTOTUNE_CACHE"] = "0"  # what is looked at is the tuning
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))

import torch
import triton
import triton.language as tl
from common import print_table, write_json

import smart_autotune

SIZES = [1, 2, 4, 8, 16, 32, 64]
WIDTH, DIM, TOKENS = 4096, 128, 20_000


@triton.jit
def _gather_sum(out_ptr, table_ptr, indices_ptr, seq_lens_ptr, width, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """out[b] = sum of table[indices[b, t]] over t < seq_lens[b]; one program a row."""
    row = tl.program_id(0)
    length = tl.load(seq_lens_ptr + row)
    d = tl.arange(0, DIM)
    total = tl.zeros((DIM,), tl.float32)
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + row * width + t, mask=t < length, other=0).to(tl.int64)
        values = tl.load(table_ptr + index[:, None] * DIM + d[None, :], mask=(t < length)[:, None], other=0.0)
        total += tl.sum(values, axis=0)
    tl.store(out_ptr + row * DIM + d, total)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 64, 128) for warps in (1, 4, 8)]


def full_lengths(named: dict[str, Any]) -> dict[str, Any]:
    """What a serving kernel's author knows: lengths as traffic has them, not a warm-up's."""
    lengths = named["seq_lens_ptr"]
    return {"seq_lens_ptr": torch.full_like(lengths, WIDTH)}


def kernels() -> dict[str, Any]:
    key = ["width"]
    return {
        "our decorator, tune_args": smart_autotune.smart_autotune(
            CONFIGS, key, batch="seq_lens_ptr", tune_args=full_lengths
        )(_gather_sum),
        "stock decorator, patched": triton.autotune(CONFIGS, key)(
            triton.jit(_gather_sum.fn)  # a kernel object of its own
        ),
    }


class Buffers:
    """As large as the largest batch; each size gets views of them, as in SGLang."""

    def __init__(self) -> None:
        most = max(SIZES)
        self.table = torch.randn(TOKENS, DIM, device="cuda")
        self.indices = torch.zeros(most, WIDTH, dtype=torch.int32, device="cuda")
        self.lengths = torch.ones(most, dtype=torch.int32, device="cuda")
        self.out = torch.full((most, DIM), float("nan"), device="cuda")

    def fill(self, size: int) -> torch.Tensor:
        """Real traffic for ``size`` rows; returns what must come out."""
        self.indices[:size] = torch.randint(0, TOKENS, (size, WIDTH), dtype=torch.int32, device="cuda")
        self.lengths[:size] = torch.randint(1, WIDTH + 1, (size,), dtype=torch.int32, device="cuda")
        self.out.fill_(float("nan"))
        rows = zip(self.indices[:size], self.lengths[:size].tolist())
        return torch.stack([self.table[row[:length].long()].double().sum(0) for row, length in rows]).float()


def captured(kernel: Any, buffers: Buffers) -> Any:
    """Every size captured by SGLang's own backend; returns it."""
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

    group = SimpleNamespace(barrier=lambda: None)
    runner = SimpleNamespace(device_module=torch.cuda, model_runner=SimpleNamespace(tp_group=group))
    backend = FullCudaGraphBackend(runner)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), backend.capture_session(stream):
        for size in reversed(SIZES):

            def forward(size: int = size) -> torch.Tensor:
                b = buffers
                kernel[(size,)](b.out[:size], b.table, b.indices[:size], b.lengths[:size], WIDTH, DIM)
                return b.out[:size]

            backend.capture_one(size, forward)
    torch.cuda.synchronize()
    return backend


def checked(kernel: Any) -> dict[str, Any]:
    """Captures, replays and looks at the records. AssertionError for what does not hold."""
    cold_before, known = len(smart_autotune.cold_keys()), {id(record) for record in smart_autotune.records()}
    buffers = Buffers()
    backend = captured(kernel, buffers)
    held = sorted(backend._graphs)
    assert held == SIZES, f"captured {held}, expected {SIZES}"
    worst = 0.0
    for size in SIZES:
        expected = buffers.fill(size)
        backend._graphs[size].replay()
        error = float((buffers.out[:size] - expected).norm() / expected.norm())
        assert error < 1e-4, f"batch {size}: replay is off by {error}"
        assert torch.isnan(buffers.out[size:]).all(), f"batch {size}: wrote past its rows"
        worst = max(worst, error)
    records = [r for r in smart_autotune.records() if r.kernel == "_gather_sum" and id(r) not in known]
    assert len(smart_autotune.cold_keys()) == cold_before, f"served cold: {smart_autotune.cold_keys()}"
    assert all(record.served_by == "tuned" for record in records), [record.served_by for record in records]
    return {
        "captured": len(held),
        "worst replay error": worst,
        "buckets tuned": sorted(record.key.bucket or 0 for record in records),
        "winner us at the largest": max(records, key=lambda r: r.key.bucket or 0).winner.median_us,
        "notes": sorted({note for record in records for note in record.notes}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    status = smart_autotune.enable()
    found: dict[str, Any] = {}
    problems = [] if status.enabled else [f"the patch is not on: {status.conflicts}"]
    for name, kernel in kernels().items():
        try:
            found[name] = checked(kernel)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
    if len(found) == 2:
        problems += representative(*found.values())
    write_json(options.json, {"problems": problems, **found})
    rows = [("kernel", "captured", "replay error", "buckets", "us", "notes")]
    for name, one in found.items():
        time_us = f"{one['winner us at the largest']:.1f}"
        buckets = ",".join(map(str, one["buckets tuned"]))
        error = f"{one['worst replay error']:.1e}"
        rows.append((name, str(one["captured"]), error, buckets, time_us, "; ".join(one["notes"])[:60] or "none"))
    print_table("captured as SGLang does it", rows)
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


def representative(ours: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    """Ours was tuned on full lengths and says nothing; stock's on length 1, and its record says so."""
    problems = []
    if ours["buckets tuned"] != SIZES:
        problems.append(f"buckets tuned with tune_args: {ours['buckets tuned']}, expected {SIZES}")
    if ours["notes"]:
        problems.append(f"a note although tune_args were given: {ours['notes']}")
    if not stock["notes"]:
        problems.append("no note about the lengths of 1 that the stock-decorated kernel was tuned on")
    if ours["winner us at the largest"] < 3 * stock["winner us at the largest"]:
        problems.append("tune_args' full lengths took no longer than lengths of 1: they were not what was timed")
    return problems


if __name__ == "__main__":
    sys.exit(main())
