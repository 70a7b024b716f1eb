"""A kernel that compiles nothing: a tuner cannot tell it from ``@triton.jit``, and the test says what happens."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from triton.compiler.compiler import max_shared_mem
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "ir_override": None}


class FakeCompiled:
    n_regs, n_spills = 40, 0

    def __init__(self, kernel: FakeKernel, values: dict[str, Any], shared: int) -> None:
        self._kernel = kernel
        self.values = values
        self.metadata = SimpleNamespace(shared=shared, tmem_size=None, num_warps=values["num_warps"])

    def check(self) -> None:
        """What Triton checks before it loads a module."""
        cap = max_shared_mem(0)
        if self.metadata.shared > cap:
            raise OutOfResources(self.metadata.shared, cap, "shared memory")

    def _init_handles(self) -> None:
        self.check()
        self._kernel.loads.append(_described(self.values))
        self._kernel.on_load(self.values)


class FakeKernel(KernelInterface):
    """Wraps a plain function for its name and signature.

    ``on_compile(values)`` may raise, wait, or return the shared bytes; ``on_load`` and ``on_launch`` may raise or write
    to the tensors. ``values``: arguments and options by name.
    """

    def __init__(
        self,
        function: Callable[..., None],
        on_compile: Callable[[Mapping[str, Any]], int | None] = lambda values: None,
        on_launch: Callable[[Mapping[str, Any]], None] = lambda values: None,
        on_load: Callable[[Mapping[str, Any]], None] = lambda values: None,
    ) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.signature = inspect.signature(function)
        self.arg_names = list(self.signature.parameters)
        self.on_compile, self.on_launch, self.on_load = on_compile, on_launch, on_load
        self.compiles: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []
        self.launches: list[dict[str, Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> FakeCompiled:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**bound.arguments, **OPTIONS, **options}
        if warmup:
            self.compiles.append(_described(values))
        compiled = FakeCompiled(self, values, self.on_compile(values) or 0)
        if not warmup:
            compiled.check()
            self.launches.append({**_described(values), "thread": threading.get_ident()})
            self.on_launch(values)
        return compiled

    def bench(self, time_ms: Callable[[Mapping[str, Any]], float]) -> FakeBench:
        return FakeBench(self, time_ms)


class FakeBench:
    """``do_bench`` with chosen times: one launch each, ``time_ms`` of that launch's values is the result."""

    def __init__(self, kernel: FakeKernel, time_ms: Callable[[Mapping[str, Any]], float]) -> None:
        self._kernel, self._time_ms = kernel, time_ms
        self.timed: list[dict[str, Any]] = []

    def __call__(self, run: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
        before = len(self._kernel.launches)
        run()
        me = threading.get_ident()
        mine = [launch for launch in self._kernel.launches[before:] if launch["thread"] == me]
        self.timed.append(mine[-1])
        return [self._time_ms(mine[-1])] * 3


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """No tensor is kept alive by the notes: they hold its shape."""
    described = dict(values)
    for name, value in values.items():
        with suppress(AttributeError):
            described[name] = ("tensor", tuple(value.shape))
    return described
