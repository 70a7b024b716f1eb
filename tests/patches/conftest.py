"""Every test here may do to Triton's class what it likes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.patching import put_back


@pytest.fixture(autouse=True)
def triton_is_put_back() -> Iterator[None]:
    with put_back():
        yield
