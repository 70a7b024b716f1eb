"""How a process turns us on by itself: what the shipped ``.pth``, the servers' entry points and ``run`` call.

Nothing here imports Triton: the patch is applied when somebody else does.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

log = logging.getLogger("smart_autotune")

_registered = False


def activate() -> None:
    """Does nothing unless ``SMART_AUTOTUNE`` is set to 1. Calling it from several places is calling it once.

    Whatever goes wrong leaves stock Triton running, with one WARNING; ``SMART_AUTOTUNE_STRICT=1`` raises.
    """
    from smart_autotune import settings

    try:
        if settings.requested():
            _on_import_of_triton()
    except Exception as error:
        log.warning("smart_autotune is not turned on: %s: %s", type(error).__name__, error)
        if settings.strict_requested():
            raise


def _on_import_of_triton() -> None:
    global _registered
    if _registered:
        return
    _registered = True
    if getattr(sys.modules.get("triton"), "autotune", None) is not None:
        _apply(None)
        return
    import wrapt

    wrapt.register_post_import_hook(_apply, "triton")


def _apply(_triton: ModuleType | None) -> None:
    from smart_autotune import settings

    try:
        from .switch import enable

        enable()
    except Exception as error:
        if settings.strict_requested():
            raise
        log.warning("smart_autotune is not turned on: %s: %s", type(error).__name__, error)
