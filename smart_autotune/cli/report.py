"""``smart-autotune report``: what was tuned, from the folder of kept tunings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from smart_autotune.cli import entries, output
from smart_autotune.cli.entries import Entry
from smart_autotune.report import render_record, shorten
from smart_autotune.verdict import OVER_LIMIT, TuningRecord, Verdict, describe


@click.command()
@click.argument("cache_dir", required=False, type=click.Path(path_type=Path))
@click.option("--kernel", "patterns", multiple=True, metavar="PATTERN", help="Only these (* and ? match). Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, one for each tuning.")
@click.option("-v", "--verbose", is_flag=True, help="Also each tuning's table of configs.")
def report(cache_dir: Path | None, patterns: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """What was tuned: kernel, key, batch bucket, winner, its spread, and why configs were dropped.

    CACHE_DIR: a folder of kept tunings; without it the one that the settings name.

    Exit status: 0, or 2 for bad arguments.
    """
    root = entries.folder(cache_dir)
    found = entries.read_all(root, patterns)
    if as_json:
        output.print_json([_object(entry) for entry in found])
        return
    readable = sorted((entry for entry in found if entry.record), key=_order)
    if readable:
        _print_table(readable)
        for line in _dropped(readable):
            click.echo(line)
    if verbose:
        for entry in readable:
            assert entry.record is not None
            click.echo(f"\n{entry.path}")
            click.echo(render_record(entry.record, color=output.color()), color=output.color())
    for entry in found:
        if entry.record is None:
            click.echo(f"{entry.path}: not an entry that can be read: {entry.reason}")
    click.echo(f"{len(readable)} tunings of {len({e.kernel for e in readable})} kernels in {root}")


def _order(entry: Entry) -> Any:
    record = entry.record
    assert record is not None
    return record.kernel, [*map(repr, record.key.rest)], record.key.bucket or 0


def _print_table(found: Sequence[Entry]) -> None:
    headings = ("kernel", "key", "bucket", "winner", "median us", "spread us", "fit", "dropped")
    rows = []
    for entry in found:
        record = entry.record
        assert record is not None
        winner, fitting = record.winner, sum(verdict.fits for verdict in record.verdicts)
        rows.append((
            record.kernel, _key_without_batch(record), "" if record.key.bucket is None else str(record.key.bucket),
            _winner(entry), _us(winner.median_us if winner else None), _spread(winner),
            f"{fitting}/{len(record.verdicts)}", str(len(record.verdicts) - fitting),
        ))  # fmt: skip
    output.print_table(headings, rows, right=("bucket", "median us", "fit", "dropped"))


def _key_without_batch(record: TuningRecord) -> str:
    return record.key.rest.describe()


def _winner(entry: Entry) -> str:
    record = entry.record
    assert record is not None
    if not entry.complete:
        return "(unfinished)"
    return shorten(record.winner.config) if record.winner else "(none)"


def _us(value: float | None) -> str:
    return "not timed" if value is None else f"{value:,.1f}"


def _spread(winner: Verdict | None) -> str:
    if winner is None or winner.spread_us is None:
        return ""
    return f"{winner.spread_us[0]:,.1f}..{winner.spread_us[1]:,.1f}"


def _dropped(found: Sequence[Entry]) -> Iterator[str]:
    """For each kernel: why configs were dropped, each reason once with how many verdicts it met."""
    by_kernel: dict[str, Counter[str]] = {}
    for entry in found:
        record = entry.record
        assert record is not None
        counts = by_kernel.setdefault(record.kernel, Counter())
        counts.update(_reason(verdict) for verdict in record.verdicts if not verdict.fits)
    for kernel, counts in by_kernel.items():
        for reason, count in counts.most_common():
            yield f"{kernel}: dropped {count} x {reason}"


def _reason(verdict: Verdict) -> str:
    if verdict.outcome in OVER_LIMIT and verdict.need is not None and verdict.limit is not None:
        return (
            f"{verdict.outcome}: {shorten(verdict.config)} needs {verdict.need:,} of {verdict.limit:,} {verdict.unit}"
        )
    return f"{verdict.outcome}{f': {verdict.detail}' if verdict.detail else ''}"


def _object(entry: Entry) -> dict[str, Any]:
    record = entry.record
    if record is None:
        return {"file": str(entry.path), "kernel": entry.kernel, "error": entry.reason}
    winner = record.winner
    return {
        "file": str(entry.path),
        "kernel": record.kernel,
        "key": record.key.describe(),
        "bucket": record.key.bucket,
        "complete": entry.complete,
        "served_by": record.served_by,
        "created": record.created,
        "winner": describe(winner.config) if winner else None,
        "median_us": winner.median_us if winner else None,
        "spread_us": list(winner.spread_us) if winner and winner.spread_us else None,
        "compile_secs": record.compile_secs,
        "timing_secs": record.timing_secs,
        "notes": list(record.notes),
        "environment": dict(entry.environment or {}),
        "configs": [
            {
                "config": describe(verdict.config),
                "outcome": str(verdict.outcome),
                "reason": verdict.detail,
                "need": verdict.need,
                "limit": verdict.limit,
                "unit": verdict.unit,
                "registers": verdict.registers,
                "spill_bytes": verdict.spill_bytes,
                "median_us": verdict.median_us,
            }
            for verdict in record.verdicts
        ],
    }
