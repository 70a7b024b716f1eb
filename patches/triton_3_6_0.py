"""The seam in Triton 3.6.0: the method ``Autotuner.run``, and nothing else.

``triton.autotune`` is bound by name in modules imported long before us, so rebinding it would miss them. Every tuner,
made before or after, and every subclass that calls ``super().run`` comes through this one method.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .gate import Conflict, Found, Gate, check, look_at

log = logging.getLogger("smart_autotune")

GATE = Gate(
    patch="triton-3.6.0",
    requirement="triton==3.6.0",
    home="triton.runtime.autotuner",
    fingerprints={  # ``run`` is replaced; what the engine makes of the others' attributes was verified on these sources
        "Autotuner.run": "4cf8d7591af41b17",
        "Autotuner.__init__": "3f2111e5b76d98e2",
        "Autotuner.prune_configs": "f3ee430dc637ee1c",
        "Autotuner.check_disk_cache": "a677989755bb44b8",
    },
)
MARK = "_smart_autotune_patch"  # on the replacing method: which patch it is
_ENGINE = "_smart_autotune_engine"  # on a tuner: its engine, or None where stock is to be left alone

_lock = threading.RLock()
_original: Callable[..., Any] | None = None
_active = False
_before: weakref.WeakSet[Any] = weakref.WeakSet()


def conflict() -> Conflict | None:
    """What speaks against applying the patch in this process, if anything."""
    import triton
    from triton.runtime.autotuner import Autotuner

    if is_applied():
        return None
    found: dict[str, Found] = {}
    for name in GATE.fingerprints:
        here = look_at(inspect.getattr_static(Autotuner, name.partition(".")[2], None))
        if here is not None:
            found[name] = here
    return check(GATE, getattr(triton, "__version__", None), found)


def apply() -> Conflict | None:
    """Routes ``Autotuner.run`` into the engine. Applying twice is applying once. Returns the conflict, if any."""
    global _original, _active
    from triton.runtime.autotuner import Autotuner

    with _lock:
        if is_applied():
            _active = True
            return None
        found = conflict()
        if found is not None:
            return found
        _before.update(_tuners(Autotuner))
        _original = Autotuner.__dict__["run"]
        Autotuner.run = _routed(_original)
        _active = True
        return None


def revert() -> Conflict | None:
    """Puts the very method back. Where somebody has patched over ours since, ours steps aside and says so."""
    global _original, _active
    from triton.runtime.autotuner import Autotuner

    with _lock:
        _active = False
        if _original is None:
            return None
        if not is_applied():
            owner = getattr(Autotuner.__dict__.get("run"), "__module__", "?")
            return Conflict(
                GATE.patch, "our own Autotuner.run", f"one patched over it by {owner}", "ours passes calls through"
            )
        Autotuner.run = _original
        _original = None
        _before.clear()
        return None


def is_applied() -> bool:
    """Whether the method in force is ours."""
    from triton.runtime.autotuner import Autotuner

    return getattr(Autotuner.__dict__.get("run"), MARK, None) == GATE.patch


def is_active() -> bool:
    """Whether calls that reach our method are ours to serve."""
    return _active


def instances() -> tuple[int, int]:
    """How many tuners there are that were made before and after the patch."""
    from triton.runtime.autotuner import Autotuner

    everyone = list(_tuners(Autotuner))
    before = sum(1 for tuner in everyone if tuner in _before)
    return before, len(everyone) - before


def foreign_subclasses() -> list[str]:
    """Subclasses with a ``run`` of their own; ours serves them only where that calls ``super().run``."""
    from triton.runtime.autotuner import Autotuner

    found = []
    for subclass in _descendants(Autotuner):
        run = subclass.__dict__.get("run")
        if run is not None and not hasattr(subclass, "_smart_autotune_native"):
            calls_super = "super" in getattr(getattr(run, "__code__", None), "co_names", ())
            fate = "calls super().run: tuned by us" if calls_super else "left alone"
            found.append(f"{subclass.__module__}.{subclass.__qualname__} ({fate})")
    return sorted(found)


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = self.__dict__.get(_ENGINE, self) if _active else None
        if engine is self or (engine is not None and engine.view.autotuner is not self):  # new, or a copy
            engine = _new_engine(self, original)
        if engine is None:
            return original(self, *args, **kwargs)
        kernel = engine.plans.launch(*args, **kwargs)
        return engine.run(args, kwargs) if kernel is engine.not_planned else kernel

    setattr(run, MARK, GATE.patch)
    return run


def _new_engine(tuner: Any, original: Callable[..., Any]) -> Any:
    """The engine of a stock tuner, made at its first run; None (for good) where that fails: stock serves it."""
    if hasattr(type(tuner), "_smart_autotune_native"):
        return None  # our own class came here to run stock
    from smart_autotune import settings
    from smart_autotune.errors import one_line

    try:
        from smart_autotune.engine import stock_engine

        engine = stock_engine(tuner, functools.partial(original, tuner))
    except Exception as error:
        if settings.current().strict:
            raise
        log.warning("a tuner of %s is left to stock Triton: %s", getattr(tuner, "base_fn", tuner), one_line(error))
        engine = None
    with _lock:
        kept = tuner.__dict__.get(_ENGINE)
        if kept is not None and kept.view.autotuner is tuner:
            return kept
        tuner.__dict__[_ENGINE] = engine
    return engine


def _tuners(autotuner: type) -> Iterator[Any]:
    return (thing for thing in gc.get_objects() if issubclass(type(thing), autotuner))


def _descendants(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _descendants(subclass)
