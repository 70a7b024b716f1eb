"""A recorded kernel is found in today's source, or one line says why it is not."""

from __future__ import annotations

import sys

import pytest

from smart_autotune.locate import kernel_of
from smart_autotune.replay import NotReplayable
from support import audited_kernels
from support import recorded_kernels as kernels

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def copied(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets){extra})
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return tmp_path / f"{name}.py"

    yield write
    for name in [*names, "_smart_autotune_recorded.__main__"]:
        sys.modules.pop(name, None)


def place(module, qualname="copied", file="", source=""):
    return {"module": module, "qualname": qualname, "file": str(file), "source": source, "arguments": []}


def test_a_kernel_is_found_under_what_decorates_it():
    jit, _ = kernel_of(place("support.recorded_kernels", "with_a_heuristic"))
    assert jit is kernels.with_a_heuristic.fn
    jit, _ = kernel_of(place("support.audited_kernels", "plain"))
    assert jit is audited_kernels.plain


def test_a_kernel_whose_name_its_launcher_took_is_found_by_its_own(module):
    module("taken", SOURCE.format(extra="") + "_jitted = copied\ndef copied(x):\n    _jitted[(1,)](x, x, 64)\n")
    jit, _ = kernel_of(place("taken"))
    assert jit.arg_names == ["x", "y", "BLOCK"]


def test_a_kernel_made_by_a_function_is_found_where_the_module_keeps_it(module):
    made = "def make():\n" + SOURCE.format(extra="").replace("\n", "\n    ") + "\n    return copied\n\nkept = make()\n"
    module("made", made)
    jit, _ = kernel_of(place("made", "make.<locals>.copied"))
    assert jit.fn.__name__ == "copied"


def test_a_kernel_made_by_a_function_and_kept_nowhere_is_said(module):
    module("lost", "def make():\n    pass\n")
    with pytest.raises(NotReplayable, match=r"no kernel make.<locals>.copied today \(it was made inside a function\)"):
        kernel_of(place("lost", "make.<locals>.copied"))


def test_a_script_is_loaded_from_its_file_and_not_run_as_a_script(module):
    path = module("script", SOURCE.format(extra="") + "assert __name__ != '__main__'\n")
    jit, _ = kernel_of(place("__main__", file=path))
    assert jit.fn.__name__ == "copied"
    assert kernel_of(place("__main__", file=path))[0] is jit


def test_a_module_that_is_not_on_the_path_is_loaded_from_its_file(tmp_path):
    (tmp_path / "far_away.py").write_text(SOURCE.format(extra=""))
    jit, _ = kernel_of(place("some_package.far_away", file=tmp_path / "far_away.py"))
    assert jit.fn.__name__ == "copied"


def test_the_recorded_source_is_recognised_and_another_is_said(module):
    module("same", SOURCE.format(extra=""))
    jit, notes = kernel_of(place("same"))
    source = jit.cache_key[:16]
    assert kernel_of(place("same", source=source))[1] == ()
    (note,) = kernel_of(place("same", source="0123456789abcdef"))[1]
    assert source in note and "0123456789abcdef was recorded" in note and "same.copied" in note
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (place("no_such_module_here"), "cannot import no_such_module_here: ModuleNotFoundError"),
        (place("no_such_module_here", file="/no/such/file.py"), "cannot import no_such_module_here"),
        (place("__main__", file="/no/such/file.py"), "there is no file '/no/such/file.py' here"),
        (place("json", "loads"), "module json has no kernel loads today"),
        (place("json", "no_such"), "module json has no kernel no_such today"),
        (place("support.kernels", "tile"), "has no kernel tile today"),
        (place("", ""), "does not say where"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_one_line(where, text):
    with pytest.raises(NotReplayable, match=text) as caught:
        kernel_of(where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["raise RuntimeError('first\\nsecond')", "import sys; sys.exit(3)", "import no_such"])
def test_a_module_that_does_not_import_is_one_line(module, text):
    module("broken", text)
    with pytest.raises(NotReplayable, match="cannot import broken: ") as caught:
        kernel_of(place("broken"))
    assert "\n" not in str(caught.value)
