"""Fresh environments for child processes: a wheel of this checkout, virtual environments, other releases of a package.

Torch, Triton and the other dependencies come from the running environment, by a ``.pth`` that names its folders.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "smart_autotune", "patches")
# Taken out of the environment: to the package it would be a setting that it does not know.
_CACHE = os.environ.pop("SMART_AUTOTUNE_TEST_CACHE", None)


def cache_folder() -> Path:
    """Where downloads are kept between runs, outside the repository (``SMART_AUTOTUNE_TEST_CACHE``)."""
    return Path(_CACHE) if _CACHE else Path.home() / ".cache" / "smart_autotune_tests"


_UNREACHABLE = ("No matching distribution", "Could not find a version", "Connection", "Max retries", "timed out")


def failed(what: str, output: str) -> NoReturn:
    """Skips where the package index cannot be reached; fails for any other reason, and in CI, where it must be."""
    in_ci = os.environ.get("CI", "").lower() == "true"
    if in_ci or not any(word in output for word in _UNREACHABLE):
        pytest.fail(f"{what} failed:\n{output}")
    pytest.skip(f"{what} needs the package index, which cannot be reached from here")


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT.parent, check=False)


def copied_sources(target: Path) -> Path:
    """The files that a wheel is built from, so that nothing of a build lands in the checkout."""
    target.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / name)
    return target


def build_wheel(source: Path, target: Path) -> Path:
    """Builds without the index where setuptools here can; else in isolation."""
    major = int(importlib.metadata.version("setuptools").split(".")[0]) if importlib.util.find_spec("setuptools") else 0
    can_build = major >= 71 or (major >= 64 and importlib.util.find_spec("wheel") is not None)
    isolation = ("--no-build-isolation",) if can_build else ()
    done = pip("wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(target), str(source))
    if done.returncode != 0:
        failed("building a wheel", done.stderr)
    (wheel,) = target.glob("*.whl")
    return wheel


def installed_from_index(name: str, *requirements: str, deps: bool = False) -> Path:
    """A folder of the cache with ``requirements`` installed into it. Complete folders are used again."""
    target = cache_folder() / f"py{sys.version_info.major}{sys.version_info.minor}" / name
    if not target.exists():
        unfinished = target.with_name(f"{name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        options = () if deps else ("--no-deps",)
        done = pip("install", "--quiet", *options, "--target", str(unfinished), *requirements)
        if done.returncode != 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            failed(f"installing {', '.join(requirements)}", done.stderr)
        if not target.exists():
            unfinished.rename(target)
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


@functools.cache
def folders_of_dependencies() -> tuple[str, ...]:
    """The folders on this interpreter's path that hold installed packages."""
    found = {str(Path(entry).resolve()) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    holding = {
        str(Path(spec.origin).resolve().parents[1])
        for spec in (importlib.util.find_spec(name) for name in ("torch", "triton", "wrapt", "packaging", "click"))
        if spec is not None and spec.origin is not None
    }
    return tuple(sorted(found | holding))


class Environment:
    """A virtual environment; ``python`` is its interpreter, ``packages`` its site-packages."""

    def __init__(self, folder: Path, system_site_packages: bool = False) -> None:
        venv.create(folder, with_pip=False, symlinks=True, system_site_packages=system_site_packages)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = folder / "lib" / version / "site-packages"

    def see(self, *folders: str | Path) -> Environment:
        """Adds folders to the path. Their own ``.pth`` files are not run."""
        name = f"deps{len(list(self.packages.glob('deps*.pth')))}.pth"
        (self.packages / name).write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")
        return self

    def see_dependencies(self) -> Environment:
        return self.see(*folders_of_dependencies())

    def install(self, wheel: Path) -> Environment:
        done = pip("--python", str(self.python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
        assert done.returncode == 0, done.stderr
        return self

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_child([str(self.python), *arguments], **options)  # type: ignore[arg-type]


def clean_environment(variables: Mapping[str, str] | None = None, first: Iterable[Path | str] = ()) -> dict[str, str]:
    """This process's variables without ours and without its path; ``first`` becomes the child's PYTHONPATH.

    No child reads or leaves tunings on disk, unless ``variables`` say so.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SMART_AUTOTUNE", "PYTHONPATH", "PYTHONHOME"))}
    path = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in first)} if first else {}
    return {**kept, **path, "SMART_AUTOTUNE_CACHE": "0", **(variables or {})}


def run_child(
    command: list[str],
    variables: Mapping[str, str] | None = None,
    first: Iterable[Path | str] = (),
    cwd: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` in a clean environment. stdout and stderr are text.

    Not from the checkout, whose packages ``python -c`` would find before the installed ones.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False,
        env=clean_environment(variables, first), cwd=cwd or Path(command[0]).parent,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done
