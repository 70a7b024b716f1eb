"""What has to hold of the runs of ``serve.py``: each by itself, ours against stock's, and tokens over HTTP."""

from __future__ import annotations

import statistics
from typing import Any

import server_flags as flags
from server_runs import Outcome, Run

FIGURES = {"stall": "stall_secs", "throughput": "tokens_per_sec", "ready": "ready_secs"}
NOT_WHEN_UNSET = ("smart_autotune.engine", "smart_autotune.history", "smart_autotune.patches.switch")
UNKNOWN = "not told"
BOUNDS = {  # ours over stock's, of the run with the same caches
    ("stall", "cold"): ("<=", 0.3),
    ("stall", "warm"): ("<=", 0.1),
    ("throughput", "cold"): (">=", 1.0),
    ("throughput", "warm"): (">=", 1.0),
    ("ready", "cold"): ("<=", 1.05),
    ("ready", "warm"): ("<=", 1.05),
}


def problems_of(server: str, run: Run, outcome: Outcome) -> list[str]:
    """What a run shows to be wrong, apart from the bounds."""
    if outcome.error:
        return [outcome.error]
    if run.ready_only:
        return []
    found = _wrong_tokens(run, outcome) if server == "kimi" else []
    if not outcome.seen:
        return [*found, "no answer from the scheduler process"]
    for seen in outcome.seen:
        found += _problems_seen(server, run, seen)
    return found


def _wrong_tokens(run: Run, outcome: Outcome) -> list[str]:
    found = []
    first = outcome.get("request", "first").get("tokens", [])[: len(flags.FIRST_TOKENS)]
    if first != flags.FIRST_TOKENS:
        found.append(f"first tokens {first}, stock's are {flags.FIRST_TOKENS}")
    digests = {line["digest"] for line in outcome.batches}
    if digests != {flags.DIGEST} and run.over == "engine":  # over HTTP the batches form as they arrive
        found.append(f"digests {sorted(digests)}, stock's is {flags.DIGEST}")
    return found


def _problems_seen(server: str, run: Run, seen: dict[str, Any]) -> list[str]:
    if "error" in seen:
        return [f"the observer failed: {seen['error']}"]
    found = []
    begun, ended = (seen["captures"].get(name, 0) for name in ("begun", "ended"))
    expected = len(flags.DECODE_BATCHES[server])
    if begun != ended or ended < expected:
        found.append(f"captures lost: {begun} begun, {ended} ended, expected {expected} or more")
    if not run.ours:
        loaded = [name for name in seen["our_modules"] if name in NOT_WHEN_UNSET]
        return found + ([f"unset, and yet loaded: {loaded}"] if loaded else [])
    if not seen.get("enabled") or seen.get("conflicts"):
        return [*found, f"the patch is not on: {seen.get('conflicts') or seen['our_modules']}"]
    if not seen["records"]:
        found.append("nothing was tuned")
    if seen["cold_keys"]:
        found.append(f"served cold: {seen['cold_keys']}")
    if run.caches and any(record["served_by"] != "stored" for record in seen["records"]):
        found.append("warm, and yet tuned: " + ", ".join({r["kernel"] for r in seen["records"] if r["timing_secs"]}))
    for record in seen["records"]:
        told = ("WON", "SLOWER", "PRUNED_BY_USER")  # the last is a reason by itself
        silent = [v for v in record["verdicts"] if v["outcome"] not in told and not v.get("detail")]
        found += [f"{record['kernel']}: {v['config']} is {v['outcome']} without a reason" for v in silent]
    return found


# ---- ours against stock's --------------------------------------------------------------------------------------


def compared(server: str, outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Each figure of both runs and their ratio, where both have it; the bound, where there is one.

    Throughput comes with the quartiles of both runs' batches, and says whether those ranges are apart. Where starts
    were repeated, the last row is their pairs': the geometric mean of the ratios.
    """
    rows = []
    for (figure, caches), (relation, bound) in BOUNDS.items():
        pair = [outcomes.get(f"{who}-{caches}") for who in ("stock", "ours")]
        values = [getattr(one, FIGURES[figure]) if one else None for one in pair]
        row: dict[str, Any] = {"figure": figure, "caches": caches, "stock": values[0], "ours": values[1]}
        if None not in values:
            ratio = values[1] / values[0]
            row["ratio"] = ratio
            if server == "kimi":
                row |= _judged(ratio, relation, bound)
        if figure == "throughput":
            row |= _spreads(*(one.tokens_per_sec_quartiles if one else None for one in pair))
        rows.append(row)
    if pairs := _ready_pairs(outcomes):
        stock, ours = (statistics.median(secs) for secs in zip(*pairs))
        ratio = statistics.geometric_mean(ours / stock for stock, ours in pairs)
        row = {"figure": "ready", "caches": f"{len(pairs)} pairs", "stock": stock, "ours": ours, "ratio": ratio}
        if server == "kimi":
            row |= _judged(ratio, *BOUNDS["ready", "warm"])
        rows.append({**row, "pairs": pairs})
    return rows


def _judged(ratio: float, relation: str, bound: float) -> dict[str, Any]:
    return {"bound": f"{relation} {bound}", "met": ratio <= bound if relation == "<=" else ratio >= bound}


def _ready_pairs(outcomes: dict[str, Outcome]) -> list[tuple[float, float]]:
    """(stock's, ours) seconds of each pair of starts that both came up."""
    found = []
    for name in outcomes:
        if name.startswith("ready-stock-"):
            pair = [outcomes[name], outcomes.get(name.replace("stock", "ours"))]
            secs = [one.ready_secs if one else None for one in pair]
            if secs[0] is not None and secs[1] is not None:
                found.append((secs[0], secs[1]))
    return found


def _spreads(stock: tuple[float, float] | None, ours: tuple[float, float] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"stock_quartiles": stock, "ours_quartiles": ours}
    if stock is not None and ours is not None:
        found["apart"] = ours[0] > stock[1] or stock[0] > ours[1]
    return found


# ---- tokens over HTTP ------------------------------------------------------------------------------------------


def http_tokens(server: str, outcomes: dict[str, Outcome]) -> dict[str, list[str]]:
    """``problems``: tokens of ``http-pth`` that ``http-stock`` never gave, though it prefilled a batch in such parts.

    ``notes``: those of batches that it never prefilled so. What shares a prefill is up to the requests' arrival, and
    greedy tokens can depend on it, under stock as under ours.
    """
    found: dict[str, list[str]] = {"problems": [], "notes": []}
    ours, stock = outcomes.get("http-pth"), outcomes.get("http-stock")
    if server != "kimi" or ours is None or not ours.batches:
        return found
    if stock is None or not stock.batches:
        found["notes"].append("tokens over HTTP are not compared: there is no batch of http-stock")
        return found
    digests = {line["digest"] for line in stock.batches}
    parts = {prefilled(line) for line in stock.batches}
    for line in ours.batches:
        if line["digest"] in digests:
            continue
        told = f"http-pth, batch {line['batch']}, prefilled as {prefilled(line)}: digest {line['digest']}; http-stock "
        if prefilled(line) in parts or UNKNOWN in (prefilled(line), *parts):
            found["problems"].append(f"{told}gave {', '.join(sorted(digests))}")
        else:
            found["notes"].append(f"{told}prefilled no batch so, but as {', '.join(sorted(parts))}: not comparable")
    return found


def prefilled(line: dict[str, Any]) -> str:
    """The sequences of each prefill that served a batch, such as ``1+63``, as the server's log told them."""
    sizes = line.get("prefills") or ()
    return "+".join(map(str, sizes)) if sum(sizes) == flags.BATCH else UNKNOWN
