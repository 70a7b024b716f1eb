"""Writers killed at every step of a save: a reader never sees less than what the last finished save left."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smart_autotune import once, store
from smart_autotune.store import Store
from support.killed_writers import TORN, killed_while, save, save_until, seen_by_a_reader
from support.stored import key, record

KILLS = 1000


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    once.forget()
    yield
    once.forget()


def test_a_thousand_writers_killed_between_write_and_rename_lose_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.killed_writers", str(tmp_path), str(KILLS)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")  # a warning would stand there
    found = re.fullmatch(r"kills=(\d+) finished=(\d+) last=(\d+)\n", done.stdout)
    assert found is not None and int(found[1]) == KILLS and int(found[3]) > 1
    assert len(list(tmp_path.rglob("*.json"))) == 1 and len(list(tmp_path.rglob(".*.tmp"))) > KILLS // 4


def test_what_they_left_behind_is_removed_by_a_later_save(tmp_path: Path) -> None:
    for generation in range(20):
        assert killed_while(lambda now=generation: save_until(TORN, tmp_path, now))  # type: ignore[misc]
    left = list(tmp_path.rglob(".*.tmp"))
    assert len(left) == 20
    for path in left:
        os.utime(path, (time.time() - 2 * store._STALE_SECS,) * 2)
    Store(tmp_path).save(record(key()))
    assert not list(tmp_path.rglob(".*.tmp")) and seen_by_a_reader(tmp_path) == 1


def test_a_reader_beside_writers_killed_at_any_moment_sees_whole_entries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    numbers = random.Random(6)
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                for generation in range(1, 1_000_000):
                    save(tmp_path, generation)
            finally:
                os._exit(2)
        until = time.monotonic() + numbers.uniform(0.01, 0.08)
        while time.monotonic() < until:
            assert seen_by_a_reader(tmp_path) >= 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert seen_by_a_reader(tmp_path) >= 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
