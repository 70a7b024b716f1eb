"""One function of a module that may not be imported yet: wrapped when it is, put back on request."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from smart_autotune import settings
from smart_autotune.errors import one_line
from smart_autotune.once import warn_once

from ..gate import Conflict, look_at

log = logging.getLogger("smart_autotune")

MARK = "_smart_autotune_seam"  # on what is put there: whose it is


class Seam:
    """``around(original, *args, **kwargs)`` stands for ``module.path`` from the module's import on.

    The module is never imported for it: SGLang asks the GPU in some of them. ``sole``: it must be the module's own
    function that is wrapped, not one that somebody else has put there. ``unless``: says of the imported module why it
    is left alone, or "".
    """

    def __init__(
        self,
        module: str,
        path: str,
        around: Callable[..., Any],
        sole: bool = False,
        unless: Callable[[ModuleType], str] = lambda module: "",
    ) -> None:
        self.module = module
        self.path = path
        self.active = False
        self.left_alone = ""  # why, as ``unless`` said
        self.conflict: Conflict | None = None
        self._around = around
        self._sole = sole
        self._unless = unless
        self._registered = False
        self._original: Any = None
        self._put: Any = None

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    @property
    def is_in_place(self) -> bool:
        """Whether calls reach ``around`` now."""
        return self.active and self._put is not None

    def apply(self) -> None:
        """Wraps the function now or when its module is imported. Twice is once."""
        self.active = True
        if not self._registered:
            self._registered = True
            import wrapt

            wrapt.register_post_import_hook(self._imported, self.module)
        elif self.module in sys.modules:
            self._imported(sys.modules[self.module])

    def revert(self) -> None:
        """Puts the very function back; where somebody has wrapped ours since, ours only passes its calls on."""
        self.active = False
        module = sys.modules.get(self.module)
        if self._put is None or module is None:
            return
        owner, name = self._place(module)
        if vars(owner).get(name) is self._put:
            setattr(owner, name, self._original)
            self._put = self._original = None

    def _imported(self, module: ModuleType) -> None:
        """Never raises into SGLang's import, unless settings are strict."""
        if not self.active or self._put is not None:
            return
        try:
            self.left_alone = self._unless(module)
            if not self.left_alone:
                self._wrap_in(module)
        except Exception as error:
            if settings.current().strict:
                raise
            warn_once(("seam", str(self)), "%s is left as it is: %s", self, one_line(error))

    def _wrap_in(self, module: ModuleType) -> None:
        owner, name = self._place(module)
        original: Any = vars(owner).get(name) if owner is not None else None
        found = look_at(original)
        if found is None:
            self.conflict = Conflict("sglang", f"a function {self}", "none of that name")
        elif self._sole and found.module != self.module:
            self.conflict = Conflict("sglang", f"{self.path} of {self.module}", f"one put there by {found.module}")
        if self.conflict is not None:
            warn_once(str(self.conflict), "%s", self.conflict)
            return
        self._original, self._put = original, self._wrapped(original)
        setattr(owner, name, self._put)

    def _place(self, module: ModuleType) -> tuple[Any, str]:
        inside, _, name = self.path.rpartition(".")
        return (vars(module).get(inside) if inside else module), name

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            return self._around(original, *args, **kwargs)

        setattr(wrapped, MARK, str(self))
        return wrapped
