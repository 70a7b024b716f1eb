"""Turns smart_autotune on in every Python child of ``smart-autotune run``; this folder leads their PYTHONPATH.

Runs the sitecustomize that it hides, if there is one, first. A Python that does not have smart_autotune is left alone.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_elsewhere = [path for path in sys.path if os.path.abspath(path or os.curdir) != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
try:
    if _hidden is not None and _hidden.loader is not None:
        _module = importlib.util.module_from_spec(_hidden)
        sys.modules["sitecustomize"] = _module
        _hidden.loader.exec_module(_module)
finally:
    if importlib.util.find_spec("smart_autotune") is not None:
        from smart_autotune.patches.startup import activate

        activate()
