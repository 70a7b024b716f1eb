"""Writes the launch functions of one kernel for one combination of argument classes; see :mod:`smart_autotune.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """The text of the functions and the names they need.

    ``kinds``: how each argument is read, in signature order. A kernel's arguments keep their names, which its callers
    use; every other name in the text ends with two underscores, which is why arguments so named are never planned.
    ``provided``: the arguments that the configs give, in signature order. ``options``: what the call gives beside the
    kernel's arguments, each an int, a bool, a str or None.
    """

    def __init__(
        self,
        view: Any,
        batch: BatchRule,
        kinds: Iterable[Kind],
        defaults: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._jit = view.fn
        self._tuner = view.autotuner
        self._author_keys = frozenset(view.keys)
        self._batch = batch
        self._kinds = dict(zip(self._jit.arg_names, kinds))
        self.kernel_name = view.kernel_name
        self.provided = tuple(name for name, kind in self._kinds.items() if kind[0] == "config")
        self._names: dict[str, Any] = {f"{name}__": value for name, value in self._world().items()}
        self._parameters = [f"{name}={self._name_of(defaults.get(name, MISSING))}" for name in self._jit.arg_names]
        self._options = options or {}

    def text(self) -> tuple[str, dict[str, Any]]:
        """The source of ``launch`` and of ``key_of`` (the key of a call, nothing launched), and their globals."""
        pointers = [name for name, kind in self._kinds.items() if kind[0] == "tensor"]
        options = [f"{name}=MISSING__" for name in self._options]
        parameters = ", ".join([*self._parameters, "*", "grid=None", "warmup=False", *options, "**extra__"])
        key = [
            f"    if not ({' and '.join([*self._argument_guards(), *_world_guards(self._tuner.configs)])}):",
            "        return NOT_PLANNED__",
            *(f"    p_{name}__ = {name}.data_ptr()" for name in pointers),
            "    device__ = device_of__()",
            f"    key__ = ({', '.join(['device__', *self._argument_keys(), *self._batch_key()])},)",
        ]
        passed = ["x__", "y__", "z__", "stream_of__(device__)", "*head__", *self._passed()]
        launch = [
            "    plan__ = plans__.get(key__)",
            "    if plan__ is None:",
            "        return NOT_PLANNED__",
            "    start__, head__, kernel__, config__, constants__, compiled__ = plan__",
            "    if config__.pre_hook is not None or jit__.device_caches.get(device__) is not compiled__:",
            "        return NOT_PLANNED__",
            *([f"    {''.join(f'c_{name}__, ' for name in self.provided)}= constants__"] if self.provided else []),
            *self._globals_check(),
            "    tuner__.best_config = config__",
            "    if grid.__class__ is not tuple__:",
            "        if grid is None:",
            "            return NOT_PLANNED__",
            "        if callable__(grid):",
            f"            grid = grid({{{self._bound()}}})",
            "    size__ = len__(grid)",
            "    x__, y__, z__ = grid[0], grid[1] if size__ > 1 else 1, grid[2] if size__ > 2 else 1",
            f"    start__({', '.join(passed)})",
            "    return kernel__",
        ]
        lines = [
            f"def key_of({parameters}):",
            *key,
            "    return key__",
            "",
            f"def launch({parameters}):",
            *key,
            *launch,
        ]
        return "\n".join(lines) + "\n", self._names

    def _world(self) -> dict[str, Any]:
        """What the functions take for granted, to be compared at each launch, and what they call."""
        driver = triton.runtime.driver.active
        return {
            "NOT_PLANNED": NOT_PLANNED,
            "MISSING": MISSING,
            "JITFunction": JITFunction,
            "STOCK_JIT_RUN": STOCK_JIT_RUN,
            "jit": self._jit,
            "jit_names": self._jit.__dict__,
            "jit_debug": self._jit.debug,
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
            "first_config": self._tuner.configs[0],
            "stream_of": driver.get_current_stream,
            "device_of": _device_reader(driver),
            "bucket_of": self._batch.bucket_of,
            "int_class": int_class,
            "callable": callable,
            "len": len,
            "repr": repr,
            "tuple": tuple,
        }

    def _name_of(self, value: Any) -> str:
        name = f"constant_{len(self._names)}__"
        self._names[name] = value
        return name

    def _argument_guards(self) -> list[str]:
        guards = ["not extra__", "not warmup"]
        for name, value in self._options.items():
            guards.append(f"{name}.__class__ is {self._name_of(type(value))} and {name} == {self._name_of(value)}")
        for name, kind in self._kinds.items():
            if kind[0] == "config":
                guards.append(f"{name} is MISSING__")
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
                keys += [f"{name}.dtype", f"p_{name}__ & 15 == 0"]
            elif kind[0] == "config" or kind[1] is type(None):
                continue
            elif kind[0] == "constexpr" or name in self._author_keys:
                keys.append(f"repr__({name})" if kind[1] is float else name)  # nan is never equal to itself
            elif kind[1] is int:
                keys.append(f"(0 if {name} & 15 else 1) if 1 < {name} <= 2147483647 else int_class__({name})")
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
        return [f"bucket_of__({size})"]

    def _passed(self) -> list[str]:
        """The launcher's arguments in signature order; CUDA pointers as ints, which Triton's launcher takes as such."""
        return [
            f"c_{name}__" if kind[0] == "config" else f"p_{name}__" if kind[-1] == "is_cuda" else name
            for name, kind in self._kinds.items()
        ]

    def _bound(self) -> str:
        """What a function grid sees: every argument by name, the config's values among them."""
        values = {name: f"c_{name}__" if kind[0] == "config" else name for name, kind in self._kinds.items()}
        return ", ".join(f"{name!r}: {value}" for name, value in values.items())

    def _globals_check(self) -> list[str]:
        """Globals that the compiled kernel took in must still be what they were, as Triton checks at each launch."""
        if not self._jit.used_global_vals:
            return []
        return [
            "    for (name__, id__), (value__, owner__) in jit__.used_global_vals.items():",
            "        if owner__.get(name__, MISSING__) != value__:",
            "            return NOT_PLANNED__",
        ]


_WORLD_GUARDS = (
    "runtime__.launch_enter_hook is enter__",
    "runtime__.launch_exit_hook is leave__",
    "not enter__.calls",
    "not leave__.calls",
    "runtime__.debug is debug__",
    "compilation__.instrumentation_mode is instrumentation__",
    "settings__._current is wanted__",
    "drivers__._active is driver__",
    "JITFunction__.run is STOCK_JIT_RUN__",
    "'run' not in jit_names__",
    "not jit__.pre_run_hooks",
    "jit__.debug is jit_debug__",
    "tuner__.fn is jit__",
    "tuner__.cache is cache__",
    "tuner__.configs is configs__",
)


def _world_guards(configs: Sequence[Any]) -> tuple[str, ...]:
    """Stock serves a known key by what won, however the list changes since; a list of one is read at each launch."""
    if len(configs) > 1:
        return (*_WORLD_GUARDS, "len__(configs__) > 1")
    return (*_WORLD_GUARDS, "len__(configs__) == 1", "configs__[0] is first_config__")


def int_class(value: int) -> int:
    """The class of an int that Triton's specialisation sees: 1, divisible by 16 or not, 32 bit, 64 bit, unsigned.

    Beyond 64 bits Triton refuses an int: such a class is never learned.
    """
    if value == 1:
        return 2
    divisible = 0 if value & 15 else 1
    if -(2**31) <= value < 2**31:
        return divisible  # the classes of the common case
    if -(2**63) <= value < 2**63:
        return divisible + 4
    return divisible + (6 if 0 < value < 2**64 else 8)


def _device_reader(driver: Any) -> Callable[[], int]:
    """The current device, without torch's Python wrapper where it is torch's."""
    import torch

    if driver.get_current_device is torch.cuda.current_device:
        raw: Callable[[], int] = torch._C._cuda_getDevice
        return raw
    found: Callable[[], int] = driver.get_current_device
    return found
