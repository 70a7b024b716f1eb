"""``reset_to_zero`` and ``restore_value`` as stock means them, correct for None and for several threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from smart_autotune.errors import BadValue

log = logging.getLogger("smart_autotune")

LARGE_SHARE = 0.5  # of the device's free memory: a copy of that size is worth a word


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

    @contextmanager
    def saved(self, kwargs: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Copies once, for a whole tuning; the function puts everything back and zeroes what is to be zeroed.

        Put back at the end too, whatever happened in between. Strided views are copied as they lie.
        """
        tensors = {name: self._tensor("restore_value", name, kwargs) for name in self._restore}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        _warn_of_size(self._kernel, tensors)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}

        def put_back() -> None:
            for name, tensor in tensors.items():
                tensor.copy_(copies[name])
            self.before(kwargs, reset_only=True)

        try:
            yield put_back
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(copies[name])

    def _tensor(self, option: str, name: str, kwargs: Mapping[str, Any]) -> Any:
        if name not in kwargs:
            given = ", ".join(kwargs)
            raise BadValue(f"{self._kernel}: {option} names {name!r}, which this call does not pass; passed: {given}")
        return kwargs[name]


def _warn_of_size(kernel: str, tensors: Mapping[str, Any]) -> None:
    on_device = [tensor for tensor in tensors.values() if getattr(tensor, "is_cuda", False)]
    if not on_device:
        return
    import torch

    size = sum(tensor.numel() * tensor.element_size() for tensor in on_device)
    free = torch.cuda.mem_get_info(on_device[0].device)[0]
    if size > LARGE_SHARE * free:
        log.warning(
            "%s: restore_value copies %.1f GB (%s) for this tuning, of %.1f GB free on the device",
            kernel, size / 1e9, ", ".join(tensors), free / 1e9,
        )  # fmt: skip
