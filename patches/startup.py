"""How a process turns us on by itself: what the shipped ``.pth``, the servers' entry points and ``run`` call.

Nothing here imports Triton: the patch is applied when somebody else does.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType

log = logging.getLogger("smart_autotune")

SPARSE_DECODE = "SMART_AUTOTUNE_SPARSE_DECODE"
_registered = False
_said: set[str] = set()


def activate() -> bool:
    """Does nothing unless ``SMART_AUTOTUNE`` is set to 1; returns whether it is and nothing stood against it.

    Calling it from several places is calling it once. Whatever goes wrong leaves stock Triton running, with one
    WARNING; ``SMART_AUTOTUNE_STRICT=1`` raises.
    """
    from smart_autotune import settings

    try:
        if not settings.requested():
            return False
        _on_import_of_triton()
    except Exception as error:
        _refuse(error)
        return False
    return True


def activate_in_sglang() -> None:
    """SGLang's entry point: :func:`activate`, and what is particular to SGLang."""
    try:
        if activate():
            if "sglang" in sys.modules:
                from . import sglang

                sglang.apply()
        elif not os.environ.get("SMART_AUTOTUNE") and os.environ.get(SPARSE_DECODE, "0") not in ("", "0"):
            log.warning("%s has no effect unless SMART_AUTOTUNE=1", SPARSE_DECODE)
    except Exception as error:
        _refuse(error, "SGLang is left as it is")


def _on_import_of_triton() -> None:
    global _registered
    if _registered:
        return
    if "triton" in sys.modules:
        import triton  # waits where another thread is in the middle of it

        if _is_half_imported(triton):
            raise RuntimeError("Triton is being imported by the code that asks for the patch; enable() after that")
        _apply(triton)
    else:
        import wrapt

        wrapt.register_post_import_hook(_apply, "triton")
    _registered = True


def _is_half_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _apply(_triton: ModuleType) -> None:
    try:
        from .switch import enable

        enable()
    except Exception as error:
        _refuse(error)


def _refuse(error: Exception, consequence: str = "smart_autotune is not turned on") -> None:
    """What was there before stays; under strict settings the error is raised."""
    from smart_autotune import settings

    if settings.strict_requested():
        raise error
    text = f"{type(error).__name__}: {error}"
    if text not in _said:
        _said.add(text)
        log.warning("%s: %s", consequence, text)
