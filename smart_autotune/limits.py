"""What one thread block may use on a device."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler.compiler import max_shared_mem

from smart_autotune import settings

TENSOR_MEMORY_COLUMNS = 512  # Blackwell data-center parts; Triton 3.6.0 checks the same constant at load
THREADS_PER_BLOCK = 1024  # every CUDA compute capability ("Technical Specifications", CUDA programming guide)

# Opt-in shared memory per block in bytes (CUDA programming guide, "Maximum amount of shared memory per thread block").
SHARED_BYTES_BY_ARCH = {
    "sm_70": 98_304,
    "sm_75": 65_536,
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_87": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
    "sm_121": 101_376,
}


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of one block on one device model.

    ``shared_bytes``: opt-in shared memory, in bytes. ``tensor_columns``: tensor memory, in columns.
    ``threads``: threads. ``what_if``: the shared-memory cap was lowered by ``SMART_AUTOTUNE_SHARED_BYTES_CAP``,
    so the device itself would accept more than ``shared_bytes``.
    """

    arch: str
    shared_bytes: int
    tensor_columns: int = TENSOR_MEMORY_COLUMNS
    threads: int = THREADS_PER_BLOCK
    warp_size: int = 32
    multiprocessors: int = 0
    what_if: bool = False


UNKNOWN = DeviceLimits("unknown device", shared_bytes=1 << 62, tensor_columns=1 << 62, threads=1 << 62)


def arch_name(arch: object) -> str:
    """Triton's target arch (``120``, ``"gfx942"``) as a name (``"sm_120"``, ``"gfx942"``)."""
    return f"sm_{arch}" if isinstance(arch, int) else str(arch)


def of_arch(arch: str) -> DeviceLimits:
    """Limits of a CUDA arch name such as ``"sm_120"``; no driver is touched. ValueError lists the known ones."""
    try:
        return _lowered(DeviceLimits(arch, SHARED_BYTES_BY_ARCH[arch]))
    except KeyError:
        known = ", ".join(SHARED_BYTES_BY_ARCH)
        near = difflib.get_close_matches(arch, SHARED_BYTES_BY_ARCH, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"unknown arch {arch!r}{hint}; known: {known}") from None


_of_device: dict[tuple[int, int], tuple[Any, DeviceLimits]] = {}


def of_device(driver: Any, device: int) -> DeviceLimits:
    """Limits of CUDA device ``device``, asked from Triton's active ``driver`` once and kept."""
    asked, found = _of_device.get((id(driver), device), (None, UNKNOWN))
    if asked is not driver:
        target = driver.get_current_target()
        shared_bytes, multiprocessors = _shared_bytes_and_multiprocessors(driver, device)
        found = DeviceLimits(
            arch=arch_name(target.arch),
            shared_bytes=shared_bytes,
            warp_size=target.warp_size,
            multiprocessors=multiprocessors,
        )
        _of_device[(id(driver), device)] = (driver, found)
    return _lowered(found)


def _shared_bytes_and_multiprocessors(driver: Any, device: int) -> tuple[int, int]:
    """From what Triton's check at load and torch keep anyway, where it is Triton's own CUDA driver.

    Its ``get_device_properties`` reads clock rates too, for which the device itself is asked: slow.
    """
    if isinstance(driver, CudaDriver) and driver is triton.runtime.driver.active:
        import torch

        return max_shared_mem(device), torch.cuda.get_device_properties(device).multi_processor_count
    properties = driver.utils.get_device_properties(device)
    return properties["max_shared_mem"], properties.get("multiprocessor_count", 0)


def _lowered(limits: DeviceLimits) -> DeviceLimits:
    cap = settings.current().shared_bytes_cap
    if cap and cap < limits.shared_bytes:
        return replace(limits, shared_bytes=cap, what_if=True)
    return limits
