"""Sparse decode on a GPU: our op beside FlashMLA's CUDA kernel and SGLang's Triton path, in one run.

    python integration/benchmarks/sparse_decode.py [--flashmla flashmla_ops.abi3.so]
        [--sglang-kernel flash_mla_sm120_triton.py] [--json PATH] [--heads 8,16,32,64] [--batches 1,2,...]

A figure is microseconds a call: a CUDA graph of CALLS calls on different random inputs (two sets of caches, each
larger than the L2), replayed; the median of REPLAYS replays over CALLS. What is compared at a point is replayed in
turns. FlashMLA gets the heads padded to 64, as a server pads them; ours computes the real ones.
The floor is every selected token's 584 bytes read once, at the copy rate measured in this run.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "integration" / "gpu"))

from common import print_table, write_json  # noqa: E402

from smart_autotune import settings  # noqa: E402
from smart_autotune.kernels.sparse_decode import sparse_decode  # noqa: E402
from smart_autotune.kernels.sparse_decode.layout import TOKEN_BYTES, random_cache  # noqa: E402
from smart_autotune.kernels.sparse_decode.reference import sparse_decode_reference  # noqa: E402
from smart_autotune.kernels.sparse_decode.tuning import split_kernel  # noqa: E402
from smart_autotune.verdict import describe  # noqa: E402

CALLS, REPLAYS = 6, 15
PADDED, SCALE = 64, 512**-0.5
PAGES = {256: 800, 64: 3200, 2: 60_000}
# name: (main width, page size), (extra width, page size, live length) or None
LAYERS: dict[str, tuple[tuple[int, int], tuple[int, int, int] | None]] = {
    "window 128": ((128, 256), None),
    "128 + 512": ((128, 256), (512, 64, 512)),
    "128 + 1088 (1024 live)": ((128, 256), (1088, 2, 1024)),
    "main 2048": ((2048, 64), None),
}
Call = dict[str, Any]


def make(batch: int, main: tuple[int, int], extra: tuple[int, int, int] | None, caches: dict[int, Any]) -> Call:
    def tokens(cache: torch.Tensor, width: int) -> torch.Tensor:
        return torch.randint(cache.shape[0] * cache.shape[1], (batch, 1, width), device="cuda", dtype=torch.int32)

    def full(length: int) -> torch.Tensor:
        return torch.full((batch,), length, device="cuda", dtype=torch.int32)

    width, page_size = main
    call: Call = {
        "q": torch.randn(batch, 1, PADDED, 512, device="cuda").bfloat16(),
        "cache": caches[page_size].view(torch.float8_e4m3fn),
        "indices": tokens(caches[page_size], width),
        "topk_length": full(width),
        "sink": torch.randn(PADDED, device="cuda"),
    }
    if extra is not None:
        width, page_size, live = extra
        cache = caches[page_size]
        call["extra_cache"] = cache.view(torch.float8_e4m3fn)
        call["extra_indices"] = tokens(cache, width)
        call["extra_indices"][..., live:] = -1
        call["extra_topk_length"] = full(live)
    return call


def ours(call: Call, heads: int) -> torch.Tensor:
    out = sparse_decode(**call, softmax_scale=SCALE, num_heads=heads)
    assert isinstance(out, torch.Tensor)
    return out


class FlashMla:
    """One shape's calls; the schedule of the first is kept for the others, as a server keeps it."""

    def __init__(self) -> None:
        self._schedule: tuple[Any, Any] = (None, None)

    def __call__(self, call: Call) -> torch.Tensor:
        extra = (call.get("extra_cache"), call.get("extra_indices"), call.get("extra_topk_length"))
        out, _, *schedule = torch.ops.sgl_kernel.sparse_decode_fwd.default(
            call["q"], call["cache"], call["indices"], call["topk_length"], call["sink"], *self._schedule, *extra,
            512, SCALE,
        )  # fmt: skip
        self._schedule = (schedule[0], schedule[1])
        return out


def sglang_call(path: str) -> Callable[[Call], torch.Tensor]:
    spec = importlib.util.spec_from_file_location("flash_mla_sm120_triton", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(call: Call) -> torch.Tensor:
        extra = (call.get("extra_cache"), call.get("extra_indices"), call.get("extra_topk_length"))
        found = module.flash_mla_sparse_decode_triton(
            call["q"], call["cache"], call["indices"], call["topk_length"], call["sink"], 512, SCALE, *extra
        )
        out: torch.Tensor = found[0]
        return out

    return run


def captured(calls: list[Call], run: Callable[[Call], Any]) -> torch.cuda.CUDAGraph:
    for call in calls:
        run(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            run(call)
    return graph


def replayed(graphs: dict[str, torch.cuda.CUDAGraph], calls: dict[str, int], replays: int) -> dict[str, list[float]]:
    """Microseconds a call, by turns: [min, median, max]."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(replays + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                samples[name].append(start.elapsed_time(end) * 1e3 / calls[name])
    return {name: [round(f(v), 2) for f in (min, statistics.median, max)] for name, v in samples.items()}


def copy_rate() -> float:
    """Bytes a second, read plus written, over 2 GiB: the better of a device copy and an elementwise kernel."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    graphs = {}
    for name, run in (("copy", lambda: target.copy_(source)), ("kernel", lambda: torch.neg(source, out=target))):
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    found = replayed(graphs, dict.fromkeys(graphs, 1), 9)
    return 2 * source.nbytes / min(micros[1] for micros in found.values()) * 1e6


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def reference(call: Call, heads: int) -> torch.Tensor:
    return sparse_decode_reference(**call, softmax_scale=SCALE, num_heads=heads)[0]


def checked(call: Call, heads: int, flashmla: FlashMla | None) -> dict[str, Any]:
    """Accuracy of both, and what must not change a bit of ours: running again, NaN in the padding heads."""
    want = reference(call, heads)
    got = ours(call, heads)[:, :, :heads].clone()
    found: dict[str, Any] = {"error": error(got, want)}
    if flashmla is not None:
        found["flashmla error"] = error(flashmla(call)[:, :, :heads], want)
    poisoned = {**call, "q": call["q"].clone()}
    poisoned["q"][:, :, heads:] = math.nan
    found["same again"] = torch.equal(got, ours(call, heads)[:, :, :heads])
    found["same beside NaN"] = torch.equal(got, ours(poisoned, heads)[:, :, :heads])
    return found


def geometric_mean(values: list[float]) -> float:
    return round(math.exp(statistics.fmean(map(math.log, values))), 3)


def chosen_config() -> str:
    return describe(split_kernel.best_config)


def short_lists(caches: dict[int, Any]) -> dict[str, float]:
    """A 1,088-wide list with 64 live tokens over a 64-wide one, by batch (8 heads)."""
    ratios = {}
    for batch in (1, 8, 64, 256):
        widths = {"wide": 1088, "narrow": 64}
        calls = {  # alive while their graphs are replayed
            name: [make(batch, (128, 256), (width, 2, 64), caches) for _ in range(CALLS)]
            for name, width in widths.items()
        }
        graphs = {name: captured(calls[name], lambda call: ours(call, 8)) for name in widths}
        micros = replayed(graphs, {"wide": CALLS, "narrow": CALLS}, REPLAYS)
        ratios[str(batch)] = round(micros["wide"][1] / micros["narrow"][1], 3)
    return ratios


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.flashmla:
        torch.ops.load_library(options.flashmla)
    theirs = sglang_call(options.sglang_kernel) if options.sglang_kernel else None
    sets = [{size: random_cache(pages, size, "cuda", 10 * size + i) for size, pages in PAGES.items()} for i in range(2)]
    rate = copy_rate()
    points = []
    for layer, (main, extra) in LAYERS.items():
        live = main[0] + (extra[2] if extra else 0)
        for batch in reversed(options.batches):  # as servers capture: large first
            calls = [make(batch, main, extra, sets[i % 2]) for i in range(CALLS)]
            flashmla = FlashMla() if options.flashmla else None
            shared: dict[str, torch.cuda.CUDAGraph] = {}
            counts = {}
            if flashmla is not None:
                shared["flashmla"], counts["flashmla"] = captured(calls, flashmla), CALLS
            slow = 0.0
            if theirs is not None:
                few = calls[:1]
                slow = replayed({"sglang": captured(few, theirs)}, {"sglang": 1}, 3)["sglang"][1]
            for heads in options.heads:
                graphs = {"ours": captured(calls, lambda call, heads=heads: ours(call, heads)), **shared}
                micros = replayed(graphs, {"ours": CALLS, **counts}, REPLAYS)
                point = {"layer": layer, "batch": batch, "heads": heads, "us": micros, "config": chosen_config()}
                point["floor us"] = round(batch * live * TOKEN_BYTES / rate * 1e6, 2)
                if slow:
                    point["us"]["sglang"] = [slow] * 3
                if batch <= 32:
                    point |= checked(calls[0], heads, flashmla)
                points.append(point)
                print(layer, batch, heads, {k: v[1] for k, v in point["us"].items()}, point["config"], flush=True)
    return {"copy GB/s": round(rate / 1e9), "points": points, "1088 wide, 64 live / 64 wide": short_lists(sets[0])}


def summary(found: dict[str, Any], heads: list[int]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("heads", "ours / FlashMLA: geometric mean", "worst", "SGLang / ours: mean", "least")
    ]
    for count in heads:
        points = [point for point in found["points"] if point["heads"] == count]
        cells = [str(count)]
        for name, over in (("flashmla", False), ("sglang", True)):
            ratios = [point["us"]["ours"][1] / point["us"][name][1] for point in points if name in point["us"]]
            ratios = [1 / ratio if over else ratio for ratio in ratios]
            cells += [str(geometric_mean(ratios)), f"{(min if over else max)(ratios):.3f}"] if ratios else ["", ""]
        rows.append(tuple(cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--flashmla", help="flashmla_ops.abi3.so of sglang-kernel 0.4.4")
    parser.add_argument("--sglang-kernel", help="flash_mla_sm120_triton.py of SGLang 0.5.14")
    parser.add_argument("--heads", type=numbers, default=[8, 16, 32, 64])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    with settings.override(strict=False, cache=False, max_buckets=16):
        found = measure(options)
    found["summary"] = summary(found, options.heads)
    checks = [point for point in found["points"] if "error" in point]
    found["worst error"] = max(point["error"] for point in checks)
    found["worst flashmla error"] = max((point.get("flashmla error", 0.0) for point in checks), default=0.0)
    found["bits"] = all(point["same again"] and point["same beside NaN"] for point in checks)
    far = [p for p in found["points"] if p["heads"] == 8 and p["batch"] >= 64 and p["layer"] != "window 128"]
    found["8 heads, batch >= 64, over the floor"] = [
        (p["layer"], p["batch"], round(p["us"]["ours"][1] / p["floor us"], 2)) for p in far
    ]
    write_json(options.json, found)
    print_table("sparse decode", found["summary"])
    for name in ("8 heads, batch >= 64, over the floor", "1088 wide, 64 live / 64 wide", "worst error",
                 "worst flashmla error", "bits", "copy GB/s"):  # fmt: skip
        print(f"{name}: {found[name]}")


if __name__ == "__main__":
    main()
