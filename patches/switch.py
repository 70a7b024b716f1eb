"""``enable()``, ``disable()``, ``status()``: one switch for the whole process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from . import triton_3_6_0
from .gate import Conflict

log = logging.getLogger("smart_autotune")


class PatchRefused(RuntimeError):
    """Raised instead of a warning under ``SMART_AUTOTUNE_STRICT=1``; its text is the conflict."""


@dataclass(frozen=True)
class ServerPatch:
    """A server's own patch that is loaded here: what it does beside the one of Triton, and how that is undone."""

    apply: Callable[[], object]
    revert: Callable[[], object]
    status: Callable[[], object]  # comparable; ``str()`` renders it


@dataclass(frozen=True)
class Status:
    """What is patched in this process and what stands against it. ``str()`` renders it.

    All but ``servers`` is about Triton. ``servers``: the status of each server's own patch that is loaded.
    """

    enabled: bool
    patch: str
    requirement: str
    replaced: tuple[str, ...]
    conflicts: tuple[Conflict, ...]
    tuners_before: int
    tuners_after: int
    foreign_subclasses: tuple[str, ...]
    servers: tuple[object, ...] = ()

    def __str__(self) -> str:
        lines = [f"smart_autotune: {'on' if self.enabled else 'off'} (patch {self.patch}, needs {self.requirement})"]
        lines += [f"  replaced: {name}" for name in self.replaced]
        lines += [f"  conflict: {conflict}" for conflict in self.conflicts]
        if self.enabled:
            lines.append(f"  tuners made before it: {self.tuners_before}, after it: {self.tuners_after}")
        lines += [f"  subclass with its own run: {name}" for name in self.foreign_subclasses]
        lines += [str(server) for server in self.servers]
        return "\n".join(lines)


_refused: dict[str, Conflict] = {}
_servers: dict[str, ServerPatch] = {}  # put here by the patches themselves: nothing of a server is loaded for it
_put_back: set[str] = set()  # those that ``disable()`` has reverted


def add(server: str, patch: ServerPatch) -> None:
    """From now on ``status()`` shows this server's own patch and ``disable()`` reverts it."""
    _servers[server] = patch
    _put_back.discard(server)


def enable() -> Status:
    """Every ``triton.autotune`` kernel of this process is tuned by us from now on.

    Idempotent; what :func:`disable` has reverted of a server's own patch is applied again. On any conflict stock Triton
    is left as it is and one WARNING says why; ``SMART_AUTOTUNE_STRICT=1`` raises :class:`PatchRefused` instead.
    """
    from smart_autotune import settings

    strict = settings.current().strict
    was_on = _on()
    conflict = triton_3_6_0.apply()
    while _put_back:
        _servers[_put_back.pop()].apply()
    if conflict is None:
        _refused.clear()
        if not was_on:
            log.info("%s applied: triton.autotune kernels are tuned by smart_autotune", triton_3_6_0.GATE.patch)
        return status()
    _warn_once(conflict)
    if strict:
        raise PatchRefused(str(conflict))
    return status()


def disable() -> Status:
    """Puts stock Triton back, and a server's own functions where its patch is loaded.

    Idempotent; what was tuned meanwhile stays in each kernel's ``cache``.
    """
    with ExitStack() as steps:  # each is taken, also where another one raises
        steps.callback(_revert_triton)
        for server, patch in _servers.items():
            _put_back.add(server)
            steps.callback(patch.revert)
    return status()


def _revert_triton() -> None:
    if "triton" in sys.modules:
        conflict = triton_3_6_0.revert()
        if conflict is not None:
            _warn_once(conflict)


def status() -> Status:
    """What is patched, by which gate, what conflicts there are, how many tuners it reaches; servers' own patches."""
    on = _on()
    before, after = triton_3_6_0.instances() if on else (0, 0)
    conflicts = dict(_refused)
    if on and not triton_3_6_0.is_applied():
        conflicts["over"] = triton_3_6_0.patched_over("that one decides which calls reach ours")
    return Status(
        enabled=on,
        patch=triton_3_6_0.GATE.patch,
        requirement=triton_3_6_0.GATE.requirement,
        replaced=("triton.runtime.autotuner.Autotuner.run",) if on else (),
        conflicts=tuple(conflicts.values()),
        tuners_before=before,
        tuners_after=after,
        foreign_subclasses=tuple(triton_3_6_0.foreign_subclasses()) if on else (),
        servers=tuple(patch.status() for patch in _servers.values()),
    )


def _on() -> bool:
    return triton_3_6_0.is_active()


def _warn_once(conflict: Conflict) -> None:
    if str(conflict) not in _refused:
        _refused[str(conflict)] = conflict
        log.warning("%s", conflict)
