"""Brings up ``sglang.Engine`` on a model, times the first requests and batches of 64, and says so in JSON lines.

    python engine_client.py MODEL_FOLDER [--prefill-graphs] [--ready-only]

Started by ``serve.py``, which reads the lines that begin with ``##``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import server_flags as flags
import sglang_observer

BATCHES = 15  # after the first, which compiles and tunes
FEWEST = 5
BATCHES_SECS = 30.0  # no batch beyond the fewest is begun after that


def say(**values: Any) -> None:
    print("## " + json.dumps(values), flush=True)


def digest(outputs: list[dict[str, Any]]) -> str:
    return hashlib.sha1(json.dumps([output["output_ids"] for output in outputs]).encode()).hexdigest()[:12]


def main() -> None:
    start = time.perf_counter()
    import sglang

    imported = time.perf_counter()
    engine = sglang.Engine(**flags.options(sys.argv[1], "--prefill-graphs" in sys.argv), log_level="info")
    ready = time.perf_counter()
    say(import_secs=imported - start, engine_secs=ready - imported, ready_secs=ready - start)
    if "--ready-only" in sys.argv:
        os._exit(0)

    def timed(requests: Any, sampling: dict[str, Any] = flags.SAMPLING) -> tuple[float, Any]:
        begin = time.perf_counter()
        outputs = engine.generate(input_ids=requests, sampling_params=sampling)
        return time.perf_counter() - begin, outputs

    for which in ("first", "second", "third"):
        secs, output = timed(flags.ONE)
        say(request=which, secs=secs, tokens=output["output_ids"])

    def batch(number: int) -> None:
        secs, outputs = timed(flags.MANY)
        say(batch=number, secs=secs, tokens=sum(len(one["output_ids"]) for one in outputs), digest=digest(outputs))

    batch(0)
    begin = time.perf_counter()
    for number in range(1, 1 + BATCHES):
        if number <= FEWEST or time.perf_counter() - begin < BATCHES_SECS:
            batch(number)
    for length, rows in ((2048, 1), (512, 8)):
        prompts = [[(i * 13 + row) % 1000 + 3 for i in range(length)] for row in range(rows)]
        secs, _ = timed(prompts, {**flags.SAMPLING, "max_new_tokens": 4})
        say(prefill=f"{rows} x {length}", secs=secs)
    sglang_observer.ask()
    os._exit(0)  # ``serve.py`` ends the other processes: quicker than a shutdown, and the same for every run


if __name__ == "__main__":
    main()
