"""The hot path: from a call's arguments straight to the compiled kernel, without asking anybody.

For each kernel and each combination of argument classes one function is generated (as Triton generates its binder). It
reads the launch key off the arguments, finds the plan and launches. Anything it does not handle goes down the full
path (``Engine.run``), which teaches it a plan where that is exact.

Handled: positional, keyword, defaulted and mixed arguments; tensors, ints, floats, bools, None, strings and other
constexpr values; a grid as a tuple or a function; several devices; graph capture (a plan's kernel is loaded).
Part of the launch key, so that another value is another plan: dtype, 16-byte alignment, the classes of ints that
specialisation looks at (1, divisible by 16, 32/64 bit), constexpr values with their type, the author's key values,
the batch bucket, the device, launch options in the call with their values (``launch_pdl=True``).
Checked at each launch by a cheap flag, full path when it differs: launch hooks, pre-run hooks, Triton's debug and
instrumentation knobs, ``kernel.fn.debug``, our settings, the active driver, ``kernel.fn`` and its ``run`` (a wrapper
put there later), ``kernel.configs`` and ``kernel.cache``, the config's own hook, the values of globals that the kernel
uses, Triton's own cache of compiled kernels.
Full path always: config hooks, ``@heuristics`` or other wrappers below the tuner, tensor descriptors, tuples and other
argument classes, tensors elsewhere than the first call's, launch options that are no plain value, kernels with scratch
memory, ``batch=`` given as a function, another dict put in ``kernel.cache``'s place, arguments named ``grid``,
``warmup`` or ``…__``, ints beyond 64 bits, interpreter mode, a ``JITFunction.run`` that was not Triton's own when we
came, Triton releases other than the verified one.
Not noticed: a ``Config``'s values changed in place, an entry taken out of ``fn.device_caches[device][0]``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from smart_autotune import settings
from smart_autotune.batch import BatchRule
from smart_autotune.errors import one_line
from smart_autotune.plan_source import NOT_PLANNED, STOCK_JIT_RUN, Kind, Source

log = logging.getLogger("smart_autotune")

VERIFIED = "3.6.0"
MOST_PLANS = 4096  # a kernel's plans are dropped beyond; relearning one costs a full launch
MOST_FUNCTIONS = (
    64  # combinations of argument classes; they are tried one after the other, so the rest go the full path
)

SCALARS = (int, float, bool, str, type(None))
OPTION_SCALARS = (int, bool, str, type(None))  # no float: -0.0 == 0.0, and nan is never equal to itself


class Watched(dict):  # type: ignore[type-arg]
    """Stock's ``cache``, a dict that says when an entry goes or changes (users clear it to tune again)."""

    def __init__(self, content: Mapping[Any, Any], changed: Callable[[], None]) -> None:
        super().__init__(content)
        self._changed = changed

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def _announcing(method: str) -> Callable[..., Any]:
    original = getattr(dict, method)

    def announce(self: Watched, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            self._changed()

    announce.__name__ = method
    return announce


for _method in ("clear", "pop", "popitem", "update", "__setitem__", "__delitem__", "__ior__"):
    setattr(Watched, _method, _announcing(_method))


class Plans:
    """One kernel's plans and the generated functions that find them.

    ``launch(*args, grid=..., **kwargs)`` launches and returns the compiled kernel, or returns ``NOT_PLANNED``.
    """

    def __init__(self, view: Any, batch: BatchRule) -> None:
        self._view = view
        self._batch = batch
        self._lock = threading.Lock()  # of the three below; no author's code runs under it
        self._functions: dict[tuple[Any, ...], Launcher] = {}
        self._world: tuple[Any, ...] = ()  # what the generated functions take for granted
        self._era = object()
        self._possible: bool | None = None  # not looked at since the world last changed
        self._met = False
        self._broken = False
        self.launch: Callable[..., Any] = _never

    def clear(self) -> None:
        """Forgets every plan; the next launches take the full path."""
        self._era = object()
        self._functions = {}
        self.launch = _never

    def era(self) -> object:
        """Another object from when on what was decided before must not become a plan (the cache was cleared, say)."""
        world = self._world_now()
        with self._lock:
            if len(world) != len(self._world) or any(a is not b for a, b in zip(world, self._world)):
                self.clear()
                self._world = world
                self._possible = None
            return self._era

    def learn(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], config: triton.Config, kernel: Any, era: object = None
    ) -> None:
        """Notes that the full path launched ``kernel`` by ``config`` for this call: the next such call is direct.

        ``era``: :meth:`era` from before the config was chosen.
        """
        try:
            if not self._met:  # writing a function takes a millisecond: not in a kernel's very first call
                self._met = True
                return
            era, now = era or self.era(), self.era()
            if era is now and config.pre_hook is None and _is_plain(kernel) and self._is_possible():
                self._learn(args, kwargs, config, kernel, era)
        except Exception as error:
            self._broken, self._possible = True, False
            self.clear()
            if settings.current().strict:
                raise
            log.warning("%s: direct launches are off: %s", self._view.kernel_name, one_line(error))

    def _is_possible(self) -> bool:
        with self._lock:
            if self._possible is None:
                self._possible = not self._broken and self._is_possible_now()
            return self._possible

    def _is_possible_now(self) -> bool:
        tuner, jit = self._view.autotuner, self._view.fn
        return (
            triton.__version__ == VERIFIED
            and type(jit) is JITFunction
            and _is_in(STOCK_JIT_RUN, triton.runtime.jit)
            and triton.runtime.driver.active.get_current_target().backend == "cuda"
            and type(tuner.cache) is Watched  # of a dict put there later nobody tells us that it was cleared
            and type(knobs.runtime.launch_enter_hook) is type(knobs.runtime.launch_exit_hook) is knobs.HookChain
            and not any(name in ("grid", "warmup") or name.endswith("__") for name in jit.arg_names)
        )

    def _learn(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], config: triton.Config, kernel: Any, era: object
    ) -> None:
        jit = self._view.fn
        given = {**dict(zip(jit.arg_names, args)), **kwargs}
        given.pop("grid", None)
        if given.pop("warmup", False):
            return
        options = {name: given.pop(name) for name in given.keys() - set(jit.arg_names)}
        if not all(_is_plain_option(name, value) for name, value in options.items()):
            return
        defaults = {p.name: p.default for p in jit.params if p.has_default and p.name not in config.kwargs}
        values = {**defaults, **given}
        kinds = tuple(kind for param in jit.params if (kind := _kind(param, values, config)) is not None)
        if len(kinds) < len(jit.params) or self._batch.readable_from is None:
            return
        classes = (kinds, tuple(sorted((name, type(value).__name__, repr(value)) for name, value in options.items())))
        launcher = self._functions.get(classes) or Launcher(Source(self._view, self._batch, kinds, defaults, options))
        key = launcher.key_of(*args, **kwargs)
        device = triton.runtime.driver.active.get_current_device()
        plan = None if key is NOT_PLANNED else _plan(kernel, config, launcher.provided, jit.device_caches[device])
        if plan is not None:
            self._store(classes, launcher, key, plan, era)

    def _store(
        self, classes: tuple[Any, ...], launcher: Launcher, key: Any, plan: tuple[Any, ...], era: object
    ) -> None:
        with self._lock:
            if era is not self._era:
                return
            functions = self._functions
            if sum(len(one.plans) for one in functions.values()) >= MOST_PLANS:
                self.clear()
            elif classes in functions or len(functions) < MOST_FUNCTIONS:
                launcher = functions.setdefault(classes, launcher)
                launcher.plans[key] = plan
                self.launch = _dispatcher([one.launch for one in functions.values()])

    def _world_now(self) -> tuple[Any, ...]:
        tuner = self._view.autotuner
        only = tuner.configs[0] if len(tuner.configs) == 1 else None
        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        compiled_with = (knobs.runtime.debug, knobs.compilation.instrumentation_mode, getattr(tuner.fn, "debug", None))
        driver = triton.runtime.driver._active
        return (settings.current(), driver, tuner.fn, tuner.cache, tuner.configs, only, *hooks, *compiled_with)


class Launcher:
    """The generated functions for one combination of argument classes, and the plans that they find."""

    def __init__(self, source: Source) -> None:
        text, names = source.text()
        self.provided = source.provided
        self.plans: dict[Any, tuple[Any, ...]] = {}
        names["plans__"] = self.plans
        exec(compile(text, f"<launch of {source.kernel_name}>", "exec"), names)
        self.key_of: Callable[..., Any] = names["key_of"]
        self.launch: Callable[..., Any] = names["launch"]


def _dispatcher(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    if len(functions) == 1:
        return functions[0]

    def launch(*args: Any, **kwargs: Any) -> Any:
        for function in functions:  # each gives up at its first guard that does not hold
            kernel = function(*args, **kwargs)
            if kernel is not NOT_PLANNED:
                return kernel
        return NOT_PLANNED

    return launch


def _never(*_args: Any, **_kwargs: Any) -> Any:
    return NOT_PLANNED


def _is_in(function: Any, module: Any) -> bool:
    """Whether the function's code is from that module's file: not a wrapper, however well it copies names."""
    return bool(getattr(getattr(function, "__code__", None), "co_filename", None) == module.__file__)


def _kind(param: Any, values: Mapping[str, Any], config: triton.Config) -> Kind | None:
    """How the generated function reads one argument; None: not at all (full path)."""
    if param.name not in values:
        return ("config",) if param.name in config.kwargs else None
    value = values[param.name]
    cls = type(value)
    if param.is_constexpr:
        return ("constexpr", cls) if cls in SCALARS or _is_plain_constant(value) else None
    if cls in SCALARS:
        return ("scalar", cls)
    import torch

    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return ("tensor", cls, "is_cuda" if value.is_cuda else "is_cpu")
    return None


def _is_plain_option(name: str, value: Any) -> bool:
    return type(value) in OPTION_SCALARS and name.isidentifier() and not name.endswith("__")


def _is_plain_constant(value: Any) -> bool:
    import torch

    return isinstance(value, (triton.language.dtype, torch.dtype))


def _is_plain(kernel: Any) -> bool:
    """Whether a direct launch of ``kernel`` needs nothing but its arguments (no scratch memory)."""
    metadata = getattr(kernel, "metadata", None)
    if metadata is None or getattr(kernel, "function", None) is None:
        return False
    return not (getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0))


def _plan(kernel: Any, config: triton.Config, provided: Sequence[str], compiled: Any) -> tuple[Any, ...] | None:
    """``(launcher, its leading arguments, compiled kernel, config, config values, the device's compiled kernels)``.

    Holds the kernel, no tensor. None: Triton has dropped the kernel since.
    """
    if not any(kernel is one for one in compiled[0].values()):
        return None
    launcher, constants = kernel.run, tuple(config.kwargs[name] for name in provided)
    direct = getattr(launcher, "launch", None) if _is_in(type(launcher).__call__, nvidia) else None
    if direct is None:
        head: tuple[Any, ...] = (kernel.function, kernel.packed_metadata, None, None, None)
        return launcher, head, kernel, config, constants, compiled
    head = (
        kernel.function,
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        None,  # global scratch
        None,  # profile scratch
        kernel.packed_metadata,
        None,  # launch metadata, read by launch hooks only
        None,  # launch_enter_hook: an empty chain does what no hook does
        None,  # launch_exit_hook
    )
    return direct, head, kernel, config, constants, compiled
