"""``smart-autotune audit --from``: a server's recorded calls, of a log or a cache folder, compiled for another GPU."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from smart_autotune import limits, recorded
from smart_autotune.audit import Audit
from smart_autotune.cli import output
from smart_autotune.cli.audit import NOT_REPLAYED, NOTHING_FITS, progress, see_working_folder
from smart_autotune.cli.errors import BadArgument
from smart_autotune.cli.native import NotCaught
from smart_autotune.errors import SmartAutotuneError
from smart_autotune.recorded import Calls, Log
from smart_autotune.replay import NotReplayable
from smart_autotune.report import render_audit
from smart_autotune.settings import SettingsError


@dataclass(frozen=True)
class Done:
    """One recorded call on one arch: its audit, or why there is none."""

    calls: Calls
    arch: str
    audit: Audit | None
    reason: str = ""


def audit_log(
    log: Path, wanted: str | None, archs: Sequence[str], as_json: bool, catch: Callable[[], NotCaught]
) -> int:
    """Prints what the log's calls have on each arch; returns the exit status."""
    stdout, color = sys.stdout, output.color()
    done: list[Done] = []
    see_working_folder()
    # What a module or the compiler prints must not mix with the answer.
    with contextlib.redirect_stdout(sys.stderr):
        read = _read(log, wanted, archs)
        for one in _run(read.calls, archs, catch):
            done.append(one)
            if one.audit is not None and not as_json:
                click.echo(render_audit(one.audit, color=color), file=stdout, color=color)
    for reason, count in read.bad.items():
        click.echo(f"{count} lines of {log} were not used: {reason}", err=True)
    if read.without_call:
        click.echo(f"{read.without_call} kept tunings of {log} have no recorded call: tune them again", err=True)
    if as_json:
        click.echo(json.dumps([row for one in done for row in _rows(one)], indent=2), file=stdout)
    else:
        click.echo("\n".join(_summary(done, archs)), file=stdout)
    if any(one.audit is not None and not one.audit.fits for one in done):
        return NOTHING_FITS
    return NOT_REPLAYED if any(one.audit is None for one in done) else 0


def _read(log: Path, wanted: str | None, archs: Sequence[str]) -> Log:
    try:
        for arch in archs:
            limits.of_arch(arch)
        found = recorded.read(log)
    except (SmartAutotuneError, SettingsError, ValueError) as error:
        raise BadArgument(str(error)) from error
    if wanted is None:
        return found
    calls = tuple(calls for calls in found.calls if fnmatch.fnmatchcase(calls.first.kernel, wanted))
    if not calls:
        there = ", ".join(dict.fromkeys(calls.first.kernel for calls in found.calls))
        raise BadArgument(f"no kernel {wanted!r} in {log}; there: {there}")
    return replace(found, calls=calls)


def _run(calls: Sequence[Calls], archs: Sequence[str], catch: Callable[[], NotCaught]) -> Iterator[Done]:
    for one in calls:
        for arch in archs:
            try:
                with catch() as caught, progress(f"{arch}, {one.first.kernel}", len(one.first.options)) as compiled:
                    audit = recorded.audit(one, arch, compiled)
                    notes = (*audit.notes, *caught.errors())
                yield Done(one, arch, replace(audit, notes=notes))
            except NotReplayable as error:
                yield Done(one, arch, None, str(error))


def _rows(done: Done) -> list[dict[str, Any]]:
    recorded_on, kernel = done.calls.first.arch, done.calls.first.kernel
    keys = list(done.calls.keys)
    if done.audit is None:
        missing = dict.fromkeys(("config", "need", "limit", "unit", "registers", "spill_bytes", "compile_secs"))
        row = {"kernel": kernel, "arch": done.arch, "example": done.calls.title, **missing, "outcome": "NOT_REPLAYED"}
        return [{**row, "reason": done.reason, "recorded_outcome": None, "recorded_on": recorded_on, "keys": keys}]
    return [
        {**row, "reason": verdict.detail, "recorded_outcome": option.outcome or None, "recorded_on": recorded_on,
         "keys": keys}
        for row, verdict, option in zip(done.audit.rows(), done.audit.verdicts, done.calls.first.options)
    ]  # fmt: skip


def _summary(done: Sequence[Done], archs: Sequence[str]) -> Iterator[str]:
    """One line an arch and one for each call that is not served there."""
    for arch in archs:
        here = [one for one in done if one.arch == arch]
        served = [one for one in here if one.audit is not None and one.audit.fits]
        kernels = {one.calls.first.kernel for one in here}
        keys = sum(len(one.calls.keys) for one in here)
        yield (
            f"{arch}: {len(kernels)} kernels, {len(here)} different calls ({keys} keys); "
            f"{len(served)} calls have a config that fits"
        )
        for one in here:
            if one.audit is not None and not one.audit.fits:
                yield f"  no config fits: {one.calls.first.kernel} [{one.calls.title}]"
        for kernel, reason in dict.fromkeys((one.calls.first.kernel, one.reason) for one in here if one.audit is None):
            yield f"  not compiled: {kernel}: {reason}"
