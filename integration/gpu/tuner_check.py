"""What only a GPU can show of the tuner: buckets, graph capture, threads, the cap, torch.compile, descriptors.

    python integration/gpu/tuner_check.py [--json PATH]

Prints one line a check last and exits 1 if any failed. About two minutes on an H200 with a cold compile cache.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from common import print_table, write_json
from triton import knobs

import smart_autotune
from smart_autotune import settings
from smart_autotune.verdict import Outcome

log = logging.getLogger("tuner_check")


@triton.jit
def _matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[M,N] = a[M,K] @ b[K,N], all row-major."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + inner
        left = tl.load(a + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(
            b + k[:, None] * N + columns[None, :], mask=(k[:, None] < K) & (columns[None, :] < N), other=0.0
        )
        total += tl.dot(left, right)
    tl.store(
        c + rows[:, None] * N + columns[None, :],
        total.to(c.dtype.element_ty),
        mask=(rows[:, None] < M) & (columns[None, :] < N),
    )


MATMUL_CONFIGS = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)
    for bm, bn, bk, warps, stages in [
        (16, 64, 64, 4, 4),
        (32, 64, 64, 4, 4),
        (64, 64, 64, 4, 3),
        (128, 64, 64, 4, 3),
        (64, 128, 64, 4, 4),
        (128, 128, 64, 8, 4),  # 131,072 B on sm_90: over the cap of an sm_120
        (128, 256, 64, 8, 4),  # 196,608 B
        (128, 256, 64, 8, 5),  # 245,760 B: over every cap
    ]
]


def new_matmul() -> Any:
    return smart_autotune.smart_autotune(MATMUL_CONFIGS, ["N", "K"], batch="M")(_matmul)


def operands(m: int, n: int = 1024, k: int = 1024) -> tuple[torch.Tensor, ...]:
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    return a, b, torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)


def multiply(kernel: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    kernel[lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"]))](a, b, c, m, n, k)
    return c


def error_of(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    exact = a.double() @ b.double()
    return float((c.double() - exact).norm() / exact.norm())


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


# ---- the checks: each returns what it measured, or raises ------------------------------------------------------


def batch_sweep_tunes_one_ranking_a_bucket() -> dict[str, Any]:
    kernel = new_matmul()
    sizes = list(range(1, 257))
    random.Random(0).shuffle(sizes)
    begin = time.perf_counter()
    worst = 0.0
    for m in sizes:
        a, b, c = operands(m)
        multiply(kernel, a, b, c)
        worst = max(worst, error_of(a, b, c))
    seconds = time.perf_counter() - begin
    buckets = sorted(record.key.bucket for record in kernel.records)
    check(buckets == [2**i for i in range(9)], f"buckets tuned: {buckets}")
    check(worst < 5e-3, f"error {worst}")
    winners = {record.key.bucket: smart_autotune.verdict.describe(record.winner.config) for record in kernel.records}
    secs = sum(r.compile_secs + r.timing_secs for r in kernel.records)
    return {"buckets": buckets, "worst error": worst, "secs": seconds, "tuning secs": secs, "winners": winners}


def a_cold_key_in_a_capture_is_served_and_replays() -> dict[str, Any]:
    kernel = new_matmul()
    a, b, c = operands(48)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        multiply(kernel, a, b, c)
    check(not kernel.records, "something was tuned inside the capture")
    check(len(kernel.cold_keys()) == 1, f"cold keys: {kernel.cold_keys()}")
    worst = 0.0
    for _ in range(3):
        a.copy_(torch.randn_like(a))  # also: the random generator is not left in capture state
        c.fill_(float("nan"))
        graph.replay()
        worst = max(worst, error_of(a, b, c))
    check(worst < 5e-3, f"replay error {worst}")
    multiply(kernel, a, b, c)
    check(len(kernel.records) == 1 and not kernel.cold_keys(), "not tuned at its next call outside capture")
    a2, b2, c2 = operands(100)  # another bucket, cold, inside a capture: the tuned neighbour serves
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        multiply(kernel, a2, b2, c2)
    check(len(kernel.records) == 1, "a neighbour's bucket was tuned inside the capture")
    return {"replay error": worst, "random after": float(torch.rand(1, device="cuda"))}


def a_new_specialisation_of_a_tuned_key_is_loaded_inside_a_capture() -> dict[str, Any]:
    kernel = smart_autotune.smart_autotune(MATMUL_CONFIGS, ["N"], batch="M")(_matmul)
    multiply(kernel, *operands(32, 1024, 1024))
    a, b, c = operands(32, 1024, 1000)  # K is no longer a multiple of 16: another binary, same key
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(kernel, a, b, c)
    graph.replay()
    worst = error_of(a, b, c)
    check(worst < 5e-3, f"error {worst}")
    check(len(kernel.records) == 1, f"{len(kernel.records)} tunings")
    return {"replay error": worst}


def eight_threads_on_cold_keys() -> dict[str, Any]:
    kernel = new_matmul()
    failures: list[str] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for m in (7, 7, 33 if index % 2 else 5, 7):
                    a, b, c = operands(m)
                    multiply(kernel, a, b, c)
                    torch.cuda.current_stream().synchronize()
                    check(error_of(a, b, c) < 5e-3, "wrong result")
        except Exception:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    check(not failures, "".join(failures))
    check(not any(thread.is_alive() for thread in threads), "a thread hangs")
    buckets = sorted(record.key.bucket for record in kernel.records)
    check(buckets == [8, 64], f"buckets tuned: {buckets}")
    return {"buckets": buckets}


def over_the_simulated_cap_is_dropped_and_never_loaded() -> dict[str, Any]:
    cap = 101_376
    loaded: list[int] = []

    def note(module: Any, function: Any, name: str, group: dict[str, str], digest: str) -> None:
        import json
        import pathlib

        path = next(p for p in group.values() if p.endswith(".json"))
        loaded.append(json.loads(pathlib.Path(path).read_text())["shared"])

    with settings.override(shared_bytes_cap=cap):
        knobs.runtime.kernel_load_start_hook.add(note)
        try:
            fresh = triton.jit(_matmul.fn)  # no binary of it is loaded yet
            kernel = smart_autotune.smart_autotune(MATMUL_CONFIGS, ["N", "K"], batch="M")(fresh)
            a, b, c = operands(128)
            multiply(kernel, a, b, c)
        finally:
            knobs.runtime.kernel_load_start_hook.remove(note)
    record = kernel.records[-1]
    over = [v for v in record.verdicts if v.outcome is Outcome.OVER_SHARED_MEMORY]
    check(len(over) >= 2, f"only {len(over)} over the cap")
    check(all(v.need > cap and v.limit == cap for v in over), "a verdict without its numbers")
    check(bool(loaded) and max(loaded) <= cap, f"loaded: {loaded}")
    check(error_of(a, b, c) < 5e-3, "wrong result")
    print(kernel.explain())
    return {"dropped": len(over), "loaded": len(loaded), "largest loaded": max(loaded), "needs": [v.need for v in over]}


def nothing_fits_is_explained_and_rescued() -> dict[str, Any]:
    huge = [triton.Config({"BM": 128, "BN": 256, "BK": 64}, num_warps=8, num_stages=s) for s in (6, 5)]
    kernel = smart_autotune.smart_autotune(huge, ["N", "K"], batch="M")(_matmul)
    a, b, c = operands(256)
    multiply(kernel, a, b, c)
    served = kernel.best_config.num_stages
    check(error_of(a, b, c) < 5e-3 and served < 5, f"served with {served} stages")
    with settings.override(rescue=False):
        strict = smart_autotune.smart_autotune(huge, ["N", "K"], batch="M")(_matmul)
        try:
            multiply(strict, a, b, c)
        except smart_autotune.NoConfigFits as error:
            text = str(error)
        else:
            raise AssertionError("no error")
    check(not strict.cache, "a loser was cached")
    return {"rescued with stages": served, "error": text}


def torch_compile_takes_the_kernel() -> dict[str, Any]:
    kernel = new_matmul()

    @torch.compile(fullgraph=True)
    def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
        kernel[lambda meta: (triton.cdiv(a.shape[0], meta["BM"]), triton.cdiv(b.shape[1], meta["BN"]))](
            a, b, c, a.shape[0], b.shape[1], a.shape[1]
        )
        return c * 2

    a, b, _ = operands(64, 256, 256)
    result = twice(a, b)
    worst = error_of(a, b, result / 2)
    check(worst < 5e-3, f"error {worst}")
    return {"error": worst}


@triton.jit
def _tiled_copy(source, target, BM: tl.constexpr, BN: tl.constexpr):
    """target = source through host-made tensor descriptors, one [BM, BN] tile a block."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([row, column], source.load([row, column]))


def descriptors_take_each_configs_block_shape() -> dict[str, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    def shape_blocks(arguments: dict[str, Any]) -> None:
        for name in ("source", "target"):
            arguments[name].block_shape = [arguments["BM"], arguments["BN"]]

    configs = [
        triton.Config({"BM": bm, "BN": bn}, num_warps=4, pre_hook=shape_blocks)
        for bm, bn in [(16, 64), (64, 64), (128, 128), (256, 256)]
    ]
    kernel = smart_autotune.smart_autotune(configs, [], batch=None)(_tiled_copy)
    source = torch.randn(1024, 1024, device="cuda", dtype=torch.float32)
    target = torch.full_like(source, float("nan"))
    tensors = [TensorDescriptor.from_tensor(t, [1, 16]) for t in (source, target)]
    kernel[lambda meta: (triton.cdiv(1024, meta["BM"]), triton.cdiv(1024, meta["BN"]))](*tensors)
    check(torch.equal(source, target), "copy differs")
    outcomes = {smart_autotune.verdict.describe(v.config): str(v.outcome) for v in kernel.records[-1].verdicts}
    check(sum(outcome in ("WON", "SLOWER") for outcome in outcomes.values()) >= 3, f"{outcomes}")
    return {"outcomes": outcomes}


def in_place_kernels_are_restored() -> dict[str, Any]:
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128, 256)]
    kernel = smart_autotune.smart_autotune(configs, ["n"], restore_value=["x"])(_double)
    x = torch.randn(1000, device="cuda")
    expected = x * 2
    kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000)
    check(torch.equal(x, expected), "first call wrong")
    return {}


@triton.jit
def _double(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)


def proton_sees_direct_launches() -> dict[str, Any]:
    """Triton's profiler hooks launches; a launch plan must give way to it."""
    import json
    import pathlib
    import tempfile

    import triton.profiler as proton

    kernel = new_matmul()
    tensors = operands(64)
    for _ in range(4):
        multiply(kernel, *tensors)
    with tempfile.TemporaryDirectory() as folder:
        proton.start(f"{folder}/profile", hook="triton")
        for _ in range(5):
            multiply(kernel, *tensors)
        torch.cuda.synchronize()
        proton.finalize()
        text = "".join(path.read_text() for path in pathlib.Path(folder).iterdir())
    json.loads(text)
    check("_matmul" in text, "the profile does not name the kernel")
    check(error_of(*tensors) < 5e-3, "wrong result")
    return {"profile bytes": len(text)}


def threads_that_hold_the_interpreter_are_in_no_timing() -> dict[str, Any]:
    """Candidates are sampled while others compile: what a thread's turn (5 ms) costs the host must not be in it."""
    from smart_autotune.gpu_bench import GpuTimer, Run

    operands_ = operands(64)
    configs = MATMUL_CONFIGS[:5]

    def runs() -> list[Run]:
        def launch(config: triton.Config) -> Callable[[], Any]:
            grid = (triton.cdiv(64, config.kwargs["BM"]), triton.cdiv(1024, config.kwargs["BN"]))
            return lambda: _matmul[grid](*operands_, 64, 1024, 1024, **config.all_kwargs())

        return [Run(launch(config)) for config in configs]

    def medians(busy: int) -> tuple[list[float], list[float], float]:
        """After screening beside ``busy`` threads, and after the decision without them; seconds of both."""
        timer, made, ended = GpuTimer(), runs(), threading.Event()
        threads = [threading.Thread(target=spin, args=(ended,)) for _ in range(busy)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for run in made:
            timer.screen(run)
        screened = [max(run.samples_us, default=0.0) for run in made]
        ended.set()
        for thread in threads:
            thread.join()
        timer.decide(made)
        return screened, [run.median_us for run in made], time.perf_counter() - begin

    def spin(ended: threading.Event) -> None:
        while not ended.is_set():
            sum(range(2000))

    medians(0)  # compiles
    idle = medians(0)
    found: dict[str, Any] = {"idle, us": [round(value, 1) for value in idle[1]], "idle, secs": round(idle[2], 3)}
    worst_kept, worst_median = 0.0, 0.0
    for busy in (1, 3, 6):
        kept, decided, secs = medians(busy)
        worst_kept = max(worst_kept, *(one / two for one, two in zip(kept, idle[1])))
        worst_median = max(worst_median, *(one / two for one, two in zip(decided, idle[1])))
        found[f"beside {busy}, us"], found[f"beside {busy}, secs"] = [round(v, 1) for v in decided], round(secs, 3)
    found |= {"worst sample kept while busy / idle": worst_kept, "worst median / idle": worst_median}
    print_table("timed beside busy threads", [(name, str(value)) for name, value in found.items()])
    check(
        worst_median < 1.5, f"a config that was screened beside busy threads came out {worst_median:.1f} times slower"
    )
    check(worst_kept < 3.0, f"a sample of {worst_kept:.1f} times the idle median was kept")
    return found


def against_stock() -> dict[str, Any]:
    """First tuning and launch cost beside stock's, in one run (for information; launch cost is a later issue)."""
    found: dict[str, Any] = {}
    for name, decorate in (
        ("stock", lambda fn: triton.autotune(MATMUL_CONFIGS[:-1], ["M", "N", "K"])(fn)),
        ("smart", lambda fn: smart_autotune.smart_autotune(MATMUL_CONFIGS[:-1], ["M", "N", "K"])(fn)),
    ):
        kernel = decorate(triton.jit(_matmul.fn))
        a, b, c = operands(512)
        begin = time.perf_counter()
        multiply(kernel, a, b, c)
        torch.cuda.synchronize()
        found[f"{name}: first tuning, compiles warm (s)"] = round(time.perf_counter() - begin, 3)
        grid = (8, 8)
        costs = []
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(200):
                kernel[grid](a, b, c, 512, 1024, 1024)
            costs.append((time.perf_counter() - begin) / 200 * 1e6)
            torch.cuda.synchronize()
        found[f"{name}: launch, median (us)"] = round(sorted(costs)[3], 2)
        found[f"{name}: launch, spread (us)"] = [round(min(costs), 2), round(max(costs), 2)]
    return found


CHECKS: list[Callable[[], dict[str, Any]]] = [
    batch_sweep_tunes_one_ranking_a_bucket,
    a_cold_key_in_a_capture_is_served_and_replays,
    a_new_specialisation_of_a_tuned_key_is_loaded_inside_a_capture,
    eight_threads_on_cold_keys,
    over_the_simulated_cap_is_dropped_and_never_loaded,
    nothing_fits_is_explained_and_rescued,
    torch_compile_takes_the_kernel,
    descriptors_take_each_configs_block_shape,
    in_place_kernels_are_restored,
    proton_sees_direct_launches,
    threads_that_hold_the_interpreter_are_in_no_timing,
    against_stock,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--only", help="a part of the names of the checks to run", default="")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    rows, results = [], {}
    for function in CHECKS:
        if options.only not in function.__name__:
            continue
        begin = time.perf_counter()
        try:
            with settings.override(strict=True):
                found: dict[str, Any] = {"passed": True, **function()}
        except Exception as error:
            traceback.print_exc()
            found = {"passed": False, "failure": f"{type(error).__name__}: {error}"[:2000]}
        found["check secs"] = round(time.perf_counter() - begin, 2)
        results[function.__name__] = found
        rows.append(("ok" if found["passed"] else "FAILED", function.__name__, f"{found['check secs']} s"))
    write_json(options.json, {"checks": results})
    if "against_stock" in results:
        print_table("against stock", [(name, str(value)) for name, value in results["against_stock"].items()])
    print_table("tuner on a GPU", rows)
    return 0 if all(found["passed"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
