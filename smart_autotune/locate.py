"""A recorded kernel in today's source: imported by its module's name or from its file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from smart_autotune.checks import innermost
from smart_autotune.errors import one_line
from smart_autotune.replay import NotReplayable


def kernel_of(place: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The jitted function at ``place``, and a note where it is not the recorded source. NotReplayable says why not."""
    module, qualname = place["module"], place["qualname"]
    if not module or not qualname:
        raise NotReplayable("the record does not say where the kernel's source is")
    loaded = _module(module, place["file"])
    jit = _attribute(loaded, qualname) or _by_name(loaded, qualname, place["source"])
    if jit is None:
        inside = " (it was made inside a function)" if "<locals>" in qualname else ""
        raise NotReplayable(f"module {module} has no kernel {qualname} today{inside}")
    source = str(jit.cache_key)[:16]
    if source != place["source"]:
        note = f"compiled from today's source {source} of {module}.{qualname}; {place['source'] or 'none'} was recorded"
        return jit, (note,)
    return jit, ()


def _module(name: str, file: str) -> ModuleType:
    """By its name; a script, or a module that is not on the path here, by its file."""
    try:
        if name != "__main__":
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(f"{missing}.")) or not Path(file).is_file():
            raise NotReplayable(f"cannot import {name}: {one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise NotReplayable(f"cannot import {name}: {one_line(error)}") from error
    return _from_file(name, file)


def _from_file(name: str, file: str) -> ModuleType:
    stand_in = f"_smart_autotune_recorded.{name}"  # never the name of a module of this process
    if stand_in in sys.modules and sys.modules[stand_in].__file__ == file:
        return sys.modules[stand_in]
    spec = importlib.util.spec_from_file_location(stand_in, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise NotReplayable(f"cannot import {name}: there is no file {file!r} here")
    module = importlib.util.module_from_spec(spec)
    sys.modules[stand_in] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[stand_in]
        raise NotReplayable(f"cannot import {file}: {one_line(error)}") from error
    return module


def _attribute(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return _jit_of(found)


def _by_name(module: ModuleType, qualname: str, source: str) -> Any:
    """A kernel of that name that the module holds elsewhere: a launcher has taken its name, a function has made it."""
    jits = [jit for jit in map(_jit_of, vars(module).values()) if jit is not None and jit.fn.__qualname__ == qualname]
    return next((jit for jit in jits if str(jit.cache_key).startswith(source)), jits[0] if jits else None)


def _jit_of(value: Any) -> Any:
    if isinstance(value, JITFunction):
        return value
    if not hasattr(value, "fn"):
        return None
    try:
        found = innermost(value)
    except AttributeError:
        return None
    return found if isinstance(found, JITFunction) else None
