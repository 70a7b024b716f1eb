"""``smart-autotune doctor``: is everything here as a server needs it, and if not, what to do.

Looks without touching: CUDA is initialised only with ``--gpu``. The probe of the ``.pth`` runs in a Python of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click

from smart_autotune import settings
from smart_autotune.cli import output

OK, NOTE, WARNING, FAILED = "ok", "note", "warning", "failed"
_STYLES = {OK: "green", NOTE: "", WARNING: "yellow", FAILED: "red"}
TESTED_TORCH = "2.11.0"
SERVERS = {  # by entry-point group: the package and the variable that lists which plug-ins it loads
    "sglang.srt.plugins": ("sglang", "SGLANG_PLUGINS"),
    "vllm.general_plugins": ("vllm", "VLLM_PLUGINS"),
}
PLUGIN = "smart_autotune"
# Prints whether the shipped .pth acted: nothing else imports this module in a bare Python.
_PROBE = "import sys; print('smart_autotune.patches.startup' in sys.modules)"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``remedy``: what to do where it is not as a server needs it."""

    check: str
    status: str
    found: str
    remedy: str = ""


@click.command()
@click.option("--gpu", is_flag=True, help="Also ask the GPU for its limits; this initialises CUDA.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of a table.")
@click.pass_context
def doctor(context: click.Context, gpu: bool, as_json: bool) -> None:
    """Check that a server started here is tuned by us: Triton, the patch, start-up, cache, tools, settings.

    Exit status: 0 all that a server needs is there (warnings may be), 1 something is not.
    """
    found = list(findings(gpu))
    if as_json:
        output.print_json([asdict(finding) for finding in found])
    else:
        rows = [(f.status, f.check, f.found) for f in found]
        output.print_table(("", "check", "found"), rows, styles=[_STYLES[f.status] for f in found])
        for finding in found:
            if finding.remedy:
                click.echo(f"{finding.check}: {finding.remedy}")
        failed = sum(finding.status == FAILED for finding in found)
        warned = sum(finding.status == WARNING for finding in found)
        click.echo(f"{len(found)} checks: {failed} failed, {warned} warnings")
    context.exit(1 if any(finding.status == FAILED for finding in found) else 0)


def findings(gpu: bool = False) -> Iterator[Finding]:
    """All checks, each for itself: one that cannot be made is a finding, not an end."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _platform, _settings, _triton, _torch, _compile_tools, _startup, _plugins, _cache, _log, _device,
    ]  # fmt: skip
    if gpu:
        checks.append(_gpu)
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(check.__name__.strip("_").replace("_", " "), FAILED, f"cannot be checked: {_line(error)}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}"


def _platform() -> Iterator[Finding]:
    found = f"{sys.platform} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform.startswith("linux"):
        yield Finding("platform", OK, found)
    else:
        yield Finding("platform", FAILED, found, "the patch is for Linux")
    yield Finding("smart-autotune", OK, f"{_version('smart-autotune') or 'not installed, used from its source'}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- settings --------------------------------------------------------------------------------------------------------


def _settings() -> Iterator[Finding]:
    yield from settings_in(os.environ)


def settings_in(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The settings in force, one finding each bad one, and variables that are none."""
    known = {settings.PREFIX + setting.name.upper(): setting for setting in fields(settings.Settings)}
    given = []
    for variable, setting in known.items():
        text = environ.get(variable)
        if text is None:
            continue
        try:
            given.append(f"{variable}={setting.metadata['parse'](text)}")
        except ValueError as error:
            yield Finding(variable, FAILED, repr(text), f"expected {error}")
    yield Finding("settings", OK, ", ".join(given) or "all at their defaults")
    for variable, near in settings.unknown_variables(environ):
        remedy = f"it has no effect{f'; did you mean {near}?' if near else ''}"
        yield Finding(variable, WARNING, repr(environ[variable]), remedy)
    yield _switched_on(environ.get("SMART_AUTOTUNE"))


def _switched_on(text: str | None) -> Finding:
    try:
        on = settings.requested()
    except settings.SettingsError as error:
        return Finding("SMART_AUTOTUNE", FAILED, repr(text), str(error))
    if on:
        return Finding("SMART_AUTOTUNE", OK, "1: servers started from this shell are tuned by us")
    remedy = "set SMART_AUTOTUNE=1 to have a server's stock kernels tuned by us"
    return Finding("SMART_AUTOTUNE", NOTE, "not set" if text is None else repr(text), remedy)


# ---- what compiles ---------------------------------------------------------------------------------------------------


def _triton() -> Iterator[Finding]:
    import triton

    from smart_autotune.patches import triton_3_6_0

    conflict = triton_3_6_0.conflict()
    if conflict is None:
        yield Finding("Triton", OK, f"{triton.__version__}: the release that the patch is for, its source unchanged")
    else:
        remedy = f"{conflict.consequence}; install {conflict.expected}" if "==" in conflict.expected else str(conflict)
        yield Finding("Triton", FAILED, f"{triton.__version__}: {conflict.found}", remedy)
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        yield Finding("TRITON_INTERPRET", WARNING, "set", "kernels run in the interpreter, nothing is tuned: unset it")


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield Finding("torch", FAILED, "not installed", f"install torch=={TESTED_TORCH}")
    elif version.partition("+")[0] == TESTED_TORCH:
        yield Finding("torch", OK, version)
    else:
        yield Finding("torch", WARNING, version, f"the tested pair is torch {TESTED_TORCH} with triton 3.6.0")


def _compile_tools() -> Iterator[Finding]:
    import triton

    for name, archs in (("ptxas", "up to sm_90"), ("ptxas_blackwell", "sm_100 and up"), ("cuobjdump", "audits")):
        try:
            tool = getattr(triton.knobs.nvidia, name)
            yield Finding(name.replace("_", "-"), OK, f"{tool.version} for {archs}: {tool.path}")
        except (RuntimeError, AttributeError) as error:
            status = WARNING if name == "cuobjdump" else FAILED
            yield Finding(name.replace("_", "-"), status, _line(error), f"needed for {archs}; reinstall triton")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    if shutil.which(compiler):
        yield Finding("C compiler", OK, compiler)
    else:
        yield Finding("C compiler", FAILED, compiler or "none", "Triton builds its launchers with one: install gcc")


# ---- how a server's processes get us ---------------------------------------------------------------------------------


def _startup() -> Iterator[Finding]:
    places = dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")])
    here = [str(path) for folder in places if (path := Path(folder) / "smart_autotune.pth").is_file()]
    acts = _pth_acts()
    if here and acts:
        yield Finding(".pth", OK, f"{here[0]}: acts in every Python of this environment")
    elif here:
        remedy = "this Python does not run it (-S, -I or an own site): use `smart-autotune run -- COMMAND`"
        yield Finding(".pth", FAILED, f"{here[0]}: there, but it does not act", remedy)
    else:
        remedy = "not in an editable install: use `smart-autotune run -- COMMAND`, or install the wheel"
        yield Finding(".pth", WARNING, "acts through sitecustomize" if acts else "none", "" if acts else remedy)


def _pth_acts() -> bool:
    """Asks a bare Python of this environment, with the variable set. It imports neither Triton nor torch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMART_AUTOTUNE")}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env={**kept, "SMART_AUTOTUNE": "1"}, cwd=os.sep, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.stdout.strip() == "True"


def _plugins() -> Iterator[Finding]:
    for group, (package, variable) in SERVERS.items():
        version = _version(package)
        if version is None:
            continue
        ours = [point for point in importlib.metadata.entry_points(group=group) if point.name == PLUGIN]
        listed = os.environ.get(variable)
        if not ours:
            yield Finding(f"{package} plug-in", WARNING, f"{package} {version}: ours is not registered",
                          "reinstall smart-autotune: its entry points are missing")  # fmt: skip
        elif listed is not None and PLUGIN not in [name.strip() for name in listed.split(",")]:
            yield Finding(f"{package} plug-in", WARNING, f"{variable}={listed}", f"add {PLUGIN} to it, or unset it")
        else:
            yield Finding(f"{package} plug-in", OK, f"{package} {version} loads {ours[0].value}")


# ---- files -----------------------------------------------------------------------------------------------------------


def _cache() -> Iterator[Finding]:
    from smart_autotune import store
    from smart_autotune.cli import entries

    try:
        kept = store.current()
    except settings.SettingsError:
        yield Finding("cache", FAILED, "unknown: a setting is bad", "mend the setting first")
        return
    if kept is None:
        yield Finding("cache", WARNING, "off", "a restart tunes again: unset SMART_AUTOTUNE_CACHE, or give a home")
        return
    root = kept.folder
    trouble = _unwritable(root)
    if trouble:
        yield Finding("cache", FAILED, f"{root}: {trouble}", "set SMART_AUTOTUNE_CACHE_DIR to a folder of yours")
        return
    found = entries.read_all(root) if root.is_dir() else []
    bad = [entry for entry in found if entry.record is None]
    yield Finding("cache", OK, f"{root}: writable, {len(found) - len(bad)} entries")
    if bad:
        remedy = "they are not used: `smart-autotune cache ls` shows why, `cache rm` removes them"
        yield Finding("cache entries", WARNING, f"{len(bad)} cannot be read, such as {bad[0].path}", remedy)


def _unwritable(folder: Path) -> str:
    """Why no file can be made (and locked) in the folder, or where it would be made; empty when one can."""
    import filelock

    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(prefix=".smart_autotune-doctor-", dir=folder) as file:
            file.write(b"x")
            file.flush()
            lock = filelock.FileLock(f"{file.name}.lock")
            try:
                with lock.acquire(timeout=0):
                    pass
            finally:
                Path(f"{file.name}.lock").unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        return _line(error)
    return ""


def _log() -> Iterator[Finding]:
    from smart_autotune import log_file

    try:
        configured = settings.current().log
    except settings.SettingsError:
        return
    if not configured:
        return
    path = log_file.path_of(configured)
    trouble = "" if path.exists() and os.access(path, os.W_OK) else _unwritable(path.parent)
    if path.exists() and not path.is_file():
        trouble = "not a regular file"
    if trouble:
        yield Finding("log", WARNING, f"{path}: {trouble}", "tunings are not logged there; nothing else fails")
    else:
        yield Finding("log", OK, str(path))


# ---- the device ------------------------------------------------------------------------------------------------------


def _device() -> Iterator[Finding]:
    """What the driver's own tool says, in a process of its own."""
    from smart_autotune import identity, limits

    yield Finding("driver", NOTE, identity.driver_version())
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("GPU", NOTE, "no nvidia-smi here", "")
        return
    done = subprocess.run(
        [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    lines = [line.strip() for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    if not lines:
        yield Finding("GPU", NOTE, "none")
    for line in dict.fromkeys(lines):
        name, _, capability = line.rpartition(",")
        arch = f"sm_{capability.strip().replace('.', '')}"
        cap = limits.SHARED_BYTES_BY_ARCH.get(arch)
        count = f"{lines.count(line)} x " if lines.count(line) > 1 else ""
        if cap is None:
            yield Finding(
                "GPU", WARNING, f"{count}{name} ({arch})", "its limits are not in our table; audits do not know"
            )
        else:
            yield Finding("GPU", OK, f"{count}{name} ({arch}): {cap:,} bytes of shared memory a block")


def _gpu() -> Iterator[Finding]:
    """The limits as Triton's driver says them, against our table for audits."""
    import triton

    from smart_autotune import limits

    try:
        driver = triton.runtime.driver.active
        device = limits.of_device(driver, driver.get_current_device())
    except Exception as error:
        yield Finding("GPU limits", FAILED, _line(error), "no GPU can be used from here")
        return
    text = f"{device.arch}: {device.shared_bytes:,} bytes a block, {device.multiprocessors} multiprocessors"
    expected = limits.SHARED_BYTES_BY_ARCH.get(device.arch)
    if device.what_if:
        yield Finding("GPU limits", WARNING, text, "lowered by SMART_AUTOTUNE_SHARED_BYTES_CAP")
    elif expected not in (None, device.shared_bytes):
        yield Finding("GPU limits", WARNING, text, f"audits for {device.arch} count on {expected:,} bytes")
    else:
        yield Finding("GPU limits", OK, text)
