"""The batch part of a key: which number it is, and how it is rounded."""

from __future__ import annotations

import bisect
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from smart_autotune import settings
from smart_autotune.errors import BadType, BadValue, not_ours

BatchSpec = str | tuple[str, int] | Callable[[Mapping[str, Any]], int | None] | None
BucketSpec = str | Iterable[int] | Callable[[int], int]

# In order of preference; matched without case.
BATCH_NAMES = (
    "batch_size", "batchsize", "batch", "bsz", "bs", "b", "num_seqs", "n_seqs", "num_tokens", "n_tokens",
    "total_tokens", "num_rows", "n_rows", "m",
)  # fmt: skip
_BATCH_FRAGMENTS = ("bucket", "batch", "total_tokens")
# Switches of servers that promise results independent of the batch size.
_INVARIANT_VARIABLES = ("VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")


def next_power_of_2(size: int) -> int:
    """The smallest power of two >= ``size`` (1 for sizes below 1)."""
    return 1 << max(size - 1, 0).bit_length()


_edges: tuple[int, ...] = ()


def end_buckets_at(sizes: Iterable[int]) -> None:
    """From now on power-of-two buckets end at these batch sizes, which are the ones that a server captures.

    Of the sizes between two powers of two the largest is an edge, so that there are no more buckets than before, and
    what is captured at 160 is not tuned with what runs at 256. No sizes: powers of two again.
    """
    global _edges
    largest: dict[int, int] = {}
    for size in sizes:
        if size > 0:
            octave = next_power_of_2(size)
            largest[octave] = max(size, largest.get(octave, 0))
    top = max(largest, default=0)
    edges = tuple(largest.get(1 << n, 1 << n) for n in range(next_power_of_2(top).bit_length()))
    edges = () if all(edge & (edge - 1) == 0 for edge in edges) else edges
    if edges != _edges:
        _edges = edges
        settings.renew()


def _next_edge(size: int) -> int:
    index = bisect.bisect_left(_edges, size)
    return _edges[index] if index < len(_edges) else next_power_of_2(size)


class BatchRule:
    """Finds one call's batch size and rounds it up to a bucket."""

    def __init__(
        self, kernel: str, arg_names: Sequence[str], keys: Sequence[str], batch: BatchSpec, buckets: BucketSpec
    ) -> None:
        self._kernel = kernel
        self._find = self._finder(arg_names, batch)
        self._own_rounding = None if buckets == "pow2" else self._rounding(buckets)
        self._disabled_by = _author_key(keys) if batch == "auto" else ""
        by_preference = {name: rank for rank, name in enumerate(BATCH_NAMES)}
        named = [name for name in arg_names if name.lower() in by_preference]
        self._candidates = sorted(named, key=lambda name: by_preference[name.lower()])
        self._spec = batch

    @property
    def bucket_of(self) -> Callable[[int], int]:
        """How a size is rounded now; another function after :func:`end_buckets_at`."""
        if self._own_rounding is not None:
            return self._own_rounding
        return _next_edge if _edges else next_power_of_2

    def part(self, named: Mapping[str, Any]) -> tuple[str, int] | None:
        """``(where the size came from, bucket)``, or None when the batch is not part of this call's key."""
        if self.off_because():
            return None
        source, size = self._find(named)
        return None if size is None else (source, self.bucket_of(size))

    @property
    def readable_from(self) -> tuple[Any, ...] | None:
        """Where the size is found, for code that reads it without us.

        ``("never",)``, ``("argument", name, dim)``, ``("auto", int arguments by preference …)`` (else the first
        tensor's first dimension); None: only by calling the author's function.
        """
        if self._spec is None or self.off_because():
            return ("never",)
        if self._spec == "auto":
            return ("auto", *self._candidates)
        if callable(self._spec):
            return None
        return ("argument", self._spec, 0) if isinstance(self._spec, str) else ("argument", *self._spec)

    def off_because(self) -> str:
        """Why the batch never joins the key here; empty when it does."""
        if self._disabled_by:
            return self._disabled_by
        if settings.current().batch == "off":
            return "SMART_AUTOTUNE_BATCH=off"
        return "batch-invariant mode" if batch_invariant() else ""

    def _finder(
        self, arg_names: Sequence[str], batch: BatchSpec
    ) -> Callable[[Mapping[str, Any]], tuple[str, int | None]]:
        if batch is None:
            return lambda named: ("", None)
        if batch == "auto":
            return self._automatic
        if callable(batch):
            return lambda named: ("batch()", self._checked("batch()", _call(batch, named)))
        pair = (batch, 0) if isinstance(batch, str) else batch
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise BadType(
                f"{self._kernel}: batch={batch!r}; allowed: 'auto', an argument's name, (name, dimension), "
                f"a function of the named arguments, or None"
            )
        name, dim = pair
        if name not in arg_names:
            near = difflib.get_close_matches(name, list(arg_names), n=3) or list(arg_names)
            raise BadValue(f"{self._kernel}: batch={batch!r} names no argument; did you mean: {', '.join(near)}")
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
            raise BadValue(f"{self._kernel}: batch={batch!r}: the dimension must be an integer >= 0")
        return lambda named: (name, self._size(name, dim, named.get(name)))

    def _automatic(self, named: Mapping[str, Any]) -> tuple[str, int | None]:
        for name in self._candidates:
            value = named.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return name, value
        for name, value in named.items():
            shape = getattr(value, "shape", None)
            if shape is not None and hasattr(value, "dtype") and len(shape) > 0:
                return name, int(shape[0])
        return "", None

    def _size(self, name: str, dim: int, value: Any) -> int | None:
        if value is None:
            return None
        shape = getattr(value, "shape", None)
        if shape is None:
            return self._checked(name, value)
        if dim >= len(shape):
            raise BadValue(f"{self._kernel}: batch=({name!r}, {dim}): the argument has {len(shape)} dimensions")
        return int(shape[dim])

    def _checked(self, name: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadType(f"{self._kernel}: batch size from {name!r} is {type(value).__name__}; allowed: int or None")
        return value

    def _rounding(self, buckets: BucketSpec) -> Callable[[int], int]:
        if callable(buckets):
            return self._checked_rounding(buckets)
        edges = list(buckets) if isinstance(buckets, Iterable) and not isinstance(buckets, str) else []
        ascending = all(isinstance(edge, int) and not isinstance(edge, bool) and edge > 0 for edge in edges)
        if not edges or not ascending or sorted(set(edges)) != edges:
            raise BadValue(
                f"{self._kernel}: batch_buckets={buckets!r}; allowed: 'pow2', ascending positive ints, "
                f"or a function int -> int"
            )
        return lambda size: edges[min(bisect.bisect_left(edges, size), len(edges) - 1)]

    def _checked_rounding(self, rounding: Callable[[int], int]) -> Callable[[int], int]:
        def bucket_of(size: int) -> int:
            bucket = _call(rounding, size)
            if isinstance(bucket, bool) or not isinstance(bucket, int):
                raise BadType(f"{self._kernel}: batch_buckets({size}) returned {type(bucket).__name__}; allowed: int")
            return bucket

        return bucket_of


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    with not_ours():
        return function(argument)


def _author_key(keys: Sequence[str]) -> str:
    """Names the author's own batch-like key, if there is one."""
    for name in keys:
        lowered = name.lower()
        if lowered in BATCH_NAMES or any(fragment in lowered for fragment in _BATCH_FRAGMENTS):
            return f"the key already holds {name!r}"
    return ""


def batch_invariant() -> bool:
    """Whether results must not depend on timings: our setting, torch's deterministic switch, or a server's own."""
    global _asked_by_server
    if _asked_by_server is None:
        _asked_by_server = any(os.environ.get(n, "0").lower() in ("1", "true", "yes") for n in _INVARIANT_VARIABLES)
    if settings.current().deterministic or _asked_by_server:
        return True
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


_asked_by_server: bool | None = None
