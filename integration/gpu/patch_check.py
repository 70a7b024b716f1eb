"""The patch on a GPU: stock-decorated kernels of two modules, one imported before enabling and one after.

    python integration/gpu/patch_check.py [--json PATH]                       enabled in the middle of the process
    smart-autotune run -- python integration/gpu/patch_check.py [--json PATH]  by SMART_AUTOTUNE=1, from the start

Needs the package installed (or ``patches`` on the path as ``smart_autotune.patches``). Exits 1 if a check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
import tempfile
from typing import Any

import torch
import triton
from common import print_table, write_json

import smart_autotune

MODULE = """
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (4, 8)]

@triton.autotune(CONFIGS, key=["columns"])
@triton.jit
def softmax(x, y, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        o = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * columns + o, mask=o < columns, other=float("-inf"))
        new = tl.maximum(peak, tl.max(v, axis=0))
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(v - new), axis=0)
        peak = new
    for start in range(0, WIDTH, BLOCK):
        o = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * columns + o, mask=o < columns, other=float("-inf"))
        tl.store(y + row * columns + o, tl.exp(v - peak) / total, mask=o < columns)

@triton.autotune(CONFIGS, key=["columns"])
@triton.jit
def scale(x, y, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, WIDTH, BLOCK):
        o = start + tl.arange(0, BLOCK)
        tl.store(y + row * columns + o, tl.load(x + row * columns + o, mask=o < columns) * 3, mask=o < columns)
"""
COLUMNS, WIDTH = 3000, 4096


def load(name: str, folder: str) -> Any:
    path = pathlib.Path(folder) / f"{name}.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def call(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, float("nan"))
    kernel[(x.shape[0],)](x, y, COLUMNS, WIDTH)
    return y


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    by_variable = os.environ.get("SMART_AUTOTUNE") == "1"
    check(smart_autotune.status().enabled is by_variable, "the variable decides whether it is on from the start")
    signature = str(__import__("inspect").signature(triton.autotune))
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        before = load("imported_before", folder)
        status = smart_autotune.enable()
        check(status.enabled and not status.conflicts, str(status))
        after = load("imported_after", folder)
        check(str(__import__("inspect").signature(triton.autotune)) == signature, "the signature changed")
        x = torch.randn(64, COLUMNS, device="cuda")
        for module in (before, after):
            y = call(module.softmax, x)
            check(torch.allclose(y, torch.softmax(x, 1), atol=1e-6), "softmax is wrong")
            check(type(module.softmax) is triton.runtime.autotuner.Autotuner, "not stock's class any more")
        tuned = [r for r in smart_autotune.records() if r.kernel == "softmax"]
        check(len(tuned) == 2, f"{len(tuned)} records")
        status = smart_autotune.status()
        expected = (0, 4) if by_variable else (2, 2)
        check((status.tuners_before, status.tuners_after) == expected, str(status))
        rows += [("tuned", f"{len(tuned)} kernels of two modules, one imported before enable() and one after")]

        graph = torch.cuda.CUDAGraph()  # cold inside the capture: served, not tuned
        y = torch.full_like(x, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            after.scale[(64,)](x, y, COLUMNS, WIDTH)
        x.copy_(torch.randn_like(x))
        graph.replay()
        check(torch.equal(y, x * 3), "replay is wrong")
        check(len(smart_autotune.cold_keys()) == 1, "the cold key is not listed")
        rows.append(("captured", "a cold stock kernel inside torch.cuda.graph replays right; 1 cold key"))

        ours = call(before.softmax, x)
        winner = before.softmax.best_config
        smart_autotune.disable()
        back = triton.runtime.autotuner.Autotuner.run
        check(back.__code__.co_filename == triton.runtime.autotuner.__file__, "stock's method is not back")
        stock = triton.autotune([winner], key=["columns"])(before.softmax.fn)
        check(torch.equal(call(stock, x), ours), "not bit-equal to stock with the same winner")
        check(torch.allclose(call(before.softmax, x), torch.softmax(x, 1), atol=1e-6), "stock after disable is wrong")
        check(not smart_autotune.status().enabled, "still on")
        rows.append(("disabled", "stock's method is back; bit-equal to stock with the same winner"))
    turned_on = "SMART_AUTOTUNE=1" if by_variable else "enable()"
    write_json(options.json, {"turned on by": turned_on, "checks": dict(rows), "status while on": str(status)})
    print(status)
    print_table("patch on a GPU", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
