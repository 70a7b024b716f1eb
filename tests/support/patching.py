"""The patch for a scope, and Triton's class put back after whatever a test did to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from smart_autotune.patches import switch, triton_3_6_0

# The gate's refusal of every other release is tested for itself.
on_the_verified_triton = pytest.mark.skipif(
    triton.__version__.partition("+")[0] != "3.6.0", reason="the patch is for Triton 3.6.0 only"
)


@contextmanager
def put_back() -> Iterator[None]:
    """Whatever happens to ``Autotuner.run`` in the scope is undone after it."""
    run = vars(Autotuner)["run"]
    try:
        yield
    finally:
        Autotuner.run = run
        triton_3_6_0._original = None
        triton_3_6_0._active = False
        triton_3_6_0._before.clear()
        triton_3_6_0._after.clear()
        switch._refused.clear()


@contextmanager
def patched() -> Iterator[None]:
    """Stock tuners are served by our engine in the scope."""
    with put_back():
        conflict = triton_3_6_0.apply()
        assert conflict is None, conflict
        yield
