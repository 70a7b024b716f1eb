"""What one launch costs on the host: plain ``@triton.jit``, stock ``@triton.autotune``, ours decorated, ours patched.

    python integration/benchmarks/launch_cost.py [--json PATH]       on a GPU: real launches of an empty-handed kernel
    python integration/benchmarks/launch_cost.py --cpu [--json PATH]  no GPU: the Python part alone, a launcher that
                                                                      does nothing, real compiled kernels

Medians and spread over interleaved rounds in one run; a row's ratios are the figures to look at.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "integration" / "gpu"), str(ROOT / "tests")]

from common import print_table, write_json  # noqa: E402

import smart_autotune  # noqa: E402

ROUNDS, CALLS = 15, 400
CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 128)]
SOURCE = """
import triton
import triton.language as tl

@triton.jit
def kernel({parameters}BLOCK: tl.constexpr):
    {body}
"""


def new_kernel(arguments: int) -> Any:
    """A kernel with ``arguments`` runtime arguments: half pointers, half ints, the last an int ``n``."""
    names = [f"p{i}" if i < (arguments + 1) // 2 else f"n{i}" for i in range(arguments)]
    body = f"tl.store({names[0]} + tl.program_id(0), {names[-1]}.to(tl.float32))" if names else "pass"
    parameters = "".join(f"{name}, " for name in names)
    path = pathlib.Path(tempfile.mkdtemp()) / f"kernel_{arguments}.py"
    path.write_text(SOURCE.format(parameters=parameters, body=body))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def values_for(arguments: int, device: str) -> list[Any]:
    half = (arguments + 1) // 2
    return [torch.empty(64, device=device) if i < half else 7 + 3 * i for i in range(arguments)]


def variants(arguments: int, callable_grid: bool, device: str) -> dict[str, Callable[[], Any]]:
    """The same launch by each kind of kernel."""
    grid = (lambda meta: (4,)) if callable_grid else (4,)
    values = values_for(arguments, device)
    keys = [f"n{arguments - 1}"] if arguments > 1 else []
    plain = new_kernel(arguments)
    found: dict[str, Callable[[], Any]] = {"plain": lambda: plain[grid](*values, BLOCK=64)}
    tuned = {
        "stock": triton.autotune(CONFIGS, keys)(new_kernel(arguments)),
        "decorated": smart_autotune.smart_autotune(CONFIGS, keys)(new_kernel(arguments)),
        "patched": triton.autotune(CONFIGS, keys)(new_kernel(arguments)),
    }
    for name, kernel in tuned.items():
        found[name] = lambda kernel=kernel: kernel[grid](*values)
    return found


def switch(name: str) -> None:
    """The class patch is on for the patched kernel's rounds alone."""
    from smart_autotune.patches import triton_3_6_0 as patch

    conflict = patch.apply() if name == "patched" else patch.revert()
    assert conflict is None, conflict


def microseconds(functions: dict[str, Callable[[], Any]], synchronize: Callable[[], None]) -> dict[str, list[float]]:
    """Each function's cost in every round; rounds are interleaved so that drift hits all alike."""
    costs: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(ROUNDS + 1):
        for name, function in functions.items():
            switch(name)
            for _ in range(20):
                function()
            synchronize()
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                function()
            if round_ > 0:
                costs[name].append((time.perf_counter_ns() - begin) / CALLS / 1e3)
    switch("")
    return costs


def measure(device: str, synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    rows = []
    for arguments in (0, 5, 25):
        for callable_grid in (False, True):
            costs = microseconds(variants(arguments, callable_grid, device), synchronize)
            medians = {name: statistics.median(values) for name, values in costs.items()}
            row: dict[str, Any] = {
                "arguments": arguments,
                "grid": "function" if callable_grid else "tuple",
                "us": {name: round(value, 2) for name, value in medians.items()},
                "spread_us": {name: [round(min(v), 2), round(max(v), 2)] for name, v in costs.items()},
            }
            for ours in ("decorated", "patched"):
                for other in ("plain", "stock"):
                    row[f"{ours} / {other}"] = round(medians[ours] / medians[other], 3)
            rows.append(row)
    return rows


def on_cpu() -> list[dict[str, Any]]:
    from support.stub_driver import StubDriver, active

    class Nothing:
        def __init__(self, *_: Any) -> None: ...

        def __call__(self, *_: Any) -> None: ...

    driver = StubDriver(90)
    driver.launcher_cls = Nothing
    with active(driver):
        return measure("cpu", lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="no GPU: time the Python part alone")
    parser.add_argument("--json", help="write the results there")
    options = parser.parse_args()
    rows = on_cpu() if options.cpu else measure("cuda", torch.cuda.synchronize)
    if not options.cpu:
        write_json(options.json, {"rows": rows, "rounds": ROUNDS, "calls a round": CALLS})
    ratios = ("decorated / plain", "patched / plain", "decorated / stock", "patched / stock")
    names = ("plain", "stock", "decorated", "patched")
    table = [("args", "grid", *(f"{name} us" for name in names), *ratios)]
    for row in rows:
        table.append(
            (
                str(row["arguments"]),
                row["grid"],
                *(
                    f"{row['us'][name]:.2f} [{row['spread_us'][name][0]:.1f} {row['spread_us'][name][1]:.1f}]"
                    for name in names
                ),
                *(f"{row[ratio]:.2f}" for ratio in ratios),
            )
        )
    print_table("launch cost", table)


if __name__ == "__main__":
    main()
