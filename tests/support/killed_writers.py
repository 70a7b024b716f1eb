"""Writers killed at every step of a save, with a reader beside them. A program of its own: a small process forks fast.

python -m support.killed_writers FOLDER KILLS
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smart_autotune import entry, identity, store
from smart_autotune.store import Store
from support.stored import CONFIGS, LIMITS, key, record

TORN = 3  # the step at which half of the bytes get into the file
STEPS = 7


def killed_while(work: Callable[[], None]) -> bool:
    """Runs ``work`` in a forked child that kills itself in the middle of it; False: it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def save_until(step: int, folder: Path, generation: int) -> None:
    """Saves, and is killed before the ``step``-th line that writing the file executes."""
    left, write = [step], store._write

    def at_each_line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return at_each_line

    def traced(path: Path, data: bytes) -> None:
        sys.settrace(lambda frame, event, argument: at_each_line if frame.f_code is write.__code__ else None)
        write(path, data)
        sys.settrace(None)

    def torn(*args: Any) -> Any:
        file = open(*args)  # noqa: SIM115  # its user closes it
        file.write(b'{"format": 1, "key": {')
        file.flush()
        return file

    store._write = traced
    if step == TORN:
        store.open = torn  # type: ignore[attr-defined]
    save(folder, generation)


def save(folder: Path, generation: int) -> None:
    Store(folder).save(record(key(), (float(generation), 1e6, 2e6, 3e6)))


def seen_by_a_reader(folder: Path) -> int:
    found = Store(folder).load(key(), CONFIGS, LIMITS)
    assert found is not None and len(found.verdicts) == 4
    assert found.verdicts[0].median_us is not None
    return int(found.verdicts[0].median_us)


def main(folder: Path, wanted: int) -> None:
    numbers = random.Random(5)
    save(folder, 1)
    last, kills, generation = 1, 0, 1
    while kills < wanted:
        generation += 1
        step = numbers.randrange(STEPS)
        killed = killed_while(lambda step=step, now=generation: save_until(step, folder, now))  # type: ignore[misc]
        kills += killed
        seen = seen_by_a_reader(folder)
        assert seen in (last, generation) if killed else seen == generation, (seen, last, generation, step)
        last = seen
    print(f"kills={kills} finished={generation - 1 - kills} last={last}")


if __name__ == "__main__":
    here = {"triton": "3.6.0"}
    for module in (identity, entry):
        module.environment = lambda: here  # it asks torch, which would make this process large
    gc.freeze()
    main(Path(sys.argv[1]), int(sys.argv[2]))
