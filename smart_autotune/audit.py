"""Offline verdicts: every config of a kernel compiled for any NVIDIA arch, with no GPU and no driver."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import AutotunerError
from triton.runtime.jit import JITFunction

from smart_autotune import limits, resources
from smart_autotune.autotuner import SmartAutotuner
from smart_autotune.errors import BadValue, one_line
from smart_autotune.launch import Call
from smart_autotune.limits import DeviceLimits
from smart_autotune.prefilter import Candidate, compile_candidates
from smart_autotune.replay import Binder, NotReplayable, with_jit_replaced
from smart_autotune.verdict import Outcome, Verdict, describe

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Audit:
    """The verdicts of one kernel for one arch and one example, in the order in which the configs were declared.

    ``call``: what ``example`` is: the author's example, or a recorded call.
    """

    kernel: str
    limits: DeviceLimits
    example: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    call: str = "example"

    @property
    def fits(self) -> bool:
        """Whether at least one config can run."""
        return any(verdict.fits for verdict in self.verdicts)

    def rows(self) -> list[dict[str, Any]]:
        """One flat object for each config, as ``smart-autotune audit --json`` prints them."""
        return [
            {
                "kernel": self.kernel,
                "arch": self.limits.arch,
                "example": self.example,
                "config": describe(verdict.config),
                "outcome": str(verdict.outcome),
                "need": verdict.need,
                "limit": verdict.limit,
                "unit": verdict.unit,
                "registers": verdict.registers,
                "spill_bytes": verdict.spill_bytes,
                "compile_secs": verdict.compile_secs,
            }
            for verdict in self.verdicts
        ]


def audit(
    kernel: Any, arch: str, example: str, arguments: Arguments, compiled: Callable[[], None] = lambda: None
) -> Audit:
    """Compiles every config of ``kernel`` that its prune leaves, for ``arch`` and the call ``arguments``.

    ``kernel``: a smart-autotuned kernel, heuristics above it or not. ``arch``: a name such as ``"sm_120"``.
    ``arguments``: by name; meta tensors do. ``compiled`` is called after each compile, from the compiling thread.
    """
    device = limits.of_arch(arch)
    tuner = tuner_of(kernel)
    if tuner is None:
        raise BadValue(f"{kernel!r} is not smart-autotuned")
    named = _with_heuristics_above(kernel, arguments)
    _check_complete(tuner, example, named)
    kept, notes = _survivors(tuner, named)
    call = Call(
        fn=_for_target(tuner.fn, target_of(device), compiled),
        arg_names=tuple(tuner.arg_names),
        args=(),
        kwargs=named,
        launch_kwargs={},
        named=named,
    )
    verdicts = [with_resources(candidate) for candidate in compile_candidates(call, kept, device)]
    name = tuner.base_fn.__name__
    return Audit(name, device, example, tuple(_in_declared_order(tuner.configs, verdicts)), notes)


def target_of(device: DeviceLimits) -> GPUTarget:
    """What Triton compiles for ``device``, a CUDA arch."""
    return GPUTarget("cuda", int(device.arch.removeprefix("sm_")), device.warp_size)


def tuner_of(kernel: Any) -> SmartAutotuner | None:
    """The smart autotuner inside ``kernel``, looked for through the decorators above it."""
    while isinstance(kernel, (Heuristics, Autotuner)) and not isinstance(kernel, SmartAutotuner):
        kernel = kernel.fn
    return kernel if isinstance(kernel, SmartAutotuner) else None


def examples_of(kernel: Any) -> dict[str, Arguments]:
    """The author's example calls by name (a list gets numbers). BadValue when there are none or they do not build."""
    tuner = tuner_of(kernel)
    name = tuner.base_fn.__name__ if tuner is not None else repr(kernel)
    build = getattr(tuner, "examples", None)
    remedy = "pass examples=callable returning argument dicts to smart_autotune"
    if build is None:
        raise BadValue(f"kernel {name} has no examples; {remedy}")
    try:
        built = build()
        if not isinstance(built, Mapping):
            built = {str(index): arguments for index, arguments in enumerate(built)}
    except Exception as error:
        raise BadValue(f"kernel {name}: its examples raised {one_line(error)}; {remedy}") from error
    bad = next((key for key, arguments in built.items() if not isinstance(arguments, Mapping)), None)
    if not built or bad is not None:
        found = "returned none" if not built else f"{bad!r} is a {type(built[bad]).__name__}, not an argument dict"
        raise BadValue(f"kernel {name}: examples {found}; {remedy}")
    return {str(key): dict(arguments) for key, arguments in built.items()}


class _ForeignFunction:
    """Stands in for a jitted function below the tuner: the same arguments, compiled for ``target``."""

    def __init__(self, jit: Any, target: GPUTarget, compiled: Callable[[], None]) -> None:
        self._jit = jit
        self._target = target
        self._compiled = compiled
        self._binder = Binder(jit, target)

    def run(self, *args: Any, grid: Any = None, warmup: bool = True, **kwargs: Any) -> Any:
        try:
            return self._binder.recipe(args, kwargs).compile(self._jit, self._target)
        finally:
            self._compiled()


def _for_target(fn: Any, target: GPUTarget, compiled: Callable[[], None]) -> Any:
    """The tuner's function for ``target``: heuristics and other wrappers stay, the jitted function is replaced."""
    try:
        return with_jit_replaced(fn, lambda jit: _ForeignFunction(jit, target, compiled))
    except NotReplayable as error:
        raise BadValue(f"{fn!r} cannot be compiled offline: {error}") from None


def _layers(fn: Any) -> list[Any]:
    """``fn`` and what it wraps, outermost first."""
    found = [fn]
    while not isinstance(fn, JITFunction) and hasattr(fn, "fn"):
        fn = fn.fn
        found.append(fn)
    return found


def _with_heuristics_above(kernel: Any, arguments: Arguments) -> dict[str, Any]:
    named = dict(arguments)
    for layer in _layers(kernel):
        if isinstance(layer, SmartAutotuner):
            break
        for name, heuristic in getattr(layer, "values", {}).items():
            named[name] = heuristic(named)
    return named


def _check_complete(tuner: SmartAutotuner, example: str, named: Arguments) -> None:
    layers = _layers(tuner.fn)
    known = {*named, *(name for config in tuner.configs for name in config.kwargs)}
    known.update(name for layer in layers for name in getattr(layer, "values", {}))
    params = getattr(layers[-1], "params", [])
    missing = [param.name for param in params if not param.has_default and param.name not in known]
    if missing:
        raise BadValue(f"kernel {tuner.base_fn.__name__}: example {example!r} lacks {', '.join(missing)}")


def _survivors(tuner: SmartAutotuner, named: dict[str, Any]) -> tuple[list[triton.Config], tuple[str, ...]]:
    """The configs that the author's own prune leaves, and a note when it could not be asked."""
    twin = copy.copy(tuner)
    twin.nargs = named
    prune = tuner.early_config_prune
    if prune is not None:
        # Whether a caller passes an argument by position or by keyword is not known here: the prune sees both.
        twin.early_config_prune = lambda configs, nargs, **_: prune(configs, nargs, **named)
    try:
        return list(twin.prune_configs({})), ()
    except AutotunerError:
        return [], ("the kernel's own prune left no config",)
    except Exception as error:
        note = f"the kernel's own prune could not run offline, every config was audited: {one_line(error)}"
        return list(tuner.configs), (note,)
    finally:
        twin.nargs = None


def with_resources(candidate: Candidate) -> Verdict:
    """The candidate's verdict with the registers and spills of its binary."""
    found = resources.of(candidate.kernel) if candidate.kernel is not None else None
    if found is None:
        return candidate.verdict
    return replace(candidate.verdict, registers=found.registers, spill_bytes=found.spill_bytes)


def _in_declared_order(declared: Sequence[triton.Config], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for each declared config; those that a prune made anew come last."""
    left = list(verdicts)
    ordered = []
    for config in declared:
        found = next((verdict for verdict in left if verdict.config == config), None)
        if found is None:
            found = Verdict(config, Outcome.PRUNED_BY_USER)
        else:
            left.remove(found)
        ordered.append(found)
    return ordered + left
