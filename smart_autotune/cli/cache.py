"""``smart-autotune cache``: the folder of kept tunings, looked at and cleared beside running servers.

A server sees the whole entry or none, and tunes again where it finds none. The recorded call beside an entry goes with
it (``.call``). An entry that a process is tuning right now (it holds the entry's lock) is left alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import filelock

from smart_autotune.cli import entries, output
from smart_autotune.cli.entries import Entry
from smart_autotune.cli.errors import BadArgument
from smart_autotune.store import call_file

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_STALE_SECS = 3_600.0  # a temporary file this old has no writer any more
_IDLE_LOCK_SECS = 86_400.0

LEFT = 1

_folder = click.option(
    "--dir", "given", metavar="CACHE_DIR", type=click.Path(path_type=Path),
    help="A folder of kept tunings; without it the one that the settings name.",
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of text.")


@click.group()
def cache() -> None:
    """Kept tunings: list them, remove them, say where they are. Safe beside running servers.

    What a running process has read already it keeps; removed entries are tuned again by the next process that meets
    their key.
    """


@cache.command()
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print an object instead of text.")
def path(given: Path | None, as_json: bool) -> None:
    """Print the folder that the settings name (SMART_AUTOTUNE_CACHE_DIR, XDG_CACHE_HOME)."""
    root = entries.folder(given)
    if as_json:
        output.print_json({"path": str(root), "exists": root.is_dir()})
    else:
        click.echo(str(root))


@cache.command()
@click.argument("patterns", nargs=-1, metavar="[KERNEL]...")
@_folder
@_json
def ls(patterns: tuple[str, ...], given: Path | None, as_json: bool) -> None:
    """List the entries, oldest first: of each KERNEL (or file) of that name, * and ? match; all without one."""
    root = entries.folder(given)
    found = sorted(entries.read_all(root, patterns), key=lambda entry: entry.modified)
    if as_json:
        output.print_json([_object(entry) for entry in found])
        return
    if found:
        rows = [(entry.kernel, _about(entry), entries.age(entry.age_secs), f"{entry.size:,}", _name(root, entry))
                for entry in found]  # fmt: skip
        output.print_table(("kernel", "key", "age", "bytes", "file"), rows, right=("age", "bytes"))
    click.echo(f"{len(found)} entries, {sum(entry.size for entry in found):,} bytes in {root}")


@cache.command()
@click.argument("patterns", nargs=-1, metavar="KERNEL...")
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@_folder
@_json
@click.pass_context
def rm(
    context: click.Context, patterns: tuple[str, ...], everything: bool, dry_run: bool, given: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Remove the entries of each KERNEL (or file) of that name; * and ? match.

    Exit status: 0 removed, 1 some were left (being tuned, or the folder does not let us), 2 bad arguments or no match.
    """
    if bool(patterns) == everything:
        raise click.UsageError("name a KERNEL, or give --all")
    root = entries.folder(given)
    found = entries.read_all(root, patterns)
    for pattern in patterns:
        if not any(entries.matches(entry, pattern) for entry in found):
            raise BadArgument(f"no entry {pattern!r} in {root}")
    status = _remove(root, found, dry_run, as_json)
    if everything and not dry_run:
        status |= _remove_orphans(root, 0.0)
    context.exit(status)


@cache.command()
@click.option("--older-than", "age", required=True, metavar="AGE", help="A number and s, m, h, d or w: 12h, 30d.")
@click.option("--kernel", "patterns", multiple=True, metavar="PATTERN", help="Only these (* and ? match). Repeatable.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@_folder
@_json
@click.pass_context
def prune(
    context: click.Context, age: str, patterns: tuple[str, ...], dry_run: bool, given: Path | None, as_json: bool
) -> None:
    """Remove entries that were written longer ago than AGE, and what killed writers and past tunings left behind.

    Exit status: 0, 1 some were left (being tuned, or the folder does not let us), 2 bad arguments.
    """
    oldest = _seconds(age)
    root = entries.folder(given)
    found = [entry for entry in entries.read_all(root, patterns) if entry.age_secs > oldest]
    status = _remove(root, found, dry_run, as_json)
    if not dry_run and not patterns:
        status |= _remove_orphans(root, oldest)
        _sweep(root)
    context.exit(status)


# ---- removing --------------------------------------------------------------------------------------------------------


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if not found:
        raise BadArgument(f"--older-than {text!r} is not an age: a number and s, m, h, d or w, such as 12h or 30d")
    return float(found[1]) * _UNITS[found[2]]


def _remove(root: Path, found: Sequence[Entry], dry_run: bool, as_json: bool) -> int:
    fates = [(entry, "would be removed" if dry_run else _removed(entry.path)) for entry in found]
    left = [fate for _, fate in fates if fate not in ("removed", "would be removed")]
    if as_json:
        output.print_json([{**_object(entry), "fate": fate} for entry, fate in fates])
    else:
        for entry, fate in fates:
            click.echo(f"{fate}: {_name(root, entry)} ({_about(entry)})")
        done = len(fates) - len(left)
        click.echo(f"{done} entries {'would be ' if dry_run else ''}removed, {len(left)} left in {root}")
    return LEFT if left else 0


def _removed(path: Path) -> str:
    try:
        with _alone(path) as alone:
            if not alone:
                return "left, a process is tuning it"
            call_file(path).unlink(missing_ok=True)  # first: an entry that stays can be removed again
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"left, {error.strerror or error}"
    return "removed"


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody tunes the entry now; if so, nobody begins to in the scope. Makes no lock where there is none."""
    name = Path(f"{path}.lock")
    if not name.exists():
        yield True
        return
    lock = filelock.FileLock(name)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _remove_orphans(root: Path, oldest: float) -> int:
    """Removes recorded calls without their entry, of an age in seconds over ``oldest``; the exit status."""
    status = 0
    for path in [*root.glob("*.call"), *root.glob("triton-*/*.call")]:
        entry = path.with_suffix(".json")
        if not entry.exists() and _is_older(path, oldest):
            try:
                with _alone(entry) as alone:
                    if alone and not entry.exists():
                        path.unlink(missing_ok=True)
            except OSError as error:
                click.echo(f"left, {error.strerror or error}: {path.relative_to(root)}", err=True)
                status = LEFT
    return status


def _sweep(root: Path) -> None:
    """Temporary files without a writer, and locks without an entry that nobody has taken for a day."""
    for path in [*root.glob(".*.tmp"), *root.glob("triton-*/.*.tmp")]:
        if _is_older(path, _STALE_SECS):
            path.unlink(missing_ok=True)
    for path in [*root.glob("*.json.lock"), *root.glob("triton-*/*.json.lock")]:
        entry = path.with_suffix("")
        if not entry.exists() and _is_older(path, _IDLE_LOCK_SECS):
            with _alone(entry) as alone:
                if alone and not entry.exists():
                    path.unlink(missing_ok=True)


def _is_older(path: Path, secs: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > secs
    except OSError:
        return False


# ---- showing ---------------------------------------------------------------------------------------------------------


def _name(root: Path, entry: Entry) -> str:
    return str(entry.path.relative_to(root))


def _about(entry: Entry) -> str:
    if entry.record is None:
        return f"unreadable: {entry.reason}"
    return f"{entry.record.key.describe()}{'' if entry.complete else ' (unfinished)'}"


def _object(entry: Entry) -> dict[str, object]:
    record = entry.record
    return {
        "file": str(entry.path),
        "kernel": entry.kernel,
        "key": record.key.describe() if record else None,
        "bucket": record.key.bucket if record else None,
        "complete": entry.complete,
        "bytes": entry.size,
        "modified": entry.modified,
        "error": entry.reason or None,
    }
