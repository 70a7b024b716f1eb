"""A process of its own: MiniMax-M3's decode indexer of the installed SGLang, called at several batch sizes.

The kernels of its score, 36 configs each, are left out: what is launched after them does not depend on their result.
Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
os.environ["SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX"] = "0"  # the top-k in Triton, not in CUDA

import sglang
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

import smart_autotune

sys.path.append(str(Path(__file__).parents[1]))
from support.stub_driver import ScriptedBench, StubDriver, active

NEW_PLACE = "kernels.ops.attention.minimax_sparse"
OLD_PLACE = "srt.layers.attention.minimax_sparse_ops"
PLACE = NEW_PLACE if sglang.__version__ >= "0.5.16" else OLD_PLACE
decode = importlib.import_module(f"sglang.{PLACE}.decode.flash_with_topk_idx")

HEADS, HEAD_DIM, SLOTS = 4, 64, 512


class NotLaunched:
    def __getitem__(self, grid: object) -> NotLaunched:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None


decode._decode_score_attn_kernel = NotLaunched()


def indexed(batch: int) -> None:
    cache = torch.zeros(SLOTS, 1, HEAD_DIM, dtype=torch.bfloat16)
    decode.flash_decode_with_topk_idx(
        torch.zeros(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16), None, cache, cache,
        torch.zeros(batch, 4096, dtype=torch.int32), torch.full((batch,), 2000, dtype=torch.int32), 4096,
        torch.zeros(batch, dtype=torch.int32), block_size=64, topk=16, init_blocks=1, local_blocks=1,
    )  # fmt: skip


def main() -> None:
    driver = StubDriver(90)
    driver.bench = ScriptedBench(driver, lambda launch: launch.metadata.num_warps)
    with active(driver):
        for batch in map(int, sys.argv[1:]):
            indexed(batch)
    records = [{"kernel": r.kernel, "batch": r.batch, "configs": len(r.verdicts)} for r in smart_autotune.records()]
    print(json.dumps({"enabled": smart_autotune.status().enabled, "records": records}))


main()
