"""Two ranks on two GPUs, a real NCCL group: the same winners, no hang, also where one rank never meets a key.

    python integration/gpu/ranks_check.py [--json PATH]      needs two GPUs

Each rank tunes the same keys in another order; rank 1 never meets the last one. Without sharing the ranks tune each
for themselves: how often they disagree then is printed beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import print_table, write_json

SIZES = (1, 2, 4, 16, 64, 256, 1024)


def rank_main(rank: int, share: str, port: int, results: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        SMART_AUTOTUNE_SHARE=share,
        SMART_AUTOTUNE_CACHE="0",
        SMART_AUTOTUNE_STRICT="1",
        SMART_AUTOTUNE_WAIT_SECS="60",
    )
    from tuner_check import multiply, new_matmul, operands

    from smart_autotune.verdict import describe

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1, device="cuda"))
    kernel = new_matmul()
    order = SIZES if rank == 0 else tuple(reversed(SIZES[:-1]))
    begin = time.perf_counter()
    for size in order:
        multiply(kernel, *operands(size))
    torch.cuda.synchronize()
    secs = time.perf_counter() - begin
    found = {record.key.bucket: (describe(record.winner.config), record.served_by) for record in kernel.records}
    dist.barrier()
    dist.destroy_process_group()
    results[rank] = {"secs": round(secs, 2), "winners": found, "cold": len(kernel.cold_keys())}


def run(share: str, port: int) -> dict[int, Any]:
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(rank_main, args=(share, port, results), nprocs=2, join=True)
        return dict(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    shared, alone = run("ranks", 29511), run("off", 29512)
    common = SIZES[:-1]
    rows, ok = [("bucket", "rank 0", "rank 1", "served by", "without sharing")], True
    disagreed = 0
    for size in common:
        zero, one = (shared[rank]["winners"].get(size, ("none", "none")) for rank in (0, 1))
        apart = alone[0]["winners"][size][0] != alone[1]["winners"][size][0]
        disagreed += apart
        ok &= zero[0] == one[0] != "none" and sorted((zero[1], one[1])) == ["another rank", "tuned"]
        rows.append((str(size), zero[0], one[0], f"{zero[1]} / {one[1]}", "disagree" if apart else "agree"))
    ok &= shared[0]["cold"] == shared[1]["cold"] == 0 and len(shared[0]["winners"]) == len(SIZES)
    write_json(options.json, {"shared": shared, "alone": alone, "disagreed alone": disagreed, "passed": ok})
    print_table("two ranks", rows)
    print(f"secs: shared {shared[0]['secs']} / {shared[1]['secs']}, alone {alone[0]['secs']} / {alone[1]['secs']}")
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
