"""CUDA graph capture: is one going on here, and how a first module load survives it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

log = logging.getLogger("smart_autotune")

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h


def is_capturing() -> bool:
    """Whether the current stream of this thread is being captured into a CUDA graph."""
    import torch

    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except (RuntimeError, AttributeError, AssertionError):  # a torch without CUDA
        return False


@contextmanager
def relaxed() -> Iterator[None]:
    """Calls that a global capture forbids (module load) are allowed to this thread inside the scope.

    Nothing of it lands in the graph. Does nothing where there is no CUDA driver library.
    """
    cuda = _cuda()
    if cuda is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    status = cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status != 0:
        log.debug("cuThreadExchangeStreamCaptureMode: CUDA error %s", status)
        yield
        return
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # mode now holds the former one


@lru_cache(maxsize=1)
def _cuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
