"""SGLang with a tiny model, unset and with SMART_AUTOTUNE=1, cold and warm, side by side in one run.

    python integration/sglang/serve.py --kit kit-kimi.tgz [--runs a,b,...] [--json PATH] [--budget-secs N]
    python integration/sglang/serve.py --server minimax --kit kit-minimax.tgz ...

``kimi``: SGLang 0.5.14 and Kimi-Linear with seeded weights; its autotuned kernels are in eager prefill. ``minimax``:
SGLang 0.5.17 and MiniMax-M3 with dummy weights; its autotuned kernels are in the decode graphs as well, with a batch
bucket in the key. Bounds and tokens (``server_checks``) are checked for ``kimi``.

Needs a Hopper GPU, the archive of ``build_kit.sh``, torch and triton; no network. ``--list`` shows the runs. The
runs whose times count come one after the other; the others, which show that it works, at the same time as each other
and first, which also builds SGLang's own CUDA modules. Results are written after each run. Exits 1 when a run failed,
a bound was missed or tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))

import server_flags as flags
from common import environment, print_table
from server_checks import compared, http_tokens, prefilled, problems_of
from server_place import Place, start_cost
from server_runs import HERE, RUNS, UNMEASURED, Outcome, Run, Server, ready_runs, served

RUN_SECS = {"kimi": 260.0, "minimax": 420.0}  # one server from start to end
CHECKS = {"op-check": "op_check.py", "capture-check": "capture_check.py"}
CHECK_SECS = 180.0
TIMED_RUNS = "stock-cold,ours-cold,stock-warm,ours-warm"
DEFAULT_RUNS = {
    "kimi": f"op-check,capture-check,http-pth,http-stock,engine-plugin,{TIMED_RUNS}",
    "minimax": f"http-pth,{TIMED_RUNS}",
}
WORK = "/tmp/smart_autotune_sglang"


# ---- results ---------------------------------------------------------------------------------------------------


class Results:
    """Kept on disk from the first run on, so that a run cut short has what it had."""

    def __init__(self, server: str, path: str | None) -> None:
        self._server = server
        self._path = pathlib.Path(path) if path else None
        self._environment = {**_environment(), "sglang": flags.RELEASES[server], "server": server}
        self.outcomes: dict[str, Outcome] = {}
        self.problems: dict[str, list[str]] = {}
        self.start_ms: dict[str, float] = {}
        self._lock = threading.Lock()  # runs that go on at the same time end here

    def add(self, run: Run, outcome: Outcome) -> None:
        with self._lock:
            self._add(run, outcome)

    def checked(self, outcome: Outcome) -> None:
        """A script that says by its exit status whether all holds."""
        with self._lock:
            self.outcomes[outcome.run] = outcome
            self.problems[outcome.run] = [outcome.error] if outcome.error else []
            print(f"{outcome.run}: {outcome.error or 'holds'} ({outcome.wall_secs:.0f} s)", flush=True)
            self.write()

    def _add(self, run: Run, outcome: Outcome) -> None:
        self.outcomes[run.name] = outcome
        self.problems[run.name] = problems_of(self._server, run, outcome)
        figures = (outcome.ready_secs, outcome.stall_secs, outcome.tokens_per_sec, outcome.wall_secs)
        ready, stall, rate, wall = ("-" if value is None else f"{value:,.2f}" for value in figures)
        print(f"{run.name}: ready {ready} s, stall {stall} s, {rate} tokens/s, {wall} s in all", flush=True)
        for problem in self.problems[run.name]:
            print(f"  PROBLEM {problem}", flush=True)
        self.write()

    def write(self) -> None:
        if self._path is None:
            return
        content = {
            "environment": self._environment,
            "compared": compared(self._server, self.outcomes),
            "http_tokens": http_tokens(self._server, self.outcomes),
            "problems": {name: found for name, found in self.problems.items() if found},
            "python_start_ms": self.start_ms,
            "runs": {
                name: {
                    "ready_secs": one.ready_secs,
                    "stall_secs": one.stall_secs,
                    "tokens_per_sec": one.tokens_per_sec,
                    "tokens_per_sec_quartiles": one.tokens_per_sec_quartiles,
                    **asdict(one),
                }
                for name, one in self.outcomes.items()
            },
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=1, default=str) + "\n")

    def show(self) -> bool:
        """The tables; whether everything holds."""
        tuned = [_tuned_row(record) for record in (self.outcomes.get("ours-cold") or Outcome("", "")).records]
        if tuned:
            head = ("kernel", "configs", "dropped or lost", "by", "compile s", "timing s")
            print_table("tuned in ours-cold", [head, *tuned])
        checks = [("run", "what", "holds")]
        checks += [
            (name, one.what, "; ".join(self.problems[name])[:160] or "yes") for name, one in self.outcomes.items()
        ]
        print_table("runs", checks)
        tokens = self._show_http_tokens()
        bounds = compared(self._server, self.outcomes)
        if self.start_ms:
            print_table("a Python start, ms", [("", "median"), *((n, f"{v:.2f}") for n, v in self.start_ms.items())])
        head = ("figure", "caches", "stock", "ours", "ratio", "bound", "met", "stock's quartiles", "ours")
        print_table("against stock, this run", [head, *map(_figure_row, bounds)])
        return not any(self.problems.values()) and not tokens and all(row.get("met", True) for row in bounds)

    def _show_http_tokens(self) -> list[str]:
        """What is wrong with them."""
        rows = [
            (name, str(line["batch"]), prefilled(line), line["digest"])
            for name, one in self.outcomes.items()
            if name.startswith("http-")
            for line in one.batches
        ]
        if rows:
            print_table("over HTTP", [("run", "batch", "prefilled as", "digest of tokens"), *rows])
        found = http_tokens(self._server, self.outcomes)
        for kind, lines in found.items():
            for line in lines:
                print(f"  {'PROBLEM' if kind == 'problems' else 'note:'} {line}", flush=True)
        return found["problems"]


def _tuned_row(record: dict[str, Any]) -> tuple[str, ...]:
    lost = [v["outcome"] for v in record["verdicts"] if v["outcome"] not in ("WON", "SLOWER")]
    told = ", ".join(f"{lost.count(name)} {name}" for name in sorted(set(lost))) or "none"
    times = (f"{record['compile_secs']:.1f}", f"{record['timing_secs']:.1f}")
    return record["kernel"], str(len(record["verdicts"])), told, record["served_by"], *times


def _figure_row(row: dict[str, Any]) -> tuple[str, ...]:
    values = ("-" if row[who] is None else f"{row[who]:,.2f}" for who in ("stock", "ours"))
    ratio = f"{row['ratio']:.3f}" if "ratio" in row else "-"
    met = {True: "yes", False: "NO"}.get(row.get("met"), "-")  # type: ignore[arg-type]
    if met == "NO" and row.get("apart") is False:
        met = "NO, ranges overlap"
    spreads = (row.get(f"{who}_quartiles") for who in ("stock", "ours"))
    ranges = (f"{spread[0]:,.0f} to {spread[1]:,.0f}" if spread else "-" for spread in spreads)
    return row["figure"], row["caches"], *values, ratio, row.get("bound", "-"), met, *ranges


def _environment() -> dict[str, str]:
    try:
        return environment()
    except (RuntimeError, AssertionError) as error:  # no GPU: nothing was measured, the failures are still worth it
        return {"no GPU": str(error)}


# ---- main --------------------------------------------------------------------------------------------------------


def main() -> int:
    options = arguments()
    names = [name for name in (options.runs or DEFAULT_RUNS[options.server]).split(",") if name != "none"]
    known = [*CHECKS, *(run.name for run in RUNS)]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no run is called {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    end = time.perf_counter() + options.budget_secs
    wheel = pathlib.Path(options.wheel).resolve() if options.wheel else None
    folder = pathlib.Path(options.work).resolve() / options.server
    place = Place(folder, pathlib.Path(options.kit), wheel, options.server)
    results = Results(options.server, options.json)
    results.start_ms = start_cost(place)
    chosen = [run for run in RUNS if run.name in names]
    first = [run for run in chosen if not run.alone and not run.caches]
    if options.ready_pairs and not first and not place.has_modules:
        first = [UNMEASURED]

    def serve(run: Run, port: int = options.port, environ: dict[str, str] | None = None) -> None:
        left = min(RUN_SECS[options.server], end - time.perf_counter())
        missing = run.caches and not run.ready_only and not (place.folder / "caches" / run.caches).exists()
        if left < 20 or missing:
            why = f"the caches of {run.caches} are not there" if missing else "the time budget is spent"
            results.add(run, Outcome(run.name, run.what, error=f"not run: {why}"))
            return
        results.add(run, served(place, run, environ or place.environ(run), port, left))

    jobs = [partial(check, place, results, name, options.json) for name in names if name in CHECKS]
    for number, run in enumerate(first):  # one empties its caches before another, that shares them, has started
        jobs.append(partial(serve, run, options.port + 100 * number, place.environ(run)))
    try:
        together(jobs)
        for run in [*(one for one in chosen if one not in first), *ready_runs(options.ready_pairs)]:
            serve(run)
    finally:
        if options.logs and (place.folder / "logs").exists():
            shutil.copytree(place.folder / "logs", options.logs, dirs_exist_ok=True)
    return 0 if results.show() else 1


def check(place: Place, results: Results, name: str, json_path: str | None) -> None:
    """One of the scripts beside this one, in the place where SGLang and our wheel are installed."""
    script = CHECKS[name]
    command = [str(place.installed), str(HERE / script)]
    if json_path:
        command += ["--json", str(pathlib.Path(json_path).resolve().with_name(pathlib.Path(script).stem + ".json"))]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SMART_AUTOTUNE")}
    environ |= {"PYTHONPATH": str(place.site), "TRITON_CACHE_DIR": str(place.folder / "caches" / name)}
    outcome, begin = Outcome(name, script), time.perf_counter()
    server = Server(command, environ, place.folder / "logs" / f"{name}.log")
    try:
        status = server.wait(CHECK_SECS)
        if status != 0:
            outcome.error = f"status {status}: " + " | ".join(server.log.read_text(errors="replace").splitlines()[-6:])
    finally:
        server.end()
    outcome.wall_secs = time.perf_counter() - begin
    results.checked(outcome)


def together(jobs: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        for waiting in [pool.submit(job) for job in jobs]:
            waiting.result()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=sorted(flags.RELEASES), default="kimi")
    parser.add_argument("--kit", help="archive of build_kit.sh")
    parser.add_argument("--wheel", help="our wheel; built from this checkout when not given")
    parser.add_argument("--work", default=WORK, help="folder for everything unpacked and cached")
    parser.add_argument("--runs", help=f"comma-separated, or none; default: {DEFAULT_RUNS['kimi']}")
    parser.add_argument("--ready-pairs", type=int, default=0, help="so many starts alone of each, after the runs")
    parser.add_argument("--json", help="where the results go")
    parser.add_argument("--logs", help="folder for the servers' logs")
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--budget-secs", type=float, default=1200.0, help="runs that do not fit are not started")
    parser.add_argument("--list", action="store_true", help="show the runs and end")
    options = parser.parse_args()
    if options.list:
        for name, what in [*CHECKS.items(), *((run.name, run.what) for run in RUNS)]:
            print(f"{name:15} {what}")
        sys.exit(0)
    if not options.kit:
        parser.error("--kit is needed: the archive that build_kit.sh writes")
    return options


if __name__ == "__main__":
    sys.exit(main())
