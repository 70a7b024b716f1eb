"""A driver for a machine without a GPU: it says which device this is, and notes launches instead of making them.

Compiled numbers are never made up: Triton compiles for real; only loading, launching and timing are stood in for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.compiler.compiler import max_shared_mem

from smart_autotune import capture, limits

SHARED_BYTES = limits.SHARED_BYTES_BY_ARCH


class Launch:
    """One launch that a device would have got: the compiled kernel's metadata, grid and runtime arguments."""

    def __init__(self, metadata: Any, grid: tuple[int, ...], function: str, args: tuple[Any, ...]) -> None:
        self.metadata = metadata
        self.grid = grid
        self.function = function
        self.args = args
        self.thread = threading.get_ident()


class StubUtils:
    def __init__(self, driver: StubDriver) -> None:
        self._driver = driver

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._driver.shared_bytes,
            "multiprocessor_count": 188,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def unload_module(self, module: str) -> None:
        """Triton from 3.8.0 on gives modules back."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        assert isinstance(binary, bytes) and binary[:4] == b"\x7fELF"
        self._driver.loaded.append((name, shared))
        return ("module", f"function {name}", 40, 0, self._driver.threads_of(name))


class StubLauncher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self._metadata = metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        driver = triton.runtime.driver.active
        _packed, _launch_metadata, enter, leave, *args = rest
        del enter, leave
        driver.launches.append(Launch(self._metadata, (x, y, z), function, tuple(args)))


class StubDriver:
    """``arch``: the CUDA arch to compile for; ``bench``: the benchmark function handed to tuners."""

    def __init__(
        self, arch: int = 120, shared_bytes: int | None = None, bench: Callable[..., Any] | None = None
    ) -> None:
        self.arch = arch
        self.shared_bytes = shared_bytes or SHARED_BYTES[f"sm_{arch}"]
        self.bench = bench or self.launch_once
        self.utils = StubUtils(self)
        self.launcher_cls = StubLauncher
        self.launches: list[Launch] = []
        self.loaded: list[tuple[str, int]] = []
        self.device = 0
        self.threads_of: Callable[[str], int] = lambda name: 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, device: int) -> None:
        assert device == self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.bench(*args, **kwargs)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return str(ty_to_cpp(ty))

    @staticmethod
    def launch_once(run: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
        run()
        return [1.0, 1.0, 1.0]


class ScriptedBench:
    """A benchmark whose times are chosen: ``times_ms`` maps the launched kernel's (num_warps, num_stages) or any
    function of the launch to milliseconds. The candidate is launched once through the stub."""

    def __init__(self, driver: StubDriver, time_ms: Callable[[Launch], float]) -> None:
        self._driver = driver
        self._time_ms = time_ms
        self.timed: list[Launch] = []

    def __call__(self, run: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
        me = threading.get_ident()
        before = len(self._driver.launches)
        run()
        mine = [launch for launch in self._driver.launches[before:] if launch.thread == me]
        self.timed.append(mine[-1])
        time = self._time_ms(mine[-1])
        return [time, time * 0.99, time * 1.01]


@contextmanager
def active(driver: StubDriver) -> Iterator[StubDriver]:
    """Makes ``driver`` Triton's active driver for the scope. Use kernels that no other driver compiled."""
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    _forget_devices()
    try:
        yield driver
    finally:
        config._active = before
        _forget_devices()


def _forget_devices() -> None:
    """Triton and we ask a device for its limits once a process; here device 0 is another one in each test."""
    max_shared_mem.cache_clear()
    limits._of_device.clear()


@contextmanager
def capturing() -> Iterator[None]:
    """The current stream says that it is being captured, for the scope."""
    before = capture.is_capturing
    capture.is_capturing = lambda: True
    try:
        yield
    finally:
        capture.is_capturing = before
