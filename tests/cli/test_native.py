"""What native code writes to the process's stderr, and what Python writes there."""

import os
import subprocess
import sys

from smart_autotune.cli.native import NativeOutput, NotCaught

SCRIPT = """
import os, sys
from smart_autotune.cli.native import NativeOutput
with NativeOutput() as caught:
    os.write(2, b"a/b.py:1: error: first\\nmodule { tt.func }\\nb.py:1: error: first\\nb.py:2: error: second\\n")
    os.write(2, b"b.py:0: error: Failures have been detected while processing an MLIR pass pipeline\\n")
    print("from python", file=sys.stderr)
    errors = caught.errors()
os.write(2, b"afterwards\\n")
print(errors)
"""


def test_native_lines_are_kept_and_python_lines_are_let_through():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['compiler: b.py:1: error: first', 'compiler: b.py:2: error: second']"
    assert done.stderr.split("\n") == ["from python", "afterwards", ""]


def test_an_error_inside_still_restores_the_descriptor(capfd):
    try:
        with NativeOutput():
            os.write(2, b"kept\n")
            raise RuntimeError
    except RuntimeError:
        os.write(2, b"seen\n")
    assert capfd.readouterr().err == "seen\n"


def test_verbose_catches_nothing(capfd):
    with NotCaught() as caught:
        os.write(2, b"a: error: b\n")
        assert caught.errors() == []
    assert "error" in capfd.readouterr().err
