"""What a person sees of a long sweep."""

from __future__ import annotations

import io

import pytest

from smart_autotune import progress
from smart_autotune.progress import watching


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_every_few_seconds_and_not_more_often(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    caplog.set_level("INFO", logger="smart_autotune")
    with watching("kernel", 3) as watch:
        due = []
        for secs in (1.0, 4.5, 1.0):
            now[0] += secs
            due.append(watch.is_due("BLOCK=64"))
    assert due == [False, True, False]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "kernel: 2 of 3 configs compiled, last [BLOCK=64]"


def test_a_terminal_gets_a_bar_and_a_log_file_does_not(monkeypatch):
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with watching("kernel", 3) as watch:
            watch.is_due("BLOCK=64")
        assert ("compiling" in stream.getvalue()) is expected


def test_the_bar_ends_where_the_sweep_fails(monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", Terminal())
    with pytest.raises(RuntimeError), watching("kernel", 3):
        raise RuntimeError("the sweep failed")
    with watching("kernel", 3) as watch:  # rich allows one live display at a time
        watch.is_due("BLOCK=64")


def test_without_standard_error_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", None)
    with watching("kernel", 3) as watch:
        assert watch.is_due("BLOCK=64") is False


def test_two_sweeps_at_once_share_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    with watching("first", 3) as one, watching("second", 3) as other:
        one.is_due("BLOCK=64")
        other.is_due("BLOCK=64")
    assert "first: compiling" in terminal.getvalue() and "second: compiling" not in terminal.getvalue()
