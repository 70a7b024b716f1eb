"""``smart-autotune audit``: which configs of a module's kernels fit which GPU, without a GPU."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from smart_autotune import limits
from smart_autotune.audit import Arguments, Audit, examples_of, tuner_of
from smart_autotune.audit import audit as audit_kernel
from smart_autotune.cli import output
from smart_autotune.cli.errors import BadArgument
from smart_autotune.cli.native import NativeOutput, NotCaught
from smart_autotune.errors import SmartAutotuneError, one_line
from smart_autotune.report import render_audit
from smart_autotune.settings import SettingsError

NOTHING_FITS = 3
NOT_REPLAYED = 4


@click.command()
@click.argument("target", metavar="MODULE[:KERNEL]", required=False)
@click.option(
    "--from",
    "log",
    metavar="LOG_OR_CACHE",
    type=click.Path(path_type=Path),
    help="Audit the calls in this file (or folder) of SMART_AUTOTUNE_LOG, or those beside the kept tunings of this "
    "cache folder, instead of a module's examples. The modules that they name are imported: read only logs and "
    "folders that you trust.",
)
@click.option("--kernel", "wanted", metavar="PATTERN", help="With --from: only kernels of this name (* and ? match).")
@click.option("--arch", "archs", multiple=True, required=True, metavar="sm_NN", help="Repeat it for more than one.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of tables.")
@click.option("-v", "--verbose", is_flag=True, help="Let through what the compiler itself writes to stderr.")
@click.pass_context
def audit(
    context: click.Context, target: str | None, log: Path | None, wanted: str | None, archs: tuple[str, ...],
    as_json: bool, verbose: bool,
) -> None:  # fmt: skip
    """Compile every config of the smart-autotuned kernels in MODULE for each --arch and each of their examples.

    With --from: of every kernel that a server met, for its own calls.

    Exit status: 0 every kernel has a fitting config on every arch, 3 one has none, 4 a recorded call could not be
    compiled again (and all others fit), 2 bad arguments.
    """
    catch = NativeOutput if not verbose else NotCaught
    archs = tuple(dict.fromkeys(archs))
    if (target is None) == (log is None):
        raise click.UsageError("give a MODULE or --from LOG_OR_CACHE, one of the two")
    if log is not None:
        from smart_autotune.cli.replayed import audit_log

        context.exit(audit_log(log, wanted, archs, as_json, catch))
    if wanted is not None:
        raise click.UsageError("--kernel goes with --from; write MODULE:KERNEL")
    assert target is not None
    stdout, color = sys.stdout, output.color()
    audits = []
    # What a module, a kernel's author or the compiler prints must not mix with the answer.
    with contextlib.redirect_stdout(sys.stderr):
        for done in _audits(target, archs, catch):
            audits.append(done)
            if not as_json:
                click.echo(render_audit(done, color=color), file=stdout, color=color)
    if as_json:
        rows = [row for done in audits for row in done.rows()]
        click.echo(json.dumps(rows, indent=2), file=stdout)
    context.exit(0 if all(done.fits for done in audits) else NOTHING_FITS)


def _audits(target: str, archs: tuple[str, ...], catch: Callable[[], NotCaught]) -> Iterator[Audit]:
    """One audit after another. All that can be wrong with the arguments is found before the first compile."""
    try:
        for arch in archs:
            limits.of_arch(arch)
        kernels = find_kernels(target)
        work = [(name, kernel, examples_of(kernel)) for name, kernel in kernels.items()]
        yield from _run(work, archs, catch)
    except (SmartAutotuneError, SettingsError, ValueError) as error:
        raise BadArgument(str(error)) from error


def _run(
    work: list[tuple[str, Any, dict[str, Arguments]]], archs: tuple[str, ...], catch: Callable[[], NotCaught]
) -> Iterator[Audit]:
    for kernel_name, kernel, examples in work:
        offered = len(getattr(tuner_of(kernel), "configs", ()))
        for arch in archs:
            for name, arguments in examples.items():
                with catch() as caught, progress(f"{arch}, {name}", offered) as compiled:
                    done = audit_kernel(kernel, arch, name, arguments, compiled)
                    notes = (*done.notes, *caught.errors())
                yield replace(done, kernel=kernel_name, notes=notes)


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Counts compiles on stderr while a person watches; gone again before the next table is printed."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (TextColumn("compiling for {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def find_kernels(target: str) -> dict[str, Any]:
    """The smart-autotuned kernels that ``MODULE`` or ``MODULE:KERNEL`` names, by the name they have there."""
    module_name, _, wanted = target.partition(":")
    module = _imported(module_name)
    kernels: dict[str, Any] = {}
    for name, value in vars(module).items():
        if tuner_of(value) is not None and not any(value is known for known in kernels.values()):
            kernels[name] = value
    if not kernels:
        raise BadArgument(f"module {module_name} has no smart-autotuned kernel")
    if not wanted:
        return kernels
    if tuner_of(getattr(module, wanted, None)) is None:
        near = difflib.get_close_matches(wanted, kernels, n=3, cutoff=0.4) or sorted(kernels)
        raise BadArgument(f"no smart-autotuned kernel {wanted!r} in {module_name}; there: {', '.join(near)}")
    return {wanted: getattr(module, wanted)}


def see_working_folder() -> None:
    """Its modules can be imported: the installed script does not see them otherwise."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _imported(name: str) -> ModuleType:
    see_working_folder()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadArgument(f"cannot import {name!r}: {one_line(error)}") from error
