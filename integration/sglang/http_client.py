"""Waits for a server on loopback, then sends it the requests of ``server_flags``. Used by ``serve.py``."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import server_flags as flags

REQUEST_SECS = 150.0
BATCHES = 8  # requests arrive in another order, and so are prefilled in other parts, each time


def wait_until_ready(port: int, alive: Callable[[], bool], limit_secs: float) -> float:
    """Seconds until ``/health`` answers 200. RuntimeError when the server ends or the limit is reached first."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < limit_secs:
        if not alive():
            raise RuntimeError("the server ended before it was ready")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                if answer.status == 200:
                    return time.perf_counter() - begin
        except OSError:  # not listening yet, or 503 while it starts
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {limit_secs:.0f} s")


def generate(port: int, tokens: list[int]) -> list[int]:
    body = json.dumps({"input_ids": tokens, "sampling_params": flags.SAMPLING}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_SECS) as answer:
        output: list[int] = json.load(answer)["output_ids"]
    return output


def measure(port: int, say: Callable[..., None]) -> None:
    """The same lines as ``engine_client`` says."""
    for which in ("first", "second"):
        begin = time.perf_counter()
        tokens: Any = generate(port, flags.ONE)
        say(request=which, secs=time.perf_counter() - begin, tokens=tokens)
    with ThreadPoolExecutor(flags.BATCH) as pool:
        for number in range(BATCHES):
            begin = time.perf_counter()
            outputs = list(pool.map(lambda one: generate(port, one), flags.MANY))
            secs = time.perf_counter() - begin
            digest = hashlib.sha1(json.dumps(outputs).encode()).hexdigest()[:12]
            say(batch=number, secs=secs, tokens=sum(map(len, outputs)), digest=digest)
