"""Looks into SGLang's scheduler process: what was tuned there, served cold, captured; written out when asked.

``serve.py`` installs it as a plug-in of ``sglang.srt.plugins`` under the name ``observer``. It tunes nothing and
replaces nothing of ours. ``OBSERVER_FOLDER``: where the request and the answers are; unset, it does nothing.
``OBSERVER_LAUNCHES=1``: also counts launches during captures (a hook at every launch: not for timed runs).
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from collections import Counter
from typing import Any

POLL_SECS = 0.25
ANSWER_SECS = 15.0
_captures: Counter[str] = Counter()
_launches: Counter[str] = Counter()


def _folder() -> pathlib.Path | None:
    name = os.environ.get("OBSERVER_FOLDER")
    return pathlib.Path(name) if name else None


def activate() -> None:
    """The plug-in. Only a child process is watched: the scheduler is one, and it launches the kernels."""
    folder = _folder()
    if folder is None or multiprocessing.parent_process() is None:
        return
    _count_captures()
    if os.environ.get("OBSERVER_LAUNCHES") == "1":
        _count_launches_while_capturing()
    threading.Thread(target=_answer_when_asked, args=(folder,), name="observer", daemon=True).start()


def ask() -> None:
    """Asks every watched process, and waits for the first answer."""
    folder = _folder()
    if folder is None:
        return
    (folder / "ask").touch()
    end = time.monotonic() + ANSWER_SECS
    while time.monotonic() < end and not list(folder.glob("answer-*.json")):
        time.sleep(0.05)


def _answer_when_asked(folder: pathlib.Path) -> None:
    while not (folder / "ask").exists():
        time.sleep(POLL_SECS)
    try:
        content = seen()
    except Exception as error:
        content = {"error": f"{type(error).__name__}: {error}"}
    temporary = folder / f"{os.getpid()}.part"
    temporary.write_text(json.dumps(content, default=str))
    temporary.rename(folder / f"answer-{os.getpid()}.json")


def seen() -> dict[str, Any]:
    content: dict[str, Any] = {
        "captures": dict(_captures),
        "launches_while_capturing": dict(_launches),
        "our_modules": sorted(name for name in sys.modules if name.split(".")[0] == "smart_autotune"),
    }
    if "smart_autotune.history" in sys.modules:
        import smart_autotune

        status = smart_autotune.status()
        content |= {
            "enabled": status.enabled,
            "conflicts": [str(conflict) for conflict in status.conflicts],
            "tuners": [status.tuners_before, status.tuners_after],
            "status": str(status).splitlines(),
            "coverage": dataclasses.asdict(smart_autotune.coverage()),
            "cold_keys": [f"{key.kernel}: {key.describe()}" for key in smart_autotune.cold_keys()],
            "records": [_plain(record) for record in smart_autotune.records()],
        }
    return content


def _plain(record: Any) -> dict[str, Any]:
    from smart_autotune.verdict import describe

    fields = ("need", "limit", "unit", "detail", "median_us", "registers", "spill_bytes", "compile_secs")
    return {
        "kernel": record.kernel,
        "key": record.key.describe(),
        "batch": record.batch,
        "served_by": record.served_by,
        "compile_secs": record.compile_secs,
        "timing_secs": record.timing_secs,
        "notes": list(record.notes),
        "verdicts": [
            {"config": describe(v.config), "outcome": str(v.outcome)}
            | {name: getattr(v, name) for name in fields if getattr(v, name) not in (None, "")}
            for v in record.verdicts
        ],
    }


def _count_captures() -> None:
    import torch

    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    def counted_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _captures["begun"] += 1
        return begin(self, *args, **kwargs)

    def counted_end(self: Any) -> Any:
        result = end(self)
        _captures["ended"] += 1
        return result

    graph.capture_begin, graph.capture_end = counted_begin, counted_end  # type: ignore[method-assign]


def _count_launches_while_capturing() -> None:
    import torch
    from triton import knobs

    def enter(metadata: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            _launches[str(metadata.get().get("name"))] += 1

    knobs.runtime.launch_enter_hook.add(enter)
