"""What is particular to SGLang: its sparse decode, the end of its start-up, its metrics. Loaded as its plug-in.

Nothing of SGLang is imported here and no GPU is asked: each function is wrapped when SGLang itself imports its module.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from smart_autotune import settings
from smart_autotune.once import warn_once

from .. import switch, triton_3_6_0
from ..gate import Conflict
from ..switch import PatchRefused
from . import warm_up
from .seams import Seam
from .sparse_decode import SparseDecode
from .verified import GATE, changed_file, find


@dataclass(frozen=True)
class Status:
    """What is in force in this process. ``waiting``: in place once SGLang imports their modules."""

    replaced: tuple[str, ...]
    waiting: tuple[str, ...]
    conflicts: tuple[Conflict, ...]
    sparse_decode: bool
    gave_up: str

    def __str__(self) -> str:
        lines = [f"sglang: sparse decode is {'ours' if self.sparse_decode else 'not ours'} (needs {GATE.requirement})"]
        lines += [f"  wrapped: {name}" for name in self.replaced]
        lines += [f"  waiting for its import: {name}" for name in self.waiting]
        lines += [f"  conflict: {conflict}" for conflict in self.conflicts]
        return "\n".join([*lines, *([f"  gave up: {self.gave_up}"] if self.gave_up else [])])


_lock = threading.RLock()
_warm_up: tuple[Seam, ...] = ()
_decode: SparseDecode | None = None
_refused: list[Conflict] = []


def apply() -> Status:
    """Wraps what the settings ask for, now or when it is imported. Idempotent; nothing where SGLang is not loaded.

    On a conflict SGLang is left as it is and one WARNING says why; strict settings raise instead.
    """
    global _warm_up, _decode
    sglang = sys.modules.get("sglang")
    if sglang is None:
        return status()
    switch.add("sglang", switch.ServerPatch(apply, revert, status))
    with _lock:
        release = find(getattr(sglang, "__version__", None))
        if isinstance(release, Conflict):
            return _refuse(release)
        _warm_up = _warm_up or warm_up.seams(release)
        for seam in _warm_up:
            seam.apply()
        if settings.current().sparse_decode == "0":
            return status()
        changed = changed_file(release, Path(next(iter(sglang.__path__))))
        if changed is not None:
            return _refuse(changed)
        _decode = _decode or SparseDecode(release)
        for seam in _decode.seams:
            seam.apply()
    return status()


def revert() -> Status:
    """Puts SGLang's own functions back. CUDA graphs keep what they were captured with. Idempotent."""
    with _lock:
        for seam in _seams():
            seam.revert()
        _refused.clear()
    return status()


def status() -> Status:
    seams = _seams()
    return Status(
        replaced=tuple(str(seam) for seam in seams if seam.is_in_place),
        waiting=tuple(str(seam) for seam in seams if seam.active and not seam.is_in_place and not seam.left_alone),
        conflicts=(*_refused, *(seam.conflict for seam in seams if seam.conflict is not None)),
        sparse_decode=_decode is not None and _decode.serves,
        gave_up=_decode.gave_up if _decode is not None else "",
    )


def patches() -> dict[str, bool]:
    """For the metrics: each patch, and whether it is in force. Cheap: asked whenever a key is settled."""
    decode = _decode is not None and _decode.serves
    return {triton_3_6_0.GATE.patch: triton_3_6_0.is_active(), "sglang-sparse-decode": decode}


def _seams() -> tuple[Seam, ...]:
    return (*_warm_up, *(_decode.seams if _decode is not None else ()))


def _refuse(conflict: Conflict) -> Status:
    if conflict not in _refused:
        _refused.append(conflict)
    if settings.current().strict:
        raise PatchRefused(str(conflict))
    warn_once(str(conflict), "%s", conflict)
    return status()
