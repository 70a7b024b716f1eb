"""The tuning key: the named parts that one ranking is valid for."""

from __future__ import annotations

import difflib
import logging
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from smart_autotune.errors import BadType, not_ours
from smart_autotune.limits import DeviceLimits

log = logging.getLogger("smart_autotune")
MISSING = object()


class TuningKey(NamedTuple):
    """A tuple, so that stock's ``cache`` keeps its type; each part carries the name of the argument it came from.

    ``kernel``: qualified name and source hash. ``device``: arch and limits. ``values``: (argument, type, value).
    ``dtypes``: (argument, dtype). ``batch``: (where the batch size came from, bucket), or None.
    """

    kernel: str
    device: tuple[tuple[str, Any], ...]
    values: tuple[tuple[str, str, Any], ...]
    dtypes: tuple[tuple[str, str], ...]
    batch: tuple[str, int] | None

    @property
    def bucket(self) -> int | None:
        return self.batch[1] if self.batch else None

    @property
    def rest(self) -> TuningKey:
        """The key without its batch part: what keys of neighbouring buckets have in common."""
        return self._replace(batch=None)

    def differences(self, other: TuningKey) -> list[str]:
        """Names the parts in which the two keys differ: why one ranking does not serve the other."""
        found = [part for part in ("kernel", "device", "batch") if getattr(self, part) != getattr(other, part)]
        for part in ("values", "dtypes"):
            mine = {entry[0]: entry[1:] for entry in getattr(self, part)}
            theirs = {entry[0]: entry[1:] for entry in getattr(other, part)}
            names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            found += [f"{part}:{name}" for name in names]
        return found

    def describe(self) -> str:
        """One line for logs: ``M=64 q:bfloat16 idx:int32 batch(q)<=16 on sm_90 (232448 B)``."""
        words = [f"{name}={value}" for name, _, value in self.values]
        words += [f"{name}:{dtype.removeprefix('torch.')}" for name, dtype in self.dtypes]
        if self.batch:
            words.append(f"batch({self.batch[0]})<={self.batch[1]}")
        device = dict(self.device)
        return " ".join([*words, f"on {device.get('arch')} ({device.get('shared_bytes')} B)"])


class ArgumentBinder:
    """Turns one call's arguments into a dict by name, in signature order, defaults filled in.

    Names that the configs provide are left out unless the caller gave them.
    """

    def __init__(self, arg_names: Sequence[str], defaults: Mapping[str, Any], provided: frozenset[str]) -> None:
        self._arg_names = tuple(arg_names)
        self._defaults = {name: value for name, value in defaults.items() if name not in provided}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        positional = dict(zip(self._arg_names, args))
        named = {}
        for name in self._arg_names:
            value = positional.get(name, MISSING)
            if value is MISSING:
                value = kwargs.get(name, MISSING)
            if value is MISSING:
                value = self._defaults.get(name, MISSING)
            if value is not MISSING:
                named[name] = value
        return named


class KeyReader:
    """Reads the :class:`TuningKey` of one call off its named arguments."""

    def __init__(
        self,
        kernel: str,
        arg_names: Sequence[str],
        keys: Sequence[str],
        batch_part: Callable[[Mapping[str, Any]], tuple[str, int] | None],
        heuristics: Mapping[str, Callable[[dict[str, Any]], Any]] | None = None,
    ) -> None:
        self._kernel = kernel
        self._keys = tuple(keys)
        self._batch_part = batch_part
        self._heuristics = dict(heuristics or {})
        self._wants_heuristics = any(name in self._keys for name in self._heuristics)
        self._warn_unknown(arg_names)

    def _warn_unknown(self, arg_names: Sequence[str]) -> None:
        for name in self._keys:
            if name not in arg_names:
                near = difflib.get_close_matches(name, list(arg_names), n=3, cutoff=0.5)
                log.warning(
                    "%s: key name %r is not an argument, so it never selects a config; near matches: %s",
                    self._kernel, name, ", ".join(near) or "none",
                )  # fmt: skip

    def read(self, named: Mapping[str, Any], source: str, limits: DeviceLimits) -> TuningKey:
        """The key. Raises TypeError naming the argument when a key value cannot be one."""
        return TuningKey(
            kernel=source,
            device=(
                ("arch", limits.arch),
                ("shared_bytes", limits.shared_bytes),
                ("multiprocessors", limits.multiprocessors),
            ),
            values=tuple(self._values(named)),
            dtypes=tuple((name, str(value.dtype)) for name, value in named.items() if hasattr(value, "dtype")),
            batch=self._batch_part(named),
        )

    def _values(self, named: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        filled = self._filled_in(named) if self._wants_heuristics else named
        for name in self._keys:
            if name in filled:
                yield (name, *self._value(name, filled[name]))

    def _filled_in(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """With what the heuristics under the tuner make of it: each sees what the former filled in, as in Triton."""
        filled = dict(named)
        for name, function in self._heuristics.items():
            filled.pop(name, None)
            try:
                with not_ours():
                    filled[name] = function(dict(filled))
            except KeyError:  # it reads a value that only a config has: not this key's to know
                continue
        return filled

    def _value(self, name: str, value: Any) -> tuple[str, Any]:
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        if value is None or isinstance(value, (bool, str)):
            return type(value).__name__, value
        if isinstance(value, numbers.Integral):
            return "int", int(value)
        if isinstance(value, numbers.Real):
            return "float", repr(float(value))  # text: nan equals itself, -0.0 is not 0.0
        if isinstance(value, tuple):
            return "tuple", tuple(self._value(name, item) for item in value)
        if hasattr(value, "data_ptr"):
            raise BadType(f"{self._kernel}: key {name!r} is a tensor; allowed: hashable values such as its shape")
        if hasattr(value, "cache_key"):
            return "function", value.cache_key
        try:
            hash(value)
        except TypeError:
            raise BadType(
                f"{self._kernel}: key {name!r} is an unhashable {type(value).__name__}; allowed: hashable values"
            ) from None
        return type(value).__name__, value
