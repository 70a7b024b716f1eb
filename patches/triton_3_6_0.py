"""The seam in Triton 3.6.0: the method ``Autotuner.run``, and nothing else.

``triton.autotune`` is bound by name in modules imported long before us, so rebinding it would miss them. Every tuner,
made before or after, and every subclass that calls ``super().run`` comes through this one method.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .gate import Conflict, Found, Gate, check, look_at

if TYPE_CHECKING:
    from smart_autotune.batch import BatchSpec

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
_SLOT = "_smart_autotune_slot"  # on a tuner: what serves it

_lock = threading.RLock()
_original: Callable[..., Any] | None = None
_active = False
_before: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # tuners by id: they need no hash
_after: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Slot:
    """Who serves one tuner: ``engine``, or stock where that is None. A copy of the tuner is not ``owner``."""

    __slots__ = ("engine", "owner")

    def __init__(self, owner: Any = None, engine: Any = None) -> None:
        self.owner = owner
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Slot, ()


def conflict() -> Conflict | None:
    """What speaks against applying the patch in this process, if anything."""
    try:
        import triton
        from triton.runtime.autotuner import Autotuner
    except ImportError as error:
        return Conflict(GATE.patch, GATE.requirement, f"that it cannot be imported ({error})")
    if is_applied():
        return None
    found: dict[str, Found] = {}
    for name in GATE.fingerprints:
        here = look_at(vars(Autotuner).get(name.partition(".")[2]))  # the class's own, not what it inherits
        if here is not None:
            found[name] = here
    return check(GATE, getattr(triton, "__version__", None), found)


def apply() -> Conflict | None:
    """Routes ``Autotuner.run`` into the engine. Applying twice is applying once. Returns the conflict, if any."""
    global _original, _active
    with _lock:
        found = conflict()
        if found is not None:
            return found
        if not is_applied():
            from triton.runtime.autotuner import Autotuner

            _before.update((id(tuner), tuner) for tuner in _tuners(Autotuner))
            _original = vars(Autotuner)["run"]
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
            return patched_over("ours passes its calls to stock")
        Autotuner.run = _original
        _original = None
        _before.clear()
        _after.clear()
        return None


def is_applied() -> bool:
    """Whether the method in force is ours."""
    from triton.runtime.autotuner import Autotuner

    run = vars(Autotuner).get("run")
    return type(run) is FunctionType and vars(run).get(MARK) == GATE.patch and run.__globals__ is globals()


def patched_over(consequence: str) -> Conflict:
    """The conflict of a method put over ours since."""
    from triton.runtime.autotuner import Autotuner

    found = look_at(vars(Autotuner).get("run"))
    owner = found.module if found is not None else "nobody"
    return Conflict(GATE.patch, "our own Autotuner.run", f"one put there by {owner}", consequence)


def is_active() -> bool:
    """Whether calls that reach our method are ours to serve."""
    return _active


def instances() -> tuple[int, int]:
    """How many tuners there are that were made before and after the patch."""
    from triton.runtime.autotuner import Autotuner

    with _lock:  # those that ran since are known anyway: after ``gc.freeze()`` the collector shows none of them
        _after.update((id(tuner), tuner) for tuner in _tuners(Autotuner) if _before.get(id(tuner)) is not tuner)
        return len(_before), len(_after)


def foreign_subclasses() -> list[str]:
    """Subclasses with a ``run`` of their own; ours serves them only where that calls ``super().run``."""
    from triton.runtime.autotuner import Autotuner

    found = []
    for subclass in _descendants(Autotuner):
        run = subclass.__dict__.get("run")
        if run is not None and not hasattr(subclass, "_smart_autotune_native"):
            names = getattr(getattr(run, "__code__", None), "co_names", ())
            calls_stock = "run" in names and ("super" in names or "Autotuner" in names)
            fate = "calls stock's: tuned by us" if calls_stock else "left alone"
            found.append(f"{subclass.__module__}.{subclass.__qualname__} ({fate})")
    return sorted(found)


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _active:
            return original(self, *args, **kwargs)
        slot = self.__dict__.get(_SLOT)
        if slot is None or slot.owner is not self:  # new, or a copy
            slot = _new_slot(self, original)
        engine = slot.engine
        if engine is None:
            return original(self, *args, **kwargs)
        kernel = engine.plans.launch(*args, **kwargs)
        return engine.run(args, kwargs) if kernel is engine.not_planned else kernel

    setattr(run, MARK, GATE.patch)
    return run


def _new_slot(tuner: Any, original: Callable[..., Any]) -> Slot:
    """Made at a tuner's first run. Where its engine cannot be made, stock serves it for good."""
    if hasattr(type(tuner), "_smart_autotune_native"):
        return Slot(tuner)  # our own class came here to run stock
    with _lock:  # one engine for a tuner, also where its first runs come at the same time
        slot: Slot | None = tuner.__dict__.get(_SLOT)
        if slot is None or slot.owner is not tuner:
            slot = tuner.__dict__[_SLOT] = Slot(tuner, _engine_of(tuner, functools.partial(original, tuner)))
            if _before.get(id(tuner)) is not tuner:
                _after[id(tuner)] = tuner
        return slot


def _engine_of(tuner: Any, stock_run: Callable[..., Any]) -> Any:
    from smart_autotune import settings

    try:
        from smart_autotune.engine import stock_engine

        return stock_engine(tuner, stock_run, _batch_of(tuner))
    except Exception as error:
        if settings.current().strict:
            raise
        name = getattr(getattr(tuner, "base_fn", None), "__name__", repr(tuner))
        log.warning("%s is left to stock Triton: %s: %s", name, type(error).__name__, error)
        return None


def _batch_of(tuner: Any) -> BatchSpec:
    """Where the batch size is, as far as that is known of a server's own kernels."""
    if str(tuner.base_fn.__module__).partition(".")[0] != "sglang":
        return "auto"
    from .sglang.batches import batch_of

    return batch_of(tuner)


def _tuners(autotuner: type) -> Iterator[Any]:
    """All instances: an object refers to its class, and the collector finds who refers to it at C speed."""
    for cls in {autotuner, *_descendants(autotuner)}:
        yield from (thing for thing in gc.get_referrers(cls) if type(thing) is cls)


def _descendants(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _descendants(subclass)
