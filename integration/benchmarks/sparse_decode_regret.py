"""How much a batch bucket's choice loses against each batch's own best config: sparse decode on a GPU.

    python integration/benchmarks/sparse_decode_regret.py [--json PATH]

Tuned in the order a server captures its graphs (large batches first). Then every config is timed at every batch,
interleaved, L2 flushed; regret is the time of the bucket's choice over the best one's. Beside it: what one choice for
all batches would lose (the batch-1 and the batch-256 choice).
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "integration" / "gpu"))

from common import print_table, write_json  # noqa: E402

from smart_autotune import settings  # noqa: E402
from smart_autotune.gpu_bench import GpuTimer, Run  # noqa: E402
from smart_autotune.kernels import sparse_decode as op  # noqa: E402
from smart_autotune.kernels.sparse_decode import tuning  # noqa: E402
from smart_autotune.kernels.sparse_decode.layout import random_cache  # noqa: E402
from smart_autotune.verdict import describe  # noqa: E402

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SAMPLES = 40


def call_of(batch: int, heads: int, caches: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Window 128 on pages of 256 and top 512 on pages of 64, all live, random tokens."""

    def tokens(cache: torch.Tensor, width: int) -> torch.Tensor:
        count = cache.shape[0] * cache.shape[1]
        return torch.randint(count, (batch, 1, width), device="cuda", dtype=torch.int32)

    def full(width: int) -> torch.Tensor:
        return torch.full((batch,), width, device="cuda", dtype=torch.int32)

    q = torch.randn(batch, 1, 64, 512, device="cuda").bfloat16()
    lists = op._lists(caches[0], tokens(caches[0], 128), full(128), caches[1], tokens(caches[1], 512), full(512))
    return {"q": q, "lists": lists, "heads": heads, "out": torch.empty_like(q)}


def launch(call: dict[str, Any], config: Any = None) -> None:
    """The op's launch: tuned, or by one config."""

    op._launch(call["q"], call["lists"], None, 512**-0.5, call["heads"], call["out"], None, config=config)


def replayed(call: dict[str, Any], config: Any) -> Run:
    """One launch of split and combine, replayed from a graph: the op's host code is not what is compared."""
    launch(call, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(call, config)
    return Run(graph.replay)


def regrets(heads: int) -> dict[str, Any]:
    caches = (random_cache(400, 256, "cuda", 0), random_cache(1600, 64, "cuda", 1))
    calls = {batch: call_of(batch, heads, caches) for batch in BATCHES}
    kernel = tuning.split_kernel
    kernel.cache.clear()
    chosen = {}
    for batch in reversed(BATCHES):
        launch(calls[batch])
        chosen[batch] = describe(kernel.best_config)
    timer = GpuTimer()
    losses: dict[str, list[float]] = {"bucket": [], "batch 1's": [], "batch 256's": []}
    by_batch = {}
    for batch, call in calls.items():
        runs = {}
        for config in tuning.drop_unsuited_head_blocks(tuning.CONFIGS, {"num_heads": heads}):
            run = replayed(call, config)
            timer.screen(run)
            runs[describe(config)] = run
        timer._sample(list(runs.values()), SAMPLES)
        best = min(runs, key=lambda name: runs[name].median_us)
        for name, choice in (("bucket", chosen[batch]), ("batch 1's", chosen[1]), ("batch 256's", chosen[256])):
            losses[name].append(runs[choice].median_us / runs[best].median_us)
        by_batch[batch] = {
            "chosen": chosen[batch],
            "best": best,
            "best us": round(runs[best].median_us, 2),
            "regret": round(losses["bucket"][-1] - 1, 4),
        }
    keys = [key for key in kernel.cache if dict((n, v) for n, _, v in key.values)["num_heads"] == heads]
    mean = {name: round(math.exp(sum(map(math.log, values)) / len(values)), 4) for name, values in losses.items()}
    worst = {name: round(max(values), 3) for name, values in losses.items()}
    return {"tunings": len(keys), "geometric mean": mean, "worst": worst, "by batch": by_batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    with settings.override(strict=True, cache=False):
        results = {f"{heads} heads": regrets(heads) for heads in (8, 16, 64)}
    write_json(options.json, results)
    for name, found in results.items():
        rows = [(str(batch), str(row["regret"]), str(row["best us"]), row["chosen"], row["best"])
                for batch, row in found["by batch"].items()]  # fmt: skip
        print_table(name, [("batch", "regret", "best us", "chosen", "best"), *rows])
        print(f"{found['tunings']} tunings; geometric mean {found['geometric mean']}; worst {found['worst']}")


if __name__ == "__main__":
    main()
