"""No test meets a GPU, a setting of the developer's shell or a cache of an earlier run, unless it asks for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_KEPT = ("TRITON_INTERPRET", "SMART_AUTOTUNE_TEST_CACHE")
for _name in [name for name in os.environ if name.startswith(("SMART_AUTOTUNE", "TRITON_")) and name not in _KEPT]:
    del os.environ[_name]
os.environ["SMART_AUTOTUNE_STRICT"] = "1"  # our own faults surface, in child processes too

import smart_autotune
from smart_autotune import once, settings
from support.installed import Environment, build_wheel, copied_sources
from support.stub_driver import StubDriver, active


@pytest.fixture(scope="session", autouse=True)
def own_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton-cache"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copied_sources(folder / "sources"), folder)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """A fresh virtual environment with the wheel; the dependencies are those of the running environment."""
    return Environment(tmp_path_factory.mktemp("installed") / "venv").install(wheel).see_dependencies()


@pytest.fixture(autouse=True)
def strict_and_thawed() -> Iterator[None]:
    with settings.override(strict=True, cache=False):  # no test meets what another one kept, unless it asks
        yield
    smart_autotune.thaw()
    once.forget()


@pytest.fixture
def sm_120() -> Iterator[StubDriver]:
    with active(StubDriver(120)) as driver:
        yield driver


@pytest.fixture
def sm_90() -> Iterator[StubDriver]:
    with active(StubDriver(90)) as driver:
        yield driver


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Where this test's tunings are logged."""
    path = tmp_path / "log.jsonl"
    with settings.override(log=str(path)):
        yield path
