"""Stock's tuner and ours, given the same calls under the stub driver; what reaches the launcher is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.compiler.compiler import CompiledKernel, make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from smart_autotune import settings, smart_autotune
from smart_autotune.engine import Engine
from smart_autotune.patches import triton_3_6_0 as seam
from support.stub_driver import Launch, StubDriver

STOCK_RUN = Autotuner.run
CONFIGS = {"BLOCK": [triton.Config({"BLOCK": size}) for size in (64, 128, 32)]}


def fresh(kernel: JITFunction) -> JITFunction:
    """The same kernel without what it compiled so far."""
    return JITFunction(
        kernel.fn,
        do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment,
        debug=kernel.debug,
        launch_metadata=kernel.launch_metadata,
    )


@contextmanager
def named_only() -> Iterator[None]:
    """Compiling only names what would be compiled (source, types, constants, attributes, options): thousands of
    specialisations in seconds. A kernel of another driver, or made outside, is not to be used within."""

    def compile(src: Any, target: Any, options: Mapping[str, Any], **_: Any) -> CompiledKernel:
        parsed = make_backend(target).parse_options(dict(options))
        kernel = object.__new__(CompiledKernel)
        kernel.src = src
        kernel.hash = hashlib.sha256(f"{src.hash()}-{parsed.hash()}-{target}".encode()).hexdigest()
        kernel.name = kernel.hash[:8]
        kernel.metadata = SimpleNamespace(
            name=kernel.name, hash=kernel.hash, shared=0, tmem_size=None, num_warps=parsed.num_warps,
            num_ctas=parsed.num_ctas, global_scratch_size=0, profile_scratch_size=0,
        )  # fmt: skip
        kernel.packed_metadata = (parsed.num_warps, parsed.num_ctas, 0)
        kernel.kernel, kernel.metadata_group, kernel.asm = b"\x7fELF", {}, {}
        kernel.module = kernel.function = kernel._run = None
        return kernel

    with mock.patch("triton.compiler.compile", compile):
        yield


@contextmanager
def tensors_of_a_gpu() -> Iterator[None]:
    """CPU tensors say that they are a GPU's, for the scope."""
    with ExitStack() as scope:
        scope.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True, create=True))
        scope.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False, create=True))
        yield


class FullPath:
    """Counts, for each engine, the calls that came down the full path."""

    def __init__(self) -> None:
        self.calls: dict[Engine, int] = {}

    def of(self, tuner: Any) -> int:
        return self.calls.get(engine_of(tuner), 0)


@contextmanager
def counted() -> Iterator[FullPath]:
    counts, run = FullPath(), Engine.run

    def counting(self: Engine, *args: Any) -> Any:
        counts.calls[self] = counts.calls.get(self, 0) + 1
        return run(self, *args)

    with mock.patch.object(Engine, "run", counting):
        yield counts


def engine_of(tuner: Any) -> Any:
    slot = tuner.__dict__.get(seam._SLOT)
    return getattr(tuner, "_engine", None) or getattr(slot, "engine", None)


@contextmanager
def patched() -> Iterator[None]:
    assert seam.apply() is None
    try:
        yield
    finally:
        seam.revert()


def scripted(driver: StubDriver, names: Sequence[str], time_ms: Callable[[Mapping[str, Any]], float]) -> Any:
    """``do_bench`` whose times follow the launched arguments."""

    def bench(run: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
        run()
        time = time_ms(dict(zip(names, driver.launches[-1].args)))
        return [time, time * 0.999, time * 1.001]

    return bench


class Trio:
    """One kernel three times: under stock's tuner, under our decorator, under stock's tuner with our patch."""

    def __init__(
        self,
        driver: StubDriver,
        kernel: JITFunction,
        key: Sequence[str] = (),
        configs: Sequence[triton.Config] = tuple(CONFIGS["BLOCK"]),
        time_ms: Callable[[Mapping[str, Any]], float] = lambda values: float(values.get("BLOCK", 1)),
        **ours: Any,
    ) -> None:
        self.driver = driver
        options = {"key": list(key), "do_bench": scripted(driver, kernel.arg_names, time_ms)}
        self.stock = triton.autotune(configs=list(configs), **options)(fresh(kernel))
        self.decorated = smart_autotune(configs=list(configs), **options, **ours)(fresh(kernel))
        self.patched = triton.autotune(configs=list(configs), **options)(fresh(kernel))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any) -> Outcome:
        """The call through all three; AssertionError where ours are not what stock is."""
        stock = self._outcome(lambda: STOCK_RUN(self.stock, *args, grid=grid, warmup=False, **kwargs))
        stock.check(self._outcome(lambda: self.decorated[grid](*args, **kwargs)), "decorated")
        stock.check(self._outcome(lambda: self.patched.run(*args, grid=grid, warmup=False, **kwargs)), "patched")
        if stock.error is None:
            for ours in (self.decorated, self.patched):
                assert str(ours.best_config) == str(self.stock.best_config)
        return stock

    def _outcome(self, call: Callable[[], Any]) -> Outcome:
        del self.driver.launches[:]
        try:
            kernel = call()
        except Exception as error:
            return Outcome(error=error)
        return Outcome(kernel, self.driver.launches[-1])


class Outcome:
    def __init__(self, kernel: Any = None, launch: Launch | None = None, error: Exception | None = None) -> None:
        self.kernel, self.launch, self.error, self.path = kernel, launch, error, ""

    def check(self, ours: Outcome, which: str) -> None:
        if self.error is not None or ours.error is not None:
            same = isinstance(ours.error, type(self.error)) and self.error is not None
            assert same, f"{which}: stock {self.error!r}, ours {ours.error!r}"
            return
        assert self.launch is not None and ours.launch is not None
        assert ours.kernel.hash == self.kernel.hash, f"{which}: another kernel"
        assert ours.launch.metadata.hash == self.launch.metadata.hash == self.kernel.hash, f"{which}: launched another"
        assert ours.launch.grid == self.launch.grid, f"{which}: grid"
        theirs, these = self.launch.args, ours.launch.args
        assert len(these) == len(theirs), f"{which}: {these} for {theirs}"
        assert all(map(same_argument, theirs, these)), f"{which}: {these} for {theirs}"


def same_argument(theirs: Any, ours: Any) -> bool:
    """A pointer may come as the tensor or as its address; everything else has the same type and value."""
    if isinstance(theirs, torch.Tensor):
        return ours is theirs or (type(ours) is int and ours == theirs.data_ptr())
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


class Bed:
    """A trio and which path its calls took."""

    def __init__(self, driver: StubDriver, full: FullPath) -> None:
        self.driver, self.full = driver, full

    def made(self, kernel: JITFunction, **options: Any) -> Bed:
        self.trio = Trio(self.driver, kernel, **options)
        return self

    def run(self, *args: Any, grid: Any = (3,), **kwargs: Any) -> Outcome:
        """The call through all three, compared; ``path`` of the outcome is what both of ours took."""
        ours = (self.trio.decorated, self.trio.patched)
        before = [self.full.of(tuner) for tuner in ours]
        outcome = self.trio.run(args, kwargs, grid)
        took = {self.full.of(tuner) - count for tuner, count in zip(ours, before)}
        outcome.path = {frozenset({0}): "direct", frozenset({1}): "full"}.get(frozenset(took), f"mixed {took}")
        return outcome

    def path(self, *args: Any, **kwargs: Any) -> str:
        return self.run(*args, **kwargs).path

    def warm(self, *args: Any, **kwargs: Any) -> Outcome:
        """The call until it is direct: tuned, learned, direct."""
        for _ in range(3):
            outcome = self.run(*args, **kwargs)
        assert outcome.path == "direct", outcome.error
        return outcome

    @property
    def tuners(self) -> tuple[Any, Any, Any]:
        return self.trio.stock, self.trio.decorated, self.trio.patched


@contextmanager
def bed(driver: StubDriver) -> Iterator[Bed]:
    with named_only(), patched(), counted() as full, settings.override(strict=True):
        yield Bed(driver, full)
