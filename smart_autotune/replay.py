"""How one call compiles, as data: enough to compile it again elsewhere for another GPU. No argument's data is in it.

A recipe is what ``JITFunction.run`` of Triton 3.6 works out of the arguments before it asks the driver for anything.
"""

from __future__ import annotations

import copy
import importlib
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from smart_autotune.checks import innermost
from smart_autotune.errors import one_line

Path = tuple[int, ...]
PARTS = ("signature", "constants", "attributes", "options")


class NotReplayable(ValueError):
    """Something of a call that has no lasting text, or a record that cannot be turned into a call again."""


@dataclass(frozen=True)
class Recipe:
    """One config of one call: the type of each argument by name, constants and attributes by path, raw options."""

    signature: Mapping[str, Any]
    constants: Mapping[Path, Any]
    attributes: Mapping[Path, Any]
    options: Mapping[str, Any]

    def compile(self, jit: Any, target: GPUTarget) -> Any:
        """The kernel compiled for ``target``. Needs no driver."""
        options = make_backend(target).parse_options(dict(self.options))
        source = _source_class(jit)(jit, dict(self.signature), dict(self.constants), dict(self.attributes))
        return triton.compile(source, target=target, options=options.__dict__)


def _source_class(jit: Any) -> Any:
    if jit.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


class Binder:
    """Makes recipes of one jitted function's calls, as they specialise for ``target``."""

    def __init__(self, jit: Any, target: GPUTarget) -> None:
        self._jit = jit
        self._backend = make_backend(target)
        self._bind = create_function_from_signature(jit.signature, jit.params, self._backend)

    def recipe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recipe:
        knobs = triton.knobs
        passed = {
            **kwargs,
            "debug": kwargs.get("debug", self._jit.debug) or knobs.runtime.debug,
            "instrumentation_mode": knobs.compilation.instrumentation_mode,
        }
        bound, specialization, rest = self._bind(*args, **passed)
        parsed, signature, constants, attributes = self._jit._pack_args(
            self._backend, passed, bound, specialization, rest
        )
        options = {name: value for name, value in passed.items() if name in parsed.__dict__}
        return Recipe(signature, constants, attributes, options)


def with_jit_replaced(fn: Any, stand_in: Callable[[Any], Any]) -> Any:
    """What a tuner calls, with ``stand_in(jit)`` for the jitted function: heuristics and other wrappers stay."""
    if isinstance(fn, JITFunction):
        return stand_in(fn)
    if not hasattr(fn, "fn"):
        raise NotReplayable(f"a {type(fn).__name__}, not made by @triton.jit (is TRITON_INTERPRET set? unset it)")
    twin = copy.copy(fn)
    twin.fn = with_jit_replaced(fn.fn, stand_in)
    return twin


# ---- to JSON and back ------------------------------------------------------------------------------------------------


def encode(recipe: Recipe, arg_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The recipe as JSON, each part by argument name (``name.0`` inside a tuple). NotReplayable names what is not."""

    def by_name(values: Mapping[Path, Any]) -> dict[str, Any]:
        return {_text_of(path, arg_names): value for path, value in values.items()}

    return {
        "signature": _encoded("type of", recipe.signature),
        "constants": _encoded("constant", by_name(recipe.constants)),
        "attributes": _encoded("attribute of", by_name({path: dict(a) for path, a in recipe.attributes.items()})),
        "options": _encoded("option", recipe.options),
    }


def _encoded(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = plain(value)
        except NotReplayable as error:
            raise NotReplayable(f"{what} {name} is {error}") from None
    return found


def decode(raw: Any, arg_names: Sequence[str]) -> Recipe:
    """A recipe from JSON, for a function with these arguments. NotReplayable says what does not go together."""
    parts: dict[str, Mapping[str, Any]] = {}
    for name in PARTS:
        part = raw.get(name) if isinstance(raw, Mapping) else None
        if not isinstance(part, Mapping):
            raise NotReplayable(f"its {name} is {type(part).__name__}, not an object")
        parts[name] = part
    if set(parts["signature"]) != set(arg_names):
        odd = sorted(set(parts["signature"]) ^ set(arg_names))
        raise NotReplayable(f"today's kernel has other arguments than the recorded one: {', '.join(odd[:5])}")
    values = {name: {key: unplain(value) for key, value in part.items()} for name, part in parts.items()}
    return Recipe(
        {name: values["signature"][name] for name in arg_names},
        {_path_of(text, arg_names): value for text, value in values["constants"].items()},
        {_path_of(text, arg_names): _attributes(value) for text, value in values["attributes"].items()},
        values["options"],
    )


def _attributes(value: Any) -> list[list[Any]]:
    if not isinstance(value, dict):
        raise NotReplayable(f"the attributes of an argument are {type(value).__name__}")
    return [[name, setting] for name, setting in value.items()]


def _text_of(path: Path, arg_names: Sequence[str]) -> str:
    return ".".join([arg_names[path[0]], *map(str, path[1:])])


def _path_of(text: str, arg_names: Sequence[str]) -> Path:
    name, *rest = text.split(".")
    if name not in arg_names or not all(part.isdecimal() for part in rest):
        raise NotReplayable(f"there is no argument {text[:80]!r}")
    return (list(arg_names).index(name), *map(int, rest))


def common(recipes: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What is the same in all of these encoded recipes."""
    first, rest = recipes[0], recipes[1:]
    return {
        part: {
            name: value
            for name, value in first[part].items()
            if all(name in other[part] and _same(other[part][name], value) for other in rest)
        }
        for part in PARTS
    }


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)  # 1 is not True


def without(recipe: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What an encoded recipe has beyond ``shared``; empty parts are left out."""
    own = {part: {k: v for k, v in recipe[part].items() if k not in shared[part]} for part in PARTS}
    return {part: values for part, values in own.items() if values}


def merged(shared: Any, own: Any) -> dict[str, Any]:
    """The encoded recipe that :func:`common` and :func:`without` took apart."""
    for what in (shared, own):
        if not isinstance(what, Mapping):
            raise NotReplayable(f"its call is {type(what).__name__}, not an object")
    found = {}
    for part in PARTS:
        parts = [what.get(part) or {} for what in (shared, own)]
        if not all(isinstance(values, Mapping) for values in parts):
            raise NotReplayable(f"its {part} is not an object")
        found[part] = {**parts[0], **parts[1]}
    return found


def plain(value: Any) -> Any:
    """A value as JSON from which :func:`unplain` makes an equal one of the same type. Tensors have none."""
    if isinstance(value, Enum):
        return {"enum": [type(value).__module__, type(value).__qualname__, value.name]}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return {"float": repr(float(value))}
    if isinstance(value, tuple):
        items = [plain(item) for item in value]
        if hasattr(value, "_fields"):
            return {"namedtuple": [type(value).__module__, type(value).__qualname__, items]}
        return {"tuple": items}
    if isinstance(value, list):
        return {"list": [plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, tl.constexpr):
        return {"constexpr": plain(value.value)}
    if type(value) is tl.dtype:
        return {"dtype": value.name}
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return {"torch_dtype": str(value).removeprefix("torch.")}
    function = innermost(value) if hasattr(value, "fn") else value
    if isinstance(function, JITFunction):
        return {"function": [function.__module__, function.__qualname__]}
    raise NotReplayable(f"a {type(value).__module__}.{type(value).__qualname__}")


def unplain(raw: Any) -> Any:
    """The value of :func:`plain`'s JSON. NotReplayable when it is none of those or cannot be imported."""
    if raw is None or isinstance(raw, (bool, int, str)):
        return raw
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise NotReplayable(f"a value of the record is {type(raw).__name__} with no type of its own")
    ((kind, content),) = raw.items()
    make = _MADE.get(kind)
    if make is None:
        raise NotReplayable(f"a value of the record has the type {kind[:40]!r}, which is not known")
    try:
        return make(content)
    except NotReplayable:
        raise
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        raise NotReplayable(f"a {kind} of the record cannot be read: {one_line(error)}") from None


def _torch_dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise NotReplayable(f"torch.{name} is no dtype")
    return found


def _function(where: Sequence[str]) -> Any:
    found = innermost(_imported(*where))
    if not isinstance(found, JITFunction):
        raise NotReplayable(f"{'.'.join(where)} is no jitted function")
    return found


def _member(where: Sequence[str]) -> Any:
    module, qualname, name = where
    found = _imported(module, qualname)
    if not (isinstance(found, type) and issubclass(found, Enum)) or name not in found.__members__:
        raise NotReplayable(f"{module}.{qualname} is no enumeration with {name!r}")
    return found[name]


def _named_tuple(where: Sequence[Any]) -> Any:
    module, qualname, items = where
    found = _imported(module, qualname)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make")):
        raise NotReplayable(f"{module}.{qualname} is no named tuple")
    return found._make(_items(items))


def _imported(module: str, qualname: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except Exception as error:
        raise NotReplayable(f"{module}.{qualname} cannot be imported: {one_line(error)}") from error
    return found


def _items(content: Iterable[Any]) -> list[Any]:
    return [unplain(item) for item in content]


_MADE = {
    "float": float,
    "tuple": lambda content: tuple(_items(content)),
    "list": _items,
    "dict": lambda content: {unplain(key): unplain(value) for key, value in content},
    "constexpr": lambda content: tl.constexpr(unplain(content)),
    "dtype": tl.dtype,
    "torch_dtype": _torch_dtype,
    "function": _function,
    "enum": _member,
    "namedtuple": _named_tuple,
}
