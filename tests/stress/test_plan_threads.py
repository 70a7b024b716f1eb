"""Many threads launch by plans while others clear the cache, change settings or add kinds of calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

from smart_autotune import settings, smart_autotune
from support import plan_kernels as kernels
from support.side_by_side import counted, fresh, named_only
from support.stub_driver import StubLauncher

THREADS, ROUNDS = 8, 60


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def tuned(kernel: Any, **options: Any) -> Any:
    """Block 64 wins for an even ``n``, 32 for an odd one."""
    options.setdefault("key", ["n"])
    configs = [triton.Config({"BLOCK": size}, num_warps=warps) for size, warps in ((64, 4), (32, 8))]
    bench = Bench()
    return smart_autotune(configs=configs, do_bench=bench, batch=None, **options)(fresh(kernel))


class Bench:
    """Knows what is launched by what the launcher was given, in this thread."""

    def __call__(self, run: Callable[[], Any], quantiles: Any = None) -> list[float]:
        run()
        block, n = _here.args[-1], next(value for value in _here.args if type(value) is int)
        return [1.0 if block == (32 if n % 2 else 64) else 2.0] * 3


_here = threading.local()


class NotingLauncher(StubLauncher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        _here.args = rest[4:]


def at_once(jobs: list[Callable[[], Any]]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def work(job: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


X = [torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.float16)]
KINDS = [
    lambda kernel, n: kernel[(3,)](X[0], None, None, n),
    lambda kernel, n: kernel[(3,)](X[0], X[1], None, n),
    lambda kernel, n: kernel[(3,)](X[1], None, X[0], n=n, causal=True),
    lambda kernel, n: kernel[lambda meta: (meta["BLOCK"],)](X[0][1:], n=n, shift=2),
]


def launching(kernel: Any, mine: int) -> Callable[[], None]:
    def job() -> None:
        for turn in range(ROUNDS):
            n = 2 + (mine + turn) % 4
            compiled = KINDS[(mine + turn // 2) % len(KINDS)](kernel, n)
            assert compiled.metadata.num_warps == (8 if n % 2 else 4), f"n={n}: another key's config"
            assert _here.args[-1] == (32 if n % 2 else 64)

    return job


@pytest.mark.parametrize("disturbance", ["none", "cache cleared", "settings renewed", "one entry popped"])
def test_threads_with_several_kinds_of_calls_each_get_their_own_config(sm_120, disturbance):
    sm_120.launcher_cls = NotingLauncher
    with named_only(), counted() as full:
        kernel = tuned(kernels.optional)
        done = threading.Event()

        def disturb() -> None:
            while not done.wait(0.002):
                if disturbance == "cache cleared":
                    kernel.cache.clear()
                elif disturbance == "settings renewed":
                    settings.renew()
                elif disturbance == "one entry popped" and kernel.cache:
                    kernel.cache.pop(next(iter(list(kernel.cache)), None), None)

        other = threading.Thread(target=disturb, daemon=True)
        other.start()
        try:
            at_once([launching(kernel, mine) for mine in range(THREADS)])
        finally:
            done.set()
            other.join(60)
        calls = THREADS * ROUNDS
        assert full.of(kernel) < calls or disturbance != "none"
        for _ in range(3):
            KINDS[0](kernel, 5)
        before = full.of(kernel)
        assert KINDS[0](kernel, 5).metadata.num_warps == 8
        assert full.of(kernel) == before, "direct launches went on"
    assert kernel._engine.plans._broken is False


def test_a_cache_cleared_by_another_thread_is_empty_of_plans_at_once(sm_120):
    sm_120.launcher_cls = NotingLauncher
    with named_only(), counted() as full:
        kernel = tuned(kernels.optional)
        for _ in range(3):
            KINDS[0](kernel, 4)
        for _ in range(20):
            clearing = threading.Thread(target=kernel.cache.clear)
            clearing.start()
            clearing.join()
            before, record = full.of(kernel), kernel.records[-1]
            for _ in range(3):
                KINDS[0](kernel, 4)
            assert full.of(kernel) > before and kernel.records[-1] is not record


def test_plans_learned_by_many_threads_at_once_are_all_kept(sm_120):
    sm_120.launcher_cls = NotingLauncher
    with named_only(), counted() as full:
        kernel = tuned(kernels.constants)
        modes = list(range(2, 2 + THREADS))
        at_once([lambda mode=mode: [kernel[(3,)](X[0], 4, mode) for _ in range(6)] for mode in modes])
        before = full.of(kernel)
        for mode in modes:
            kernel[(3,)](X[0], 4, mode)
        assert full.of(kernel) == before
