"""One call and how it is launched: the arguments by name, a config's compile, the launch itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton

# CPython (seen on 3.11) keeps one recursion counter for all threads that turn source into a syntax tree, and raises
# SystemError when they meet there; Triton's front end, which parses what a kernel calls, wraps it in its own errors.
# Not the config's fault: parsed again.
PARSE_RETRIES = 20


@dataclass(frozen=True)
class Call:
    """One call of a tuned kernel. Lives in locals only, so nothing keeps its tensors alive afterwards.

    ``launch_kwargs``: what Triton adds to the caller's keywords (``grid``, ``warmup``).
    ``named``: the arguments by name, in signature order, defaults filled in.
    """

    fn: Any
    arg_names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    launch_kwargs: Mapping[str, Any]
    named: Mapping[str, Any]

    @property
    def nargs(self) -> dict[str, Any]:
        """Positional arguments by name: what stock calls ``nargs`` and hands to prune functions."""
        return dict(zip(self.arg_names, self.args))

    @property
    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, **self.launch_kwargs}

    def hook_arguments(self, config: triton.Config | None = None) -> dict[str, Any]:
        """What a hook sees: every argument, and the config's own values."""
        chosen = config.all_kwargs() if config is not None else {}
        return {**self.nargs, **self.all_kwargs, **chosen}

    def replaced(self, replacements: Mapping[str, Any]) -> Call:
        """The same call with some arguments replaced, everything passed by keyword."""
        named = {**self.named, **replacements}
        passed = {**self.nargs, **self.kwargs, **replacements}
        return replace(self, args=(), kwargs=passed, named=named)

    def compile(self, config: triton.Config) -> Any:
        """Compiles ``config`` for this call's own specialisation: no launch, no module load, no hook of the config."""
        call = self.replaced(_described(self, config)) if _shapes_descriptors(self, config) else self
        launch = {"grid": None, **call.launch_kwargs, "warmup": True}
        for _ in range(PARSE_RETRIES):
            try:
                return call.fn.run(*call.args, **call.kwargs, **launch, **config.all_kwargs())
            except Exception as error:
                if not _is_false_parse_error(error):
                    raise
        return call.fn.run(*call.args, **call.kwargs, **launch, **config.all_kwargs())

    def run_config_hook(self, config: triton.Config, arguments: dict[str, Any]) -> None:
        if config.pre_hook is not None:
            config.pre_hook(arguments)

    def run(self, config: triton.Config) -> Any:
        """Launches ``config`` without hooks; returns what Triton returns (the compiled kernel)."""
        return self.fn.run(*self.args, **self.all_kwargs, **config.all_kwargs())

    def start(self, config: triton.Config) -> Any:
        """Launches ``config``, its own hook first."""
        self.run_config_hook(config, self.hook_arguments(config) if config.pre_hook is not None else {})
        return self.run(config)


def _is_false_parse_error(error: BaseException | None) -> bool:
    while error is not None:
        if "AST constructor recursion depth" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def load(kernel: Any) -> None:
    """Loads a compiled kernel's module now (the launch would). Raises Triton's ``OutOfResources``."""
    initialise = getattr(kernel, "_init_handles", None)
    if initialise is not None:
        initialise()


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape") and hasattr(value, "base")


def _shapes_descriptors(call: Call, config: triton.Config) -> bool:
    return config.pre_hook is not None and any(_is_descriptor(value) for value in call.named.values())


def _described(call: Call, config: triton.Config) -> dict[str, Any]:
    """The descriptors as ``config``'s hook leaves them, found on stand-ins: no live tensor is touched.

    A config's hook sets ``block_shape`` of host-side tensor descriptors, which is part of the compiled kernel's type.
    """
    stand_ins = {name: _stand_in(value) for name, value in call.hook_arguments(config).items()}
    config.pre_hook(stand_ins)
    found = {}
    for name, value in call.named.items():
        if _is_descriptor(value):
            found[name] = descriptor = _copy(stand_ins[name])
            object.__setattr__(descriptor, "base", value.base)
    return found


def _copy(descriptor: Any) -> Any:
    twin = object.__new__(type(descriptor))
    twin.__dict__.update(descriptor.__dict__)
    return twin


def _stand_in(value: Any) -> Any:
    if _is_descriptor(value):
        twin = _copy(value)
        object.__setattr__(twin, "base", _stand_in(value.base))
        return twin
    if hasattr(value, "data_ptr") and hasattr(value, "is_meta"):
        import torch

        return torch.empty_like(value, device="meta")
    return value
