"""Audits of recorded calls, of a log or a cache folder: compiled for another arch with no GPU and no driver.

What ``SMART_AUTOTUNE_LOG`` holds and what the store keeps beside its entries are lines of one form. Auditing them
imports the modules that they name: they are as trusted as the code that they came from.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

from smart_autotune import limits, replay
from smart_autotune.audit import Audit, target_of, with_resources
from smart_autotune.errors import BadValue
from smart_autotune.identity import canonical
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.locate import kernel_of
from smart_autotune.prefilter import compile_candidates
from smart_autotune.recorder import FORMAT
from smart_autotune.replay import NotReplayable, Recipe
from smart_autotune.report import printable
from smart_autotune.store import call_file
from smart_autotune.verdict import LAUNCH_OPTIONS, Outcome, Verdict, describe

MOST_BYTES = 64 << 20  # of one line: a tuning of 1000 configs takes about 0.5 MB


class BadLine(ValueError):
    """A line that is no record, and why."""


@dataclass(frozen=True)
class Option:
    """One config of a recorded call: its fate there, and its recipe as JSON or why it has none."""

    config: triton.Config
    outcome: str
    recipe: Mapping[str, Any] | str


@dataclass(frozen=True)
class Recorded:
    """One line of a log. ``key``: its text; ``place``: module, qualname, file, line, source and argument names."""

    kernel: str
    key: str
    arch: str
    triton_version: str
    place: Mapping[str, Any]
    options: tuple[Option, ...]

    @property
    def winner(self) -> triton.Config | None:
        return next((option.config for option in self.options if option.outcome == Outcome.WON), None)

    def same_compile(self) -> str:
        """Equal where two lines would compile the same: keys that differ only in what the compiler does not see."""
        configs = [
            canonical([describe(option.config), option.outcome == Outcome.PRUNED_BY_USER, option.recipe])
            for option in self.options
        ]
        source = [self.place[name] for name in ("module", "qualname", "source")]
        return canonical([self.kernel, source, self.arch, self.triton_version, sorted(configs)])


@dataclass
class Calls:
    """Recorded lines that compile the same, as one."""

    first: Recorded
    keys: dict[str, triton.Config | None] = field(default_factory=dict)  # by key: what won there

    @property
    def title(self) -> str:
        more = len(self.keys) - 1
        return f"{self.first.key}{f' and {more} more' if more else ''}"


@dataclass(frozen=True)
class Log:
    """What was read. ``bad``: why lines were left out, with how many. ``without_call``: kept tunings that have none."""

    calls: tuple[Calls, ...]
    bad: Mapping[str, int]
    without_call: int = 0


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Log:
    """The calls of a log, or of a folder's logs and kept tunings. BadValue when there is none to be had."""
    groups: dict[str, Calls] = {}
    bad: dict[str, int] = {}
    logs, kept, without_call = _files(path)
    for line in _lines_of(logs, kept):
        try:
            recorded = _parsed(line)
        except BadLine as error:
            bad[str(error)] = bad.get(str(error), 0) + 1
            continue
        calls = groups.setdefault(recorded.same_compile(), Calls(recorded))
        calls.keys[recorded.key] = recorded.winner or calls.keys.get(recorded.key)
    if not groups:
        reasons = "; ".join(f"{count} lines: {reason}" for reason, count in bad.items())
        raise BadValue(f"{path} holds no record of a call{f' ({reasons})' if reasons else ''}")
    return Log(tuple(sorted(groups.values(), key=lambda calls: calls.first.kernel)), bad, without_call)


def _files(path: Path) -> tuple[list[Path], list[Path], int]:
    """Logs, the calls of kept tunings, and how many kept tunings have none."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise BadValue(f"{path} cannot be read: {error.strerror}") from None
    if not is_folder:
        return [path], [], 0
    logs, kept = sorted(path.glob("*.jsonl")), _in_cache_folder(path, "*.call")
    entries = _in_cache_folder(path, "*.json")
    without_call = len({call_file(entry) for entry in entries} - set(kept))
    if logs or kept:
        return logs, kept, without_call
    if without_call:
        raise BadValue(
            f"{path} holds {without_call} kept tunings and no recorded call (NAME.call beside NAME.json): they are "
            "of a version that did not write it yet, or unfinished. Tune again (smart-autotune cache rm), "
            "or run the server with SMART_AUTOTUNE_LOG=PATH and give that"
        )
    raise BadValue(f"{path} holds no *.jsonl and no kept tunings. Run the server with SMART_AUTOTUNE_LOG=PATH")


def _in_cache_folder(root: Path, pattern: str) -> list[Path]:
    found = (*root.glob(pattern), *root.glob(f"triton-*/{pattern}"))
    return sorted(path for path in found if not path.name.startswith("."))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadValue(f"{path} is not a regular file")
        with open(path, "rb") as file:
            while line := file.readline(MOST_BYTES):
                if line.strip():
                    yield line
    except OSError as error:
        raise BadValue(f"{path} cannot be read: {error.strerror}") from None


def _lines_of(logs: Iterable[Path], kept: Iterable[Path]) -> Iterator[bytes | None]:
    """None for a kept call that cannot be read: it may have been removed since. A log must be readable."""
    for log in logs:
        yield from _lines(log)
    for path in kept:
        try:
            yield from list(_lines(path)) or [b""]  # a machine that crashed leaves it empty
        except BadValue:
            yield None


def _parsed(line: bytes | None) -> Recorded:
    if line is None:
        raise BadLine("the call beside a kept tuning cannot be read (removed meanwhile, or closed to us)")
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("no JSON (was the process killed, or the disk full?)") from None
    if not isinstance(raw, dict) or "configs" not in raw:
        raise BadLine("not written by SMART_AUTOTUNE_LOG")
    if raw.get("format") != FORMAT or isinstance(raw["format"], bool):
        raise BadLine(f"format {ascii(raw.get('format'))[:20]}, not {FORMAT}")
    key, configs = raw.get("key"), raw["configs"]
    if not isinstance(key, dict) or not isinstance(configs, list) or not configs:
        raise BadLine("no key, or no configs")
    device = key.get("device")
    place = {name: _text(raw.get(name)) for name in ("module", "qualname", "file", "source")}
    arguments = raw.get("arguments")
    listed = isinstance(arguments, list) and all(isinstance(name, str) for name in arguments)
    try:
        return Recorded(
            _text(raw.get("kernel")) or "?", _text(key.get("text")),
            _text(device.get("arch") if isinstance(device, dict) else None) or "?", _text(raw.get("triton")) or "?",
            {**place, "arguments": arguments if listed else []},
            tuple(_option(option, raw.get("call")) for option in configs),
        )  # fmt: skip
    except RecursionError:
        raise BadLine("nested too deeply") from None


def _text(value: Any) -> str:
    return printable(value) if isinstance(value, str) else ""


def _option(raw: Any, shared: Any) -> Option:
    if not isinstance(raw, dict) or not isinstance(raw.get("config"), dict):
        raise BadLine("a config is not an object")
    if "own" not in raw:
        return Option(_config(raw["config"]), _text(raw.get("outcome")), _text(raw.get("unknown")) or "no call")
    try:
        recipe: Mapping[str, Any] | str = replay.merged(shared, raw["own"])
    except NotReplayable as error:
        recipe = str(error)
    return Option(_config(raw["config"]), _text(raw.get("outcome")), recipe)


def _config(raw: Mapping[str, Any]) -> triton.Config:
    """The config to show and to tell from others."""
    kwargs = raw.get("kwargs")
    if not isinstance(kwargs, dict):
        raise BadLine("a config without its values")
    values = {printable(name): _value(value) for name, value in kwargs.items()}
    options = {name: raw[name] for name in LAUNCH_OPTIONS if raw.get(name) is not None}
    for name, value in options.items():
        if not isinstance(value, str if name == "ir_override" else int) or isinstance(value, bool):
            raise BadLine(f"a config whose {name} is {type(value).__name__}")
    return triton.Config(values, **options)


def _value(raw: Any) -> Any:
    """For show; what is compiled with is in the recipe."""
    if isinstance(raw, (str, dict)):
        return printable(raw if isinstance(raw, str) else canonical(raw))
    return raw if raw is None or isinstance(raw, (bool, int)) else canonical(raw)


# ---- compiling -------------------------------------------------------------------------------------------------------


class _RecordedFunction:
    """Stands in for the kernel: a config's recorded recipe is compiled for ``target``, whatever it is called with."""

    def __init__(self, jit: Any, recipes: Mapping[str, Recipe], target: Any, compiled: Callable[[], None]) -> None:
        self._jit, self._recipes, self._target, self._compiled = jit, recipes, target, compiled

    def run(self, *, grid: Any = None, warmup: bool = True, **values: Any) -> Any:
        try:
            return self._recipes[_values_text(values)].compile(self._jit, self._target)
        finally:
            self._compiled()


def _values_text(values: Mapping[str, Any]) -> str:
    return repr(sorted((name, type(value).__name__, repr(value)) for name, value in values.items()))


def audit(calls: Calls, arch: str, compiled: Callable[[], None] = lambda: None) -> Audit:
    """Every config of a recorded call compiled for ``arch``. NotReplayable when the kernel cannot be had."""
    device = limits.of_arch(arch)
    recorded = calls.first
    jit, notes = kernel_of(recorded.place)
    recipes: dict[str, Recipe] = {}
    unknown: dict[int, Verdict] = {}
    to_compile: list[triton.Config] = []
    for index, option in enumerate(recorded.options):
        config = option.config
        if option.outcome == Outcome.PRUNED_BY_USER:
            unknown[index] = Verdict(config, Outcome.PRUNED_BY_USER)
        elif isinstance(option.recipe, str):
            unknown[index] = Verdict(config, Outcome.COMPILE_FAILED, detail=f"when recorded: {option.recipe}")
        else:
            recipes[_values_text(config.all_kwargs())] = replay.decode(option.recipe, jit.arg_names)
            to_compile.append(config)
    if not to_compile:
        raise NotReplayable(_why_none(recorded))
    call = Call(_RecordedFunction(jit, recipes, target_of(device), compiled), (), (), {}, {}, {})
    ready = iter([with_resources(candidate) for candidate in compile_candidates(call, to_compile, device)])
    verdicts = tuple(unknown[index] if index in unknown else next(ready) for index in range(len(recorded.options)))
    notes = (*notes, *_remarks(calls, verdicts, device))
    return Audit(recorded.kernel, device, calls.title, verdicts, notes, call="recorded call")


def _why_none(recorded: Recorded) -> str:
    reasons = [option.recipe for option in recorded.options if isinstance(option.recipe, str)]
    return f"no config has a call that can be compiled: {reasons[0] if reasons else 'all were pruned'}"


def _remarks(calls: Calls, verdicts: Iterable[Verdict], device: DeviceLimits) -> Iterator[str]:
    """What the audit of a record has to say beyond its table."""
    recorded = calls.first
    if recorded.triton_version != str(triton.__version__):
        yield f"recorded with Triton {recorded.triton_version}, compiled with {triton.__version__}"
    pruned = sum(option.outcome == Outcome.PRUNED_BY_USER for option in recorded.options)
    if pruned:
        yield f"the kernel's own prune dropped {pruned} on {recorded.arch}; it is not asked again for {device.arch}"
    fate = {describe(verdict.config): verdict for verdict in verdicts}
    for text in dict.fromkeys(describe(winner) for winner in calls.keys.values() if winner is not None):
        keys = sum(winner is not None and describe(winner) == text for winner in calls.keys.values())
        found = fate.get(text)
        here = "fits" if found and found.fits else str(found.outcome) if found else "was not offered in the first"
        yield f"fastest on {recorded.arch} for {keys} of {len(calls.keys)} keys: {text}; on {device.arch}: {here}"
