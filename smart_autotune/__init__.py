"""A drop-in replacement for ``@triton.autotune`` made for servers.

Names are loaded at first use: importing the package imports neither Triton nor torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Installed, `patches` lies in this folder; in a checkout it lies beside it.
if not os.path.isdir(os.path.join(__path__[0], "patches")):
    __path__.append(os.path.dirname(__path__[0]))

if TYPE_CHECKING:
    from smart_autotune.autotuner import SmartAutotuner, smart_autotune
    from smart_autotune.errors import NoConfigFits, SmartAutotuneError
    from smart_autotune.history import Coverage, cold_keys, coverage, records
    from smart_autotune.key import TuningKey
    from smart_autotune.patches.switch import disable, enable, status
    from smart_autotune.serving import freeze, pretune, thaw, warming_up
    from smart_autotune.verdict import Outcome, TuningRecord, Verdict

_HOMES = {
    "SmartAutotuner": "autotuner",
    "smart_autotune": "autotuner",
    "NoConfigFits": "errors",
    "SmartAutotuneError": "errors",
    "TuningKey": "key",
    "Coverage": "history",
    "cold_keys": "history",
    "coverage": "history",
    "records": "history",
    "freeze": "serving",
    "pretune": "serving",
    "thaw": "serving",
    "warming_up": "serving",
    "disable": "patches.switch",
    "enable": "patches.switch",
    "status": "patches.switch",
    "Outcome": "verdict",
    "TuningRecord": "verdict",
    "Verdict": "verdict",
}

__all__ = [
    "Coverage",
    "NoConfigFits",
    "Outcome",
    "SmartAutotuneError",
    "SmartAutotuner",
    "TuningKey",
    "TuningRecord",
    "Verdict",
    "cold_keys",
    "coverage",
    "disable",
    "enable",
    "freeze",
    "pretune",
    "records",
    "smart_autotune",
    "status",
    "thaw",
    "warming_up",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
