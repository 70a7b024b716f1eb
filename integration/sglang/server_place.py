"""The folder that servers are run from: the unpacked kit, the checkpoint, our wheel installed, each run's caches."""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tarfile
import time

from server_runs import Run

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Place:
    """A folder with the unpacked kit, the checkpoint, our wheel in a virtual environment, and each run's caches."""

    def __init__(self, folder: pathlib.Path, kit: pathlib.Path, wheel: pathlib.Path | None, server: str) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.model = folder / "models" / server
        self._modules = folder / "tvm"
        self.has_modules = self._modules.exists()  # SGLang's own CUDA modules, which its first start builds
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "unpacked").exists():
            with tarfile.open(kit) as archive:
                archive.extractall(folder, filter="data")
            (folder / "unpacked").touch()
        self.model.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "models" / server / "config.json", self.model)
        if server == "kimi" and not (self.model / "model.safetensors").exists():
            checked([sys.executable, str(HERE / "kimi_checkpoint.py"), str(self.model)])
        self._observer()
        self.wheel = wheel or self._built_wheel()
        self.installed = self._environment("venv", with_ours=True)  # where the wheel's .pth is read
        self.bare = self._environment("bare", with_ours=False)
        self.target = folder / "target"  # on PYTHONPATH: entry points are found there, a .pth is not read
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        checked([*pip, "--upgrade", "--target", str(self.target), str(self.wheel)])

    def _observer(self) -> None:
        """``sglang_observer`` as a distribution with an entry point, on the path."""
        folder = self.folder / "observer" / "sglang_observer-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang_observer\nVersion: 0\n")
        (folder / "entry_points.txt").write_text("[sglang.srt.plugins]\nobserver = sglang_observer:activate\n")
        shutil.copy(HERE / "sglang_observer.py", folder.parent)

    def _built_wheel(self) -> pathlib.Path:
        """Built from a copy, so that the checkout stays clean; with the setuptools that is there."""
        source, output = self.folder / "source", self.folder / "wheel"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in ("smart_autotune", "patches"):
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
        checked([*pip, "-w", str(output), str(source)])
        return next(output.glob("smart_autotune-*.whl"))

    def _environment(self, name: str, with_ours: bool) -> pathlib.Path:
        """A virtual environment that also has what this Python has; ours installed by plain pip. Its interpreter."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        checked([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        packages = next(folder.glob("lib/python3*/site-packages"))
        parents = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        lines = [f"import site; site.addsitedir({path!r})" for path in parents]
        (packages / "parent.pth").write_text("\n".join(lines) + "\n")
        python = folder / "bin" / "python"
        if with_ours:
            pip = [str(python), "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--ignore-installed"]
            checked([*pip, str(self.wheel)])
            if not (packages / "smart_autotune.pth").exists():
                raise RuntimeError(f"the wheel {self.wheel.name} put no smart_autotune.pth into {packages}")
        return python

    def python(self, run: Run) -> pathlib.Path:
        return self.installed if run.pth or not run.ours else self.bare

    def _caches(self, name: str) -> pathlib.Path:
        return self.folder / "caches" / name

    def environ(self, run: Run) -> dict[str, str]:
        """A run's variables. Its own caches and what the observer answered before are emptied for it."""
        caches, answers = self._caches(run.caches or run.name), self.folder / "answers" / run.name
        for old in (answers, *([] if run.caches else [caches])):
            shutil.rmtree(old, ignore_errors=True)
        answers.mkdir(parents=True)
        path = [self.site, self.folder / "observer", *([self.target] if run.ours and not run.pth else [])]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SMART_AUTOTUNE")}
        environ |= {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TVM_FFI_CACHE_DIR": str(self._modules),
            "TRITON_PRINT_AUTOTUNING": "1",
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
            "SGLANG_PLUGINS": "observer,smart_autotune" if run.plugin else "observer",
            "OBSERVER_FOLDER": str(answers),
            "OBSERVER_LAUNCHES": "0" if run.alone else "1",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if run.compiled_with:  # stock also keeps choices of configs there: they are to be this run's own
            environ |= {"TRITON_CACHE_DIR": str(self._caches(run.compiled_with) / "triton"), "FLA_CACHE_RESULTS": "0"}
        if run.ours:
            environ |= {"SMART_AUTOTUNE": "1", "SMART_AUTOTUNE_CACHE_DIR": str(caches / "smart_autotune")}
        return environ


def checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def start_cost(place: Place, rounds: int = 15) -> dict[str, float]:
    """Milliseconds of a Python start, medians: without us, installed and unset (interleaved)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SMART_AUTOTUNE")}
    times: dict[str, list[float]] = {"without": [], "installed, unset": []}
    for _ in range(rounds):
        for name, python in (("without", place.bare), ("installed, unset", place.installed)):
            begin = time.perf_counter()
            subprocess.run([str(python), "-c", "pass"], env=environ, check=True)
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}
