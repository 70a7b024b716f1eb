"""A process of its own: imports all modules of the installed SGLang that use ``triton.autotune``, and makes our engine
of each tuner in them. Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
os.environ["SMART_AUTOTUNE"] = "1"

import sglang
import triton
from sglang.srt.plugins import load_plugins

load_plugins()

from triton.runtime.autotuner import Autotuner

import smart_autotune
from smart_autotune.engine import stock_engine
from smart_autotune.patches.sglang.batches import batch_of

sys.path.append(str(Path(__file__).parents[1]))
from support.stub_driver import StubDriver, active


def modules_with_tuners() -> list[str]:
    root = Path(sglang.__path__[0])
    found = [path for path in sorted(root.rglob("*.py")) if "triton.autotune(" in path.read_text(encoding="utf-8")]
    return [".".join(("sglang", *path.relative_to(root).with_suffix("").parts)) for path in found]


def tuner_of(value: object) -> Autotuner | None:
    """The tuner under whatever decorators are around it."""
    while value is not None and not isinstance(value, Autotuner):
        value = vars(value).get("fn") if type(value).__module__.startswith("triton.") else None
    return value


def facts(tuner: Autotuner) -> dict[str, object]:
    """What our engine makes of the decorator's arguments, beside what stock has."""
    engine = stock_engine(tuner, tuner.run, batch_of(tuner))
    view = engine.view
    return {
        "name": engine.name,
        "configs": len(view.configs),
        "same_configs": view.configs is tuner.configs,
        "keys": view.keys,
        "unknown_keys": [name for name in view.keys if name not in view.arg_names],
        "heuristics": sorted(view.heuristics_below()),
        "prunes": tuner.early_config_prune is not None and tuner.early_config_prune.__module__.startswith("sglang"),
        "restores": list(tuner.restore_value or ()),
        "resets": list(tuner.reset_to_zero or ()),
        "cache_results": tuner.cache_results,
        "batch": engine.plans._batch.readable_from,
        "first_argument": view.arg_names[0],
        "identity": view.source_identity.partition("@")[2] != "",
    }


def main() -> None:
    failed, tuners = {}, {}
    for name in modules_with_tuners():
        try:
            module = importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        for value in vars(module).values():
            tuner = tuner_of(value)
            if tuner is not None and tuner.base_fn.__module__ == name:
                tuners[id(tuner)] = tuner
    with active(StubDriver(120)):
        found = [facts(tuner) for tuner in tuners.values()]
    print(
        json.dumps(
            {
                "failed": failed,
                "tuners": found,
                "enabled": smart_autotune.status().enabled,
                "subclasses": list(smart_autotune.status().foreign_subclasses),
                "triton": triton.__version__,
            }
        )
    )


main()
