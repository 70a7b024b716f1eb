"""What a restart costs: a process's first call of a tuned kernel beside its first call of a plain one, stores warm.

    python integration/benchmarks/restart.py [--json PATH]

Each figure is the median over fresh child processes, which first set up CUDA and launch another kernel. Launches are
counted by Triton's launch hook in children of their own, since a hook changes what a launch costs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "integration" / "gpu"), str(ROOT / "integration" / "benchmarks")]

REPEATS = 5


def child(kind: str, count: bool) -> None:
    import torch
    import triton
    from triton import knobs
    from tuner_check import _double
    from tuning_time import CONFIGS, _matmul, fresh, launch, operands

    x = torch.randn(64, device="cuda")
    _double[(1,)](x, 64, BLOCK=64)
    tensors = operands(512)
    kernel = fresh("smart", CONFIGS) if kind == "smart" else None
    launches: list[str] = []
    if count:
        knobs.runtime.launch_enter_hook.add(lambda metadata: launches.append("launch"))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if kernel is not None:
        launch(kernel, tensors)
    else:
        a, b, c = tensors
        config = next(c for c in CONFIGS if c.kwargs == json.loads(os.environ["BEST_KWARGS"]))
        grid = (triton.cdiv(512, config.kwargs["BM"]), triton.cdiv(4096, config.kwargs["BN"]))
        _matmul[grid](a, b, c, 512, 4096, 4096, **config.all_kwargs())
    torch.cuda.synchronize()
    secs = time.perf_counter() - begin
    found = {"secs": secs, "launches": len(launches)}
    if kernel is not None:
        found["kwargs"] = kernel.best_config.kwargs
        found["served_by"] = kernel.records[-1].served_by
        found["compiled"] = sum(len(cache[0]) for cache in kernel.fn.device_caches.values())
    print(json.dumps(found))


def run(environment: dict[str, str], kind: str, count: bool = False) -> dict[str, object]:
    command = [sys.executable, __file__, "--child", kind, *(["--count"] if count else [])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--child", choices=("smart", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.count)
        return
    from common import print_table, write_json

    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "SMART_AUTOTUNE_CACHE_DIR": f"{folder}/smart",
            "SMART_AUTOTUNE_STRICT": "1",
        }
        first = run(environment, "smart")
        environment["BEST_KWARGS"] = json.dumps(first["kwargs"])
        rounds: dict[str, list[float]] = {"plain": [], "smart": []}
        for _ in range(REPEATS):
            for kind, secs in rounds.items():
                secs.append(float(str(run(environment, kind)["secs"])))
        counted = run(environment, "smart", count=True)
    medians = {kind: statistics.median(secs) for kind, secs in rounds.items()}
    results = {
        "first process, s": first["secs"],
        "second process, s": {
            kind: [round(s, 4) for s in (min(v), medians[kind], max(v))] for kind, v in rounds.items()
        },
        "smart / plain": round(medians["smart"] / medians["plain"], 3),
        "second process": {name: counted[name] for name in ("served_by", "launches", "compiled")},
    }
    write_json(options.json, results)
    print_table("restart", [(name, str(value)) for name, value in results.items()])


if __name__ == "__main__":
    main()
