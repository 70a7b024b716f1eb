"""Which servers are brought up, and one of them from start to end: its child process, its log, what came of it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import http_client
import server_flags as flags

if TYPE_CHECKING:
    from server_place import Place

HERE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """``caches``: the run whose caches it starts with; its own (empty) ones unless named. ``alone``: it is timed.

    ``compiled_with``: the run at the same time with which it shares compiled kernels, and no choice of a config.
    """

    name: str
    what: str
    ours: bool
    alone: bool
    over: str = "engine"  # | "http"
    pth: bool = True
    plugin: bool = True
    prefill_graphs: bool = False
    caches: str = ""
    compiled_with: str = ""
    ready_only: bool = False


RUNS = [
    Run("http-pth", "HTTP, .pth alone, cold", True, False, over="http", plugin=False),
    Run("http-stock", "HTTP, unset, cold", False, False, over="http", compiled_with="http-pth"),
    Run("engine-plugin", "plug-in alone, cold, prefill graphs", True, False, pth=False, prefill_graphs=True),
    Run("stock-cold", "unset, cold", False, True),
    Run("ours-cold", "SMART_AUTOTUNE=1, cold", True, True),
    Run("stock-warm", "unset, warm", False, True, caches="stock-cold"),
    Run("ours-warm", "SMART_AUTOTUNE=1, warm", True, True, caches="ours-cold"),
    Run("http-ours", "HTTP, SMART_AUTOTUNE=1, warm", True, False, over="http", caches="ours-cold"),
    Run("prefill-stock", "unset, warm, prefill graphs", False, True, prefill_graphs=True, caches="stock-cold"),
    Run("prefill-ours", "SMART_AUTOTUNE=1, warm, prefill graphs", True, True, prefill_graphs=True, caches="ours-cold"),
]


# A start that builds SGLang's own CUDA modules, where no other run does it; it counts for nothing.
UNMEASURED = Run("unmeasured", "a start alone, for SGLang's modules", False, False, ready_only=True)


def ready_runs(pairs: int) -> list[Run]:
    """Starts alone, with warm caches from the second pair on; who comes first changes with each pair."""
    found = []
    for number in range(pairs):
        for who in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
            what = f"{'SMART_AUTOTUNE=1' if who == 'ours' else 'unset'}, start alone"
            name = f"ready-{who}-{number}"
            found.append(Run(name, what, who == "ours", True, caches=f"ready-{who}", ready_only=True))
    return found


@dataclass
class Outcome:
    run: str
    what: str
    said: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    wall_secs: float = 0.0
    stock_tunings: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)

    def get(self, what: str, which: Any) -> dict[str, Any]:
        return next((line for line in self.said if line.get(what) == which), {})

    @property
    def ready_secs(self) -> float | None:
        return next((line["ready_secs"] for line in self.said if "ready_secs" in line), None)

    @property
    def stall_secs(self) -> float | None:
        first, batch = self.get("request", "first"), self.get("batch", 0)
        return first["secs"] + batch["secs"] if first and batch else None

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [line for line in self.said if "batch" in line]

    @property
    def tokens_per_sec(self) -> float | None:
        """Median of the batches after the first."""
        rates = self._rates()
        return statistics.median(rates) if rates else None

    @property
    def tokens_per_sec_quartiles(self) -> tuple[float, float] | None:
        """Between these is the middle half of the batches after the first."""
        rates = self._rates()
        if len(rates) < 4:
            return None
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        return low, high

    def _rates(self) -> list[float]:
        return [line["tokens"] / line["secs"] for line in self.batches if line["batch"] > 0]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for seen in self.seen for record in seen.get("records", [])]


class Server:
    """A child in a session of its own, its output in a file; ended with everything that it started."""

    def __init__(self, command: list[str], environ: dict[str, str], log: pathlib.Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, secs: float) -> int | None:
        try:
            return self.process.wait(secs)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(30)


def served(place: Place, run: Run, environ: dict[str, str], port: int, limit_secs: float) -> Outcome:
    """One server from start to end. Whatever goes wrong is in the outcome."""
    outcome, begin = Outcome(run.name, run.what), time.perf_counter()
    chosen = flags.options(str(place.model), run.prefill_graphs)
    if run.over == "http":
        command = ["-m", "sglang.launch_server", *flags.command_line(chosen, port)]
    else:
        command = [str(HERE / "engine_client.py"), str(place.model)]
        command += ["--prefill-graphs"] if run.prefill_graphs else []
        command += ["--ready-only"] if run.ready_only else []
    server = Server([str(place.python(run)), *command], environ, place.folder / "logs" / f"{run.name}.log")
    try:
        if run.over == "http":
            _over_http(server, port, outcome, environ, limit_secs)
        else:
            status = server.wait(limit_secs)
            if status != 0:
                outcome.error = f"ended with status {status}" if status is not None else f"over {limit_secs:.0f} s"
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        server.end()
    outcome.wall_secs = time.perf_counter() - begin
    read_log(server.log.read_text(errors="replace"), outcome)
    outcome.seen = [json.loads(path.read_text()) for path in sorted(answers_of(environ).glob("answer-*.json"))]
    return outcome


def answers_of(environ: dict[str, str]) -> pathlib.Path:
    return pathlib.Path(environ["OBSERVER_FOLDER"])


def _over_http(server: Server, port: int, outcome: Outcome, environ: dict[str, str], limit_secs: float) -> None:
    deadline = threading.Timer(limit_secs, server.end)
    deadline.start()
    log = NewText(server.log)

    def say(**values: Any) -> None:
        outcome.said.append(_with_prefills(values, prefills_in(log.read())))

    try:
        say(ready_secs=http_client.wait_until_ready(port, server.alive, limit_secs))
        http_client.measure(port, say)
        (answers_of(environ) / "ask").touch()
        end = time.monotonic() + 10
        while time.monotonic() < end and not list(answers_of(environ).glob("answer-*.json")):
            time.sleep(0.1)
    finally:
        deadline.cancel()


class NewText:
    """What has been written to a file since it was last read."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._read = 0

    def read(self) -> str:
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        return new.decode(errors="replace")


PREFILL = re.compile(r"Prefill batch\b.*?#new-seq: (\d+)")


def prefills_in(text: str) -> list[int]:
    """The new sequences of each prefill that SGLang's log tells of, in order."""
    return [int(count) for count in PREFILL.findall(text)]


def _with_prefills(said: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """A batch's line with what it was prefilled in; all of it was before the batch was answered."""
    return {**said, "prefills": sizes} if "batch" in said else said


STOCK_TUNING = re.compile(
    r"Triton autotuning for function (\S+),\s+with key as (.*?),\s+finished after ([\d.]+)s,"
    r"\s+best config selected: (.*?);",
    re.DOTALL,
)
NOTABLE = re.compile(r"smart_autotune|: tuned \[|cold key|Traceback|[Cc]apture.*(failed|error)|Error:", re.IGNORECASE)


def read_log(text: str, outcome: Outcome) -> None:
    sizes: list[int] = []
    for line in text.splitlines():
        sizes += prefills_in(line)
        if line.startswith("## "):
            outcome.said.append(_with_prefills(json.loads(line[3:]), sizes))
            sizes = []
        elif NOTABLE.search(line) and len(outcome.warnings) < 40:
            outcome.warnings.append(line[:400])
    names = ("kernel", "key", "secs", "winner")
    outcome.stock_tunings = [dict(zip(names, found)) for found in STOCK_TUNING.findall(text)]
