"""Importing the package, and decorating with it, leaves the process as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Runs in a fresh interpreter. Torch and Triton are there before, so that what changes is this package's doing.
CHILD = """
import json, logging, os, signal, sys, threading
import torch, triton
import triton.language as tl

def state():
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    return {
        "handlers": {logger.name: len(logger.handlers) for logger in loggers if logger.handlers},
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "autotuner": [id(triton.autotune), id(triton.runtime.autotuner.Autotuner.run)],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.meta_path), repr(sys.displayhook)],
        "cuda": torch.cuda.is_initialized(),
        "driver": [repr(triton.runtime.driver._active), repr(triton.runtime.driver._default)],
    }

started = []
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system")
sys.addaudithook(lambda event, args: started.append(event) if event in STARTS else None)

before = state()
import smart_autotune
logger = logging.getLogger("smart_autotune")
log = {"level": logger.level, "propagate": logger.propagate, "disabled": logger.disabled}
imported, started_by_import = state(), list(started)

@smart_autotune.smart_autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["N"])
@triton.jit
def kernel(x, N, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 0.0)

from smart_autotune import limits
limits.of_arch("sm_120")
print(json.dumps({"before": before, "imported": imported, "decorated": state(), "log": log,
                  "started_by_import": started_by_import, "started": started}))
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    script = tmp_path_factory.mktemp("child") / "child.py"  # a file: Triton reads a kernel's source
    script.write_text(CHILD, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SMART_AUTOTUNE")}
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    command = [sys.executable, "-W", "ignore:::torch", str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def seen(child: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert child.returncode == 0, child.stderr
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


STAGES = pytest.mark.parametrize("stage", ["imported", "decorated"])


@STAGES
def test_cuda_is_not_initialised(seen: dict[str, Any], stage: str) -> None:
    assert seen[stage]["cuda"] is False


@STAGES
def test_tritons_driver_is_not_created(seen: dict[str, Any], stage: str) -> None:
    assert seen[stage]["driver"] == ["None", "None"]


@STAGES
def test_stock_triton_is_not_patched_unasked(seen: dict[str, Any], stage: str) -> None:
    assert seen[stage]["autotuner"] == seen["before"]["autotuner"]


@STAGES
@pytest.mark.parametrize("part", ["handlers", "threads", "environment", "signals", "hooks"])
def test_the_process_is_as_it_was(seen: dict[str, Any], stage: str, part: str) -> None:
    assert seen[stage][part] == seen["before"][part]


def test_no_process_is_started(seen: dict[str, Any]) -> None:
    assert seen["started_by_import"] == []
    assert seen["started"] == []


def test_nothing_is_printed(child: subprocess.CompletedProcess[str], seen: dict[str, Any]) -> None:
    assert len(child.stdout.splitlines()) == 1  # the report itself
    assert child.stderr == ""


def test_the_logger_is_left_to_the_application(seen: dict[str, Any]) -> None:
    assert seen["log"] == {"level": 0, "propagate": True, "disabled": False}


def test_a_checkout_on_the_path_has_the_patches_too(tmp_path):
    """Nothing installed: a python that does not take an install, a copy on another machine."""
    root = Path(__file__).resolve().parents[1]
    for name in ("smart_autotune", "patches"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import smart_autotune.patches.gate as gate; print(gate.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "patches" / "gate.py")
