"""What a decorated kernel is made of, and the checks of what its author wrote above it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import triton

from smart_autotune.errors import BadType, BadValue


def base_function(fn: Any) -> Any:
    """The Python function under all decorators."""
    while not inspect.isfunction(fn):
        fn = fn.fn
    return fn


def innermost(fn: Any) -> Any:
    """The ``JITFunction`` (or ``InterpretedFunction``) under heuristics and other wrappers."""
    while hasattr(fn, "fn") and not inspect.isfunction(fn.fn):
        fn = fn.fn
    return fn


def defaults(function: Any) -> dict[str, Any]:
    """Default values by argument name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def checked_configs(configs: Iterable[triton.Config] | None) -> list[triton.Config]:
    """A list of configs from any iterable (a list is kept as it is). Empty means stock's default config."""
    if configs is None:
        return []
    if isinstance(configs, (str, bytes, Mapping)) or not isinstance(configs, Iterable):
        raise BadType(f"configs is {type(configs).__name__}; allowed: an iterable of triton.Config")
    found = configs if isinstance(configs, list) else list(configs)
    for index, config in enumerate(found):
        if not isinstance(config, triton.Config):
            raise BadType(f"configs[{index}] is {type(config).__name__}; allowed: triton.Config")
    return found


def checked_names(kernel: str, option: str, names: Iterable[str] | None) -> list[str]:
    """A list of argument names; None means none."""
    if names is None:
        return []
    if isinstance(names, str) or not isinstance(names, Iterable):
        hint = f", such as [{names!r}]" if isinstance(names, str) else ""
        raise BadType(f"{kernel}: {option}={names!r}; allowed: a list of argument names{hint}")
    found = names if isinstance(names, list) else list(names)
    for name in found:
        if not isinstance(name, str):
            raise BadType(f"{kernel}: {option} holds {name!r} ({type(name).__name__}); allowed: argument names")
    return found


def check_top_k(kernel: str, prune_configs_by: Mapping[str, Any] | None) -> None:
    """``top_k`` is a share in (0, 1] as a float, or a count >= 1 as an int."""
    if not prune_configs_by or prune_configs_by.get("perf_model") is None:
        return
    top_k = prune_configs_by.get("top_k", 1.0)
    allowed = "a float in (0, 1] (share of the configs) or an int >= 1 (how many)"
    if isinstance(top_k, bool) or not isinstance(top_k, (int, float)):
        raise BadType(f"{kernel}: top_k={top_k!r} is {type(top_k).__name__}; allowed: {allowed}")
    in_range = top_k >= 1 if isinstance(top_k, int) else 0.0 < float(top_k) <= 1.0
    if not in_range:
        raise BadValue(f"{kernel}: top_k={top_k!r}; allowed: {allowed}")
