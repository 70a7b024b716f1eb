"""Environments with real SGLang wheels and our wheel.

No GPU and no server: what is installed beside the wheel is what importing the modules at hand takes; ``torchvision``,
whose wheel wants another torch, is two lines.
"""

from __future__ import annotations

import sys

import pytest

from support.installed import Environment, installed_from_index
from support.patching import on_the_verified_triton

VERSIONS = ("0.5.14", "0.5.17")
NEEDED = (
    "orjson", "psutil", "pybase64", "requests", "pillow", "starlette", "tqdm", "ipython", "pydantic", "aiohttp",
    "msgspec", "numpy<2.4",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    only_311 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="these SGLang wheels are for CPython 3.11")
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker(only_311)
            item.add_marker(on_the_verified_triton)


@pytest.fixture(scope="session", params=VERSIONS)
def server(request, tmp_path_factory, wheel):
    """An environment with SGLang and our wheel, without the ``.pth``: only SGLang's own loader can turn us on."""
    folder = tmp_path_factory.mktemp(f"sglang-{request.param}")
    stub = folder / "stub" / "torchvision"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("from torchvision import io\n")
    (stub / "io.py").write_text("def decode_jpeg(*args, **kwargs):\n    raise NotImplementedError\n")
    environment = Environment(folder / "venv").install(wheel)
    (environment.packages / "smart_autotune.pth").unlink()
    environment.version = request.param
    environment.sglang = installed_from_index(f"sglang-{request.param}", f"sglang=={request.param}") / "sglang"
    environment.see(stub.parent, environment.sglang.parent)
    environment.see_dependencies().see(installed_from_index("sglang-needs", *NEEDED, deps=True))
    return environment
