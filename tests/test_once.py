"""A warning an operator must act on is said once a process."""

from __future__ import annotations

import threading

import pytest

from smart_autotune import once


def test_it_is_said_once_for_each_thing_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    once.forget()
    for about in ("disk", ("file", 1), ("file", 2)) * 3:
        once.warn_once(about, "%s: %s", about, "full")
    assert [record.getMessage() for record in caplog.records] == [
        "disk: full", "('file', 1): full", "('file', 2): full",
    ]  # fmt: skip
    once.forget()
    once.warn_once("disk", "again")
    assert caplog.records[-1].getMessage() == "again"
    once.forget()


def test_of_many_threads_one_says_it(caplog: pytest.LogCaptureFixture) -> None:
    once.forget()
    threads = [threading.Thread(target=once.warn_once, args=("disk", "full")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1
    once.forget()
