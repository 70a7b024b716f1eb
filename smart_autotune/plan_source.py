"""Writes the launch function of one kernel for one combination of argument classes; see :mod:`smart_autotune.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from smart_autotune import settings
from smart_autotune.batch import BatchRule, next_power_of_2

NOT_PLANNED = object()
MISSING = type("Missing", (), {"__repr__": lambda self: "<not passed>"})()
STOCK_JIT_RUN = JITFunction.run

Kind = tuple[Any, ...]  # ("config",) | ("scalar", cls) | ("constexpr", cls) | ("tensor", cls, "is_cuda" or "is_cpu")


class Source:
    """The text of the function and the names it needs.

    ``kinds``: how each argument is read, in signature order. ``provided``: names that the configs set, in their order.
    """

    def __init__(
        self,
        view: Any,
        batch: BatchRule,
        kinds: Iterable[Kind],
        defaults: Mapping[str, Any],
        provided: tuple[str, ...],
    ) -> None:
        self._jit = view.fn
        self._tuner = view.autotuner
        self._author_keys = frozenset(view.keys)
        self._batch = batch
        self._kinds = dict(zip(self._jit.arg_names, kinds))
        self._provided = provided
        self._names: dict[str, Any] = self._world()
        self._parameters = [f"{name}={self._name_of(defaults.get(name, MISSING))}" for name in self._jit.arg_names]

    def text(self) -> tuple[str, dict[str, Any]]:
        """The source of ``launch``, and its globals."""
        pointers = [name for name, kind in self._kinds.items() if kind[0] == "tensor"]
        passed = ["x", "y", "z", "stream_of(device_)", "*head", *self._passed()]
        lines = [
            f"def launch({', '.join(self._parameters)}, *, grid=None, warmup=False, learn=False, **extra_):",
            f"    if not ({' and '.join([*self._argument_guards(), *_WORLD_GUARDS])}):",
            "        return NOT_PLANNED",
            *(f"    p_{name} = {name}.data_ptr()" for name in pointers),
            "    device_ = device_of()",
            f"    key_ = ({', '.join(['device_', *self._argument_keys(), *self._batch_key()])},)",
            "    if learn:",
            "        return key_",
            "    plan_ = plans.get(key_)",
            "    if plan_ is None:",
            "        return NOT_PLANNED",
            "    start, head, kernel_, config_, constants_ = plan_",
            *([f"    {''.join(f'c_{name}, ' for name in self._provided)}= constants_"] if self._provided else []),
            *self._globals_check(),
            "    if grid.__class__ is not tuple:",
            "        if grid is None:",
            "            return NOT_PLANNED",
            "        if callable(grid):",
            f"            grid = grid({{{self._bound()}}})",
            "    size_ = len(grid)",
            "    x, y, z = grid[0], grid[1] if size_ > 1 else 1, grid[2] if size_ > 2 else 1",
            "    tuner.best_config = config_",
            f"    start({', '.join(passed)})",
            "    return kernel_",
        ]
        return "\n".join(lines) + "\n", self._names

    def _world(self) -> dict[str, Any]:
        """What the function takes for granted, to be compared at each launch."""
        driver = triton.runtime.driver.active
        return {
            "NOT_PLANNED": NOT_PLANNED,
            "MISSING": MISSING,
            "JITFunction": JITFunction,
            "STOCK_JIT_RUN": STOCK_JIT_RUN,
            "jit": self._jit,
            "jit_names": self._jit.__dict__,
            "runtime": knobs.runtime,
            "compilation": knobs.compilation,
            "enter": knobs.runtime.launch_enter_hook,
            "leave": knobs.runtime.launch_exit_hook,
            "debug": knobs.runtime.debug,
            "instrumentation": knobs.compilation.instrumentation_mode,
            "settings": settings,
            "wanted": settings.current(),
            "drivers": triton.runtime.driver,
            "driver": driver,
            "tuner": self._tuner,
            "cache": self._tuner.cache,
            "configs": self._tuner.configs,
            "stream_of": driver.get_current_stream,
            "device_of": _device_reader(driver),
            "bucket_of": self._batch.bucket_of,
            "int_class": int_class,
        }

    def _name_of(self, value: Any) -> str:
        name = f"constant_{len(self._names)}_"
        self._names[name] = value
        return name

    def _argument_guards(self) -> list[str]:
        guards = ["not extra_", "not warmup"]
        for name, kind in self._kinds.items():
            if kind[0] == "config":
                guards.append(f"{name} is MISSING")
            elif kind[1] is type(None):
                guards.append(f"{name} is None")
            else:
                guards.append(f"{name}.__class__ is {self._name_of(kind[1])}")
                if kind[0] == "tensor":
                    guards.append(f"{name}.{kind[2]}")
        source = self._batch_source()
        if source is not None and self._kinds[source[0]][0] == "tensor":
            guards.append(f"{source[0]}.dim() > {source[1]}")
        return guards

    def _argument_keys(self) -> list[str]:
        """Expressions for what selects another binary, or another key of the author's."""
        keys = []
        for name, kind in self._kinds.items():
            if kind[0] == "tensor":
                keys += [f"{name}.dtype", f"p_{name} & 15 == 0"]
            elif kind[0] == "config" or kind[1] is type(None):
                continue
            elif kind[0] == "constexpr" or name in self._author_keys:
                keys.append(f"repr({name})" if kind[1] is float else name)  # nan is never equal to itself
            elif kind[1] is int:
                keys.append(f"(0 if {name} & 15 else 1) if 1 < {name} <= 2147483647 else int_class({name})")
        return keys

    def _batch_source(self) -> tuple[str, int] | None:
        """The argument and dimension that hold the batch size for these classes, as ``BatchRule`` finds them."""
        source = self._batch.readable_from
        if source is None or source[0] == "never":
            return None
        if source[0] == "argument":
            name, dim = source[1], source[2]
            kind = self._kinds[name]
            readable = kind[0] == "tensor" or (kind[0] != "config" and kind[1] is int)
            return (name, dim) if readable else None
        ints = (n for n in source[1:] if self._kinds[n][0] in ("scalar", "constexpr") and self._kinds[n][1] is int)
        tensors = (n for n, kind in self._kinds.items() if kind[0] == "tensor")
        name = next(ints, None) or next(tensors, None)
        return None if name is None else (name, 0)

    def _batch_key(self) -> list[str]:
        source = self._batch_source()
        if source is None:
            return []
        name, dim = source
        size = f"{name}.size({dim})" if self._kinds[name][0] == "tensor" else name
        if self._batch.bucket_of is next_power_of_2:
            return [f"({size} - 1).bit_length() if {size} > 0 else 0"]
        return [f"bucket_of({size})"]

    def _passed(self) -> list[str]:
        """The launcher's arguments in signature order; CUDA pointers as ints, which Triton's launcher takes as such."""
        return [
            f"c_{name}" if kind[0] == "config" else f"p_{name}" if kind[-1] == "is_cuda" else name
            for name, kind in self._kinds.items()
        ]

    def _bound(self) -> str:
        """What a function grid sees: every argument by name, the config's values among them."""
        return ", ".join(f"{name!r}: {'c_' if kind[0] == 'config' else ''}{name}" for name, kind in self._kinds.items())

    def _globals_check(self) -> list[str]:
        """Globals that the compiled kernel took in must still be what they were, as Triton checks at each launch."""
        used = self._jit.used_global_vals
        if not used:
            return []
        self._names["used_globals"] = [(name, value, owner) for (name, _), (value, owner) in used.items()]
        return [
            "    for used_name, used_value, owner in used_globals:",
            "        if owner.get(used_name, MISSING) != used_value:",
            "            return NOT_PLANNED",
        ]


_WORLD_GUARDS = (
    "runtime.launch_enter_hook is enter",
    "runtime.launch_exit_hook is leave",
    "not enter.calls",
    "not leave.calls",
    "runtime.debug is debug",
    "compilation.instrumentation_mode is instrumentation",
    "settings._current is wanted",
    "drivers._active is driver",
    "JITFunction.run is STOCK_JIT_RUN",
    "'run' not in jit_names",
    "not jit.pre_run_hooks",
    "tuner.fn is jit",
    "tuner.cache is cache",
    "tuner.configs is configs",
)


def int_class(value: int) -> int:
    """The class of an int that Triton's specialisation sees: 1, divisible by 16 or not, 32 bit, 64 bit, unsigned."""
    if value == 1:
        return 2
    divisible = 0 if value & 15 else 1
    if -(2**31) <= value < 2**31:
        return divisible  # the classes of the common case
    return divisible + (4 if value < 2**63 else 6)


def _device_reader(driver: Any) -> Callable[[], int]:
    """The current device, without torch's Python wrapper where it is torch's."""
    import torch

    if driver.get_current_device is torch.cuda.current_device:
        raw: Callable[[], int] = torch._C._cuda_getDevice
        return raw
    found: Callable[[], int] = driver.get_current_device
    return found
