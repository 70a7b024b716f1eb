"""``reset_to_zero`` and ``restore_value`` as stock means them, correct for None and for several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from smart_autotune.errors import BadValue


class ResetRestore:
    """Zeroes and copies the named tensors before a timed launch, puts the copies back after it."""

    def __init__(self, kernel: str, reset_to_zero: Sequence[str], restore_value: Sequence[str]) -> None:
        self._kernel = kernel
        self._reset = tuple(reset_to_zero)
        self._restore = tuple(restore_value)
        self._copies: dict[int, list[dict[str, Any]]] = {}  # by thread: a stack, since hooks may launch again

    def before(self, kwargs: Mapping[str, Any], reset_only: bool = False) -> None:
        for name in self._reset:
            tensor = self._tensor("reset_to_zero", name, kwargs)
            if tensor is not None:
                tensor.zero_()
        if reset_only or not self._restore:
            return
        tensors = {name: self._tensor("restore_value", name, kwargs) for name in self._restore}
        copies = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        self._copies.setdefault(threading.get_ident(), []).append(copies)

    def after(self, kwargs: Mapping[str, Any], exception: BaseException | None = None) -> None:
        stack = self._copies.get(threading.get_ident())
        if not stack:
            return
        for name, copy in stack.pop().items():
            kwargs[name].copy_(copy)
        if not stack:
            del self._copies[threading.get_ident()]

    def _tensor(self, option: str, name: str, kwargs: Mapping[str, Any]) -> Any:
        if name not in kwargs:
            given = ", ".join(kwargs)
            raise BadValue(f"{self._kernel}: {option} names {name!r}, which this call does not pass; passed: {given}")
        return kwargs[name]
