"""Registers and spills of a compiled kernel, read off its binary: no driver, no load."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_ASSEMBLED = re.compile(r"Function properties for (\S+)\s+(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
_LOCAL_ARRAY = re.compile(r"\.local \.align \d+ \.b8\s+\w+\[(\d+)\]")


class Resources(NamedTuple):
    """``registers`` of a thread; ``spill_bytes``: the local memory of a thread that registers spill into."""

    registers: int
    spill_bytes: int


def of(compiled: Any) -> Resources | None:
    """Resources of a ``CompiledKernel`` built for an NVIDIA target; None when the tools cannot say."""
    cubin, ptx = compiled.asm.get("cubin"), compiled.asm.get("ptx", "")
    if not cubin:
        return None
    frame = read_binary(cubin, compiled.metadata.name) or read_assembler(
        ptx, compiled.metadata.name, compiled.metadata.target.arch
    )
    if frame is None:
        return None
    # A stack frame also holds the kernel's own local arrays (the arguments of a device assert, say): not spills.
    own_arrays = sum(int(size) for size in _LOCAL_ARRAY.findall(ptx))
    return frame._replace(spill_bytes=max(0, frame.spill_bytes - own_arrays))


@functools.lru_cache(maxsize=4096)
def read_binary(cubin: bytes, name: str) -> Resources | None:
    """Registers and stack frame as the bundled ``cuobjdump`` reads them (milliseconds)."""
    with tempfile.TemporaryDirectory(prefix="smart-autotune-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = _output(triton.knobs.nvidia.cuobjdump, "-res-usage", str(path))
    for found in _USAGE.finditer(text):
        if found[1] == name:
            return Resources(int(found[2]), int(found[3]) + int(found[4]))
    return None


@functools.lru_cache(maxsize=4096)
def read_assembler(ptx: str, name: str, arch: int) -> Resources | None:
    """The same from assembling again with the bundled ``ptxas`` (up to seconds, for a kernel that spills a lot)."""
    # The pair of tools and the target name are Triton 3.6's own choice for an arch.
    nvidia = triton.knobs.nvidia
    target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory(prefix="smart-autotune-") as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        text = _output(
            nvidia.ptxas_blackwell if arch >= 100 else nvidia.ptxas,
            *("-v", f"--gpu-name={target}", str(path), "-o", str(Path(folder, "kernel.cubin"))),
        )
    for found in _ASSEMBLED.finditer(text):
        if found[1] == name:
            return Resources(int(found[3]), int(found[2]))
    return None


def _output(tool: Any, *arguments: str) -> str:
    try:
        done = subprocess.run([tool.path, *arguments], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, RuntimeError, AttributeError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
