"""The hot path: from a call's arguments straight to the compiled kernel, without asking anybody.

For each kernel and each combination of argument classes one function is generated (as Triton generates its binder). It
reads the launch key off the arguments, finds the plan and launches. Anything it does not handle goes down the full
path (``Engine.run``), which teaches it a plan where that is exact.

Handled: positional, keyword, defaulted and mixed arguments; tensors, ints, floats, bools, None, strings and other
constexpr values; a grid as a tuple or a function; several devices; graph capture (a plan's kernel is loaded).
Part of the launch key, so that another value is another plan: dtype, 16-byte alignment, the classes of ints that
specialisation looks at (1, divisible by 16, 32/64 bit), constexpr values with their type, the author's key values,
the batch bucket, the device.
Checked at each launch by a cheap flag, full path when it differs: launch hooks, pre-run hooks, Triton's debug and
instrumentation knobs, our settings, the active driver, ``kernel.fn`` and its ``run`` (a wrapper put there later),
``kernel.configs`` and ``kernel.cache``, the values of globals that the kernel uses.
Full path always: config hooks, ``@heuristics`` or other wrappers below the tuner, tensor descriptors, tuples and other
argument classes, tensors elsewhere than the first call's, launch options in the call, kernels with scratch memory,
``batch=`` given as a function, interpreter mode, Triton releases other than the verified one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from smart_autotune import settings
from smart_autotune.batch import BatchRule
from smart_autotune.errors import one_line
from smart_autotune.plan_source import NOT_PLANNED, STOCK_JIT_RUN, Kind, Source

log = logging.getLogger("smart_autotune")

VERIFIED = "3.6.0"
MOST_PLANS = 4096  # a kernel's plans are dropped beyond; relearning one costs a full launch

SCALARS = (int, float, bool, str, type(None))


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
        self._functions: dict[tuple[Any, ...], tuple[Callable[..., Any], dict[Any, Any]]] = {}
        self._world: tuple[Any, ...] = ()  # what the generated functions take for granted
        self._possible: bool | None = None
        self.launch: Callable[..., Any] = _never

    def clear(self) -> None:
        """Forgets every plan; the next launches take the full path."""
        self._functions.clear()
        self.launch = _never

    def learn(self, args: Sequence[Any], kwargs: Mapping[str, Any], config: triton.Config, kernel: Any) -> None:
        """Notes that the full path launched ``kernel`` by ``config`` for this call: the next such call is direct."""
        if self._possible is None:
            self._possible = self._is_possible()
        if not self._possible or config.pre_hook is not None or not _is_plain(kernel):
            return
        try:
            self._learn(args, kwargs, config, kernel)
        except Exception as error:
            self._possible = False
            self.clear()
            if settings.current().strict:
                raise
            log.warning("%s: direct launches are off: %s", self._view.kernel_name, one_line(error))

    def _is_possible(self) -> bool:
        jit = self._view.fn
        return (
            triton.__version__ == VERIFIED
            and type(jit) is JITFunction
            and jit.run.__func__ is STOCK_JIT_RUN
            and triton.runtime.driver.active.get_current_target().backend == "cuda"
            and not _RESERVED.intersection(jit.arg_names)
        )

    def _learn(self, args: Sequence[Any], kwargs: Mapping[str, Any], config: triton.Config, kernel: Any) -> None:
        jit = self._view.fn
        given = {**dict(zip(jit.arg_names, args)), **kwargs}
        given.pop("grid", None)
        if given.pop("warmup", False) or not given.keys() <= set(jit.arg_names):
            return
        defaults = {p.name: p.default for p in jit.params if p.has_default and p.name not in config.kwargs}
        values = {**defaults, **given}
        kinds = tuple(_kind(param, values, config) for param in jit.params)
        if None in kinds or self._batch.readable_from is None:
            return
        world = self._world_now()
        if len(world) != len(self._world) or any(a is not b for a, b in zip(world, self._world)):
            self.clear()
            self._world = world
        function, plans = self._functions.get(kinds) or self._generate(kinds, defaults, tuple(config.kwargs))
        key = function(*args, **{**kwargs, "learn": True})
        if key is NOT_PLANNED:
            return
        if sum(len(plans) for _, plans in self._functions.values()) >= MOST_PLANS:
            self.clear()
            return
        plans[key] = _plan(kernel, config)
        self.launch = self._dispatcher()

    def _world_now(self) -> tuple[Any, ...]:
        tuner, driver = self._view.autotuner, triton.runtime.driver.active
        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        compiled_with = (knobs.runtime.debug, knobs.compilation.instrumentation_mode)
        return (settings.current(), driver, tuner.fn, tuner.cache, tuner.configs, *hooks, *compiled_with)

    def _generate(
        self, kinds: tuple[Any, ...], defaults: Mapping[str, Any], provided: tuple[str, ...]
    ) -> tuple[Callable[..., Any], dict[Any, Any]]:
        source, names = Source(self._view, self._batch, kinds, defaults, provided).text()
        plans = names["plans"] = {}
        exec(compile(source, f"<launch of {self._view.kernel_name}>", "exec"), names)
        found = self._functions[kinds] = (names["launch"], plans)
        return found

    def _dispatcher(self) -> Callable[..., Any]:
        functions = tuple(function for function, _ in self._functions.values())
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


_RESERVED = frozenset({"grid", "warmup", "learn"})


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


def _is_plain_constant(value: Any) -> bool:
    import torch

    return isinstance(value, (triton.language.dtype, torch.dtype))


def _is_plain(kernel: Any) -> bool:
    """Whether a direct launch of ``kernel`` needs nothing but its arguments (no scratch memory)."""
    metadata = getattr(kernel, "metadata", None)
    if metadata is None or getattr(kernel, "function", None) is None:
        return False
    return not (getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0))


def _plan(kernel: Any, config: triton.Config) -> tuple[Any, ...]:
    """``(launcher, its leading arguments, compiled kernel, config, config values)``; holds the kernel, no tensor."""
    launcher, constants = kernel.run, tuple(config.kwargs.values())
    direct = getattr(launcher, "launch", None)
    if direct is None:
        head: tuple[Any, ...] = (kernel.function, kernel.packed_metadata, None, None, None)
        return launcher, head, kernel, config, constants
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
    return direct, head, kernel, config, constants
