"""How long a tuning takes and how good its choice is, beside stock's, in one run on a GPU.

    python integration/benchmarks/tuning_time.py [--json PATH] [--secs 1.0]

Matmul, bf16, 16 configs (36 for one row), N = K = 4096. Cold: an empty Triton cache folder. Regret: the winner's
time, measured for ``--secs`` seconds beside every other config, over the best one's.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "integration" / "gpu"))

from common import print_table, write_json  # noqa: E402
from tuner_check import _matmul  # noqa: E402

import smart_autotune  # noqa: E402
from smart_autotune import settings  # noqa: E402
from smart_autotune.verdict import describe  # noqa: E402

N = K = 4096
CONFIGS = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)
    for bm, bn, bk, warps, stages in [
        (16, 64, 64, 4, 4), (16, 128, 64, 4, 4), (16, 64, 128, 4, 3), (16, 128, 128, 8, 3),
        (32, 64, 64, 4, 4), (32, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4),
        (64, 128, 32, 4, 4), (64, 256, 64, 8, 3), (128, 64, 64, 4, 4), (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3),
    ]
]  # fmt: skip
MANY = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)
    for bm in (32, 64, 128) for bn in (64, 128) for bk in (32, 64) for warps, stages in ((4, 2), (4, 3), (8, 3))
]  # fmt: skip


def operands(m: int) -> tuple[torch.Tensor, ...]:
    a = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(K, N, device="cuda", dtype=torch.bfloat16)
    return a, b, torch.empty(m, N, device="cuda", dtype=torch.bfloat16)


def launch(kernel: Any, tensors: tuple[torch.Tensor, ...]) -> None:
    a, b, c = tensors
    m = a.shape[0]
    kernel[lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(N, meta["BN"]))](a, b, c, m, N, K)


def fresh(kind: str, configs: list[triton.Config]) -> Any:
    """A new kernel object: nothing of it is compiled or loaded in this process yet."""
    jit = triton.jit(_matmul.fn)
    if kind == "stock":
        return triton.autotune(configs, ["M", "N", "K"])(jit)
    return smart_autotune.smart_autotune(configs, ["N", "K"], batch="M")(jit)


def seconds(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def first_tuning(m: int, configs: list[triton.Config]) -> dict[str, float]:
    """Wall time of a first launch that tunes: stock and ours, with an empty and with a filled compile cache."""
    tensors = operands(m)
    found = {}
    for kind in ("stock", "smart"):
        with tempfile.TemporaryDirectory() as folder:
            knobs.cache.dir = folder
            found[f"{kind} cold"] = seconds(lambda kind=kind: launch(fresh(kind, configs), tensors))
            again = [seconds(lambda kind=kind: launch(fresh(kind, configs), tensors)) for _ in range(3)]
            found[f"{kind} warm"] = statistics.median(again)
    for state in ("cold", "warm"):
        found[f"smart / stock {state}"] = found[f"smart {state}"] / found[f"stock {state}"]
    return {name: round(value, 4) for name, value in found.items()}


def buckets(first: int, count: int) -> dict[str, float]:
    """Total tuning time over ``count`` batch buckets from ``first`` up, beside one bucket's; compile cache empty."""
    found = []
    for number in (1, count):
        with tempfile.TemporaryDirectory() as folder:
            knobs.cache.dir = folder
            kernel = fresh("smart", CONFIGS)
            inputs = [operands(first * 2**i) for i in range(number)]
            found.append(sum(seconds(partial(launch, kernel, tensors)) for tensors in inputs))
            assert len(kernel.records) == number
    return {"one": round(found[0], 3), f"{count} buckets": round(found[1], 3), "ratio": round(found[1] / found[0], 3)}


def exhaustive(m: int, secs_each: float) -> dict[str, float]:
    """Every config that fits, timed for ``secs_each`` in interleaved slices, L2 flushed: median us by config."""
    from smart_autotune.gpu_bench import GpuTimer, Run

    tensors = operands(m)
    a, b, c = tensors
    timer = GpuTimer()
    runs = {}
    for config in CONFIGS:
        grid = (triton.cdiv(m, config.kwargs["BM"]), triton.cdiv(N, config.kwargs["BN"]))
        run = Run(lambda config=config, grid=grid: _matmul[grid](a, b, c, m, N, K, **config.all_kwargs()))
        try:
            timer.screen(run)
        except Exception:
            continue
        runs[describe(config)] = run
    timer.decide(list(runs.values()))  # the first samples of each, at least
    slices = 20
    each_us = statistics.mean(run.median_us for run in runs.values()) + 2 * 100.0  # with flush, host and wait
    for _ in range(slices):
        timer._sample(list(runs.values()), max(1, int(secs_each * 1e6 / each_us / slices)))
    return {name: run.median_us for name, run in runs.items()}


def regret(m: int, repeats: int, secs_each: float) -> dict[str, Any]:
    """``repeats`` tunings from scratch (compiles kept): how far each winner is from the exhaustive best."""
    times_us = exhaustive(m, secs_each)
    best_us = min(times_us.values())
    winners = []
    for _ in range(repeats):
        kernel = smart_autotune.smart_autotune(CONFIGS, ["N", "K"], batch="M")(_matmul)
        launch(kernel, operands(m))
        winners.append(describe(kernel.best_config))
    regrets = [times_us[winner] / best_us - 1 for winner in winners]
    counts = {winner: winners.count(winner) for winner in set(winners)}
    close = sorted((round(us / best_us, 4), name) for name, us in times_us.items() if us <= 1.05 * best_us)
    return {"worst": round(max(regrets), 4), "winners": counts, "best us": round(best_us, 2), "within 5 %": close}


def short_of_memory() -> dict[str, Any]:
    """All but 200 MB of the device's memory is taken first."""
    tensors = operands(256)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hoard = torch.empty(free - (200 << 20), dtype=torch.int8, device="cuda")
    kernel = fresh("smart", CONFIGS)
    launch(kernel, tensors)
    torch.cuda.synchronize()
    left = torch.cuda.mem_get_info()[0]
    del hoard
    torch.cuda.empty_cache()
    return {"tuned": len(kernel.records), "free MB at the end": left >> 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--secs", type=float, default=1.0, help="exhaustive measurement of one config, seconds")
    parser.add_argument("--only", default="", help="parts of the names of the rows to measure, by comma")
    options = parser.parse_args()
    launch(fresh("smart", CONFIGS[:2]), operands(64))  # what a process does once: CUDA context, driver module
    launch(fresh("stock", CONFIGS[:2]), operands(64))
    results: dict[str, Any] = {}
    rows_of: dict[str, Callable[[], dict[str, Any]]] = {
        "M=16: 16 configs, s": partial(first_tuning, 16, CONFIGS),
        "M=4096: 16 configs, s": partial(first_tuning, 4096, CONFIGS),
        "M=512: 36 configs, s": partial(first_tuning, 512, MANY),
        "M=16 … 8192: ten buckets, s": partial(buckets, 16, 10),
        "M=1 … 512: ten buckets, three specialisations of M, s": partial(buckets, 1, 10),
        "M=16: regret of 20 tunings": partial(regret, 16, 20, options.secs),
        "M=4096: regret of 20 tunings": partial(regret, 4096, 20, options.secs),
        "200 MB free": short_of_memory,
    }
    with settings.override(strict=True):
        for name, measure in rows_of.items():
            if any(part in name for part in options.only.split(",")):
                results[name] = measure()
    write_json(options.json, results)
    rows = [(name, ", ".join(f"{key}: {value}" for key, value in found.items())) for name, found in results.items()]
    print_table("tuning", rows)


if __name__ == "__main__":
    main()
