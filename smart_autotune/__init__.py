"""A drop-in replacement for ``@triton.autotune`` made for servers."""

from smart_autotune.autotuner import SmartAutotuner, smart_autotune
from smart_autotune.errors import NoConfigFits, SmartAutotuneError
from smart_autotune.key import TuningKey
from smart_autotune.records import cold_keys, records
from smart_autotune.serving import freeze, pretune, thaw
from smart_autotune.verdict import Outcome, TuningRecord, Verdict

__all__ = [
    "NoConfigFits",
    "Outcome",
    "SmartAutotuneError",
    "SmartAutotuner",
    "TuningKey",
    "TuningRecord",
    "Verdict",
    "cold_keys",
    "freeze",
    "pretune",
    "records",
    "smart_autotune",
    "thaw",
]
