"""Verdicts as tables and lines of text. Renders to ``str``; printing is the caller's."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smart_autotune.key import TuningKey
from smart_autotune.verdict import FITS, OVER_LIMIT, Outcome, TuningRecord, Verdict, describe

if TYPE_CHECKING:
    from smart_autotune.audit import Audit

PIPED_COLUMNS = 120  # what a log or a file gets when nothing says how wide it is
_NUMBERS = ("need", "limit", "registers", "spill\nbytes")


def terminal_columns() -> int:
    """Width to render for: ``COLUMNS``, else the terminal's, else one that suits a log."""
    return shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns


def printable(text: str) -> str:
    """Text of a file on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def render_audit(audit: Audit, columns: int | None = None, color: bool = False) -> str:
    """One kernel, arch and example: the arch's cap, a row for each config, what fits and what was dropped."""
    device = audit.limits
    what_if = " (what-if)" if device.what_if else ""
    head = (
        f"{audit.kernel} on {device.arch}, {audit.call} {audit.example}: "
        f"{device.shared_bytes:,} bytes of shared memory a block{what_if}"
    )
    parts = [head, _table(audit.verdicts, columns or terminal_columns(), color)]
    parts += [*_reasons(audit.verdicts), *audit.notes, summary(audit.verdicts)]
    return "\n".join(parts) + "\n"


def explain(
    kernel: str,
    records: Sequence[TuningRecord],
    cold: Sequence[TuningKey] = (),
    columns: int | None = None,
    color: bool = False,
) -> str:
    """The last tuning of ``kernel`` as a table with each config's time; then the keys that were served cold."""
    if records:
        parts = _record(records[-1], columns or terminal_columns(), color)
        if len(records) > 1:
            parts.append(f"the last of {len(records)} tuned keys")
    else:
        parts = [f"{kernel}: nothing tuned yet"]
    parts += [f"served cold: {key.describe()}" for key in cold]
    return "\n".join(parts) + "\n"


def render_record(record: TuningRecord, columns: int | None = None, color: bool = False) -> str:
    """One tuning: a row for each config, its time, why it was dropped, what the tuning took."""
    return "\n".join(_record(record, columns or terminal_columns(), color))


def _record(record: TuningRecord, columns: int, color: bool) -> list[str]:
    head = [f"{record.kernel}: {record.key.describe()}"]
    if record.batch:
        head.append(f"batch: {record.batch}")
    spent = f"served by {record.served_by}; {record.compile_secs:.2f} s compiling, {record.timing_secs:.2f} s timing"
    table = _table(record.verdicts, columns, color, timed=True)
    return [*head, table, *_reasons(record.verdicts), *record.notes, summary(record.verdicts), spent]


def summary(verdicts: Sequence[Verdict]) -> str:
    """One line: how many were offered, how many fit, what was dropped and why, the smallest need."""
    fitting = sum(verdict.fits for verdict in verdicts)
    line = f"{len(verdicts)} offered, {fitting} fit"
    dropped = Counter(str(verdict.outcome) for verdict in verdicts if not verdict.fits)
    if dropped:
        line += "; dropped: " + ", ".join(f"{count} {outcome}" for outcome, count in dropped.most_common())
    needs = [verdict for verdict in verdicts if verdict.need is not None and verdict.unit == "bytes"]
    if needs:
        least = min(needs, key=lambda verdict: verdict.need or 0)
        line += f"; smallest need {least.need:,} of {least.limit:,} bytes"
    return line


def _table(verdicts: Sequence[Verdict], columns: int, color: bool, timed: bool = False) -> str:
    """The table at full length where it fits in ``columns``, else with configs written short."""
    for short in (False, True):
        table = _build(verdicts, short, timed)
        if Console(width=10_000).measure(table).maximum <= columns:
            break
    console = Console(
        file=io.StringIO(), width=columns, force_terminal=color, color_system="standard" if color else None
    )
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO from above
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _build(verdicts: Sequence[Verdict], short: bool, timed: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if short else 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("config", overflow="fold")
    for name in _NUMBERS:
        table.add_column("regs" if short and name == "registers" else name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("over by", justify="right", no_wrap=True)
    if timed:
        table.add_column("median\nus", justify="right", no_wrap=True)
    for verdict in verdicts:
        table.add_row(*_cells(verdict, short, timed))
    return table


def _cells(verdict: Verdict, short: bool, timed: bool) -> list[Text]:
    over = verdict.excess if verdict.outcome in OVER_LIMIT else None
    cells = [
        Text(shorten(verdict.config) if short else describe(verdict.config)),
        Text(_number(verdict.need)),
        Text(_number(verdict.limit)),
        Text(_number(verdict.registers)),
        Text(_number(verdict.spill_bytes)),
        Text(_word(verdict), style=_style(verdict)),
        Text(_number(over)),
    ]
    if timed:
        cells.append(Text("" if verdict.median_us is None else f"{verdict.median_us:,.1f}"))
    return cells


def shorten(config: triton.Config) -> str:
    """A config in few letters: ``BLOCK_T=16 w4 s2`` (warps, stages)."""
    parts = [f"{name}={value}" for name, value in config.kwargs.items()]
    parts += [f"w{config.num_warps}", f"s{config.num_stages}"]
    if config.num_ctas not in (None, 1):
        parts.append(f"ctas{config.num_ctas}")
    if config.maxnreg is not None:
        parts.append(f"regs<={config.maxnreg}")
    return " ".join(parts)


def _word(verdict: Verdict) -> str:
    return "fits" if verdict.outcome is Outcome.NOT_TIMED else str(verdict.outcome)


def _style(verdict: Verdict) -> str:
    if verdict.outcome in FITS:
        return "green"
    return "red" if verdict.outcome in OVER_LIMIT else "yellow"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """What the table's numbers do not say: each failure's text once, with how many configs it met."""
    met = Counter(
        (str(verdict.outcome), verdict.detail)
        for verdict in verdicts
        if verdict.detail and not verdict.fits and verdict.outcome not in OVER_LIMIT
    )
    units = {str(verdict.outcome): verdict.unit for verdict in verdicts if verdict.unit not in (None, "bytes")}
    lines = [f"{outcome}: need, limit and excess in {unit}" for outcome, unit in units.items()]
    return lines + [f"{outcome} ({count}): {detail}" for (outcome, detail), count in met.items()]
