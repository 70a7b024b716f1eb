"""May this patch be applied here? A comparison of what it declares with what it finds, and nothing else."""

from __future__ import annotations

import functools
import textwrap
import types

import pytest
import wrapt

from smart_autotune.patches.gate import Conflict, Found, Gate, check, fingerprint, look_at

GATE = Gate(
    "some-patch", "triton==3.6.0", "triton.runtime.autotuner", {"Autotuner.run": "aaaa", "Autotuner.stop": "bb"}
)
AS_DECLARED = {name: Found(GATE.home, text) for name, text in GATE.fingerprints.items()}
STOCK = "stock behaviour is left as it is"


def refused(version="3.6.0", found=AS_DECLARED, platform="linux", gate=GATE):
    conflict = check(gate, version, found, platform)
    assert isinstance(conflict, Conflict)
    assert str(conflict).startswith(f"{gate.patch}: expected ")
    assert str(conflict).endswith(f"; {STOCK}"), "what happens now"
    return conflict.expected, conflict.found


# ---- the version -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.6.0", "3.6.0+git1234abcd", "3.6.0+cu128", "3.6"])
def test_the_declared_release_and_local_builds_of_it_are_accepted(version):
    assert check(GATE, version, AS_DECLARED, "linux") is None


@pytest.mark.parametrize(
    "version", ["3.9.0", "3.5.1", "3.6.1", "3.6.0rc1", "3.6.0.dev20260101", "3.6.0.post1", "3.7.1+git3.6.0", "1!3.6.0"]
)
def test_any_other_release_is_refused_by_its_version_even_with_the_same_source(version):
    assert refused(version) == ("triton==3.6.0", f"triton {version}")


def test_a_range_takes_what_is_inside_it_prereleases_too():
    wide = Gate("wide", "triton>=3.6.0,<3.8", GATE.home, {})
    assert check(wide, "3.7.0rc1", {}, "linux") is None
    assert refused("3.8.0", {}, gate=wide) == ("triton>=3.6.0,<3.8", "triton 3.8.0")


def test_a_package_that_is_not_there_is_said_to_be_missing():
    assert refused(None) == ("triton==3.6.0", "not installed")


@pytest.mark.parametrize("version", ["unknown", "", "3.6.0-custom_build!"])
def test_a_version_that_is_none_is_quoted(version):
    expected, found = refused(version)
    assert expected == "triton==3.6.0"
    assert repr(version) in found


def test_a_requirement_that_is_none_is_a_conflict_not_an_exception():
    expected, found = refused(gate=Gate("typo", "triton=3.6.0", GATE.home, {}))
    assert expected == "triton=3.6.0"
    assert "'3.6.0'" in found


# ---- the source ------------------------------------------------------------------------------------------------------


def test_changed_source_is_refused_by_function_with_both_fingerprints():
    changed = {**AS_DECLARED, "Autotuner.stop": Found(GATE.home, "cc")}
    assert refused(found=changed) == ("Autotuner.stop with source bb", "source cc")


def test_a_function_of_another_module_is_refused_and_that_module_is_named():
    foreign = {**AS_DECLARED, "Autotuner.run": Found("vllm.triton_utils", "aaaa")}
    assert refused(found=foreign) == ("Autotuner.run of triton.runtime.autotuner", "one put there by vllm.triton_utils")


def test_a_function_that_is_missing_is_named():
    assert refused(found={"Autotuner.run": AS_DECLARED["Autotuner.run"]}) == (
        "a function Autotuner.stop", "none of that name",
    )  # fmt: skip


def test_the_version_is_compared_first_so_that_an_upgrade_is_called_one():
    assert refused("3.9.0", {}) == ("triton==3.6.0", "triton 3.9.0")


# ---- the platform ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["win32", "darwin", "cygwin"])
def test_only_linux_is_supported(platform):
    assert refused(platform=platform) == ("platform linux", platform)


def test_this_platform_is_what_is_asked_about_by_default():
    assert check(GATE, "3.6.0", AS_DECLARED) is None


# ---- looking at a function -------------------------------------------------------------------------------------------


def defined(source, module="somewhere", tmp_path=None):
    """A function from source text, in a module of that name."""
    text = textwrap.dedent(source)
    path = tmp_path / f"module_{abs(hash(text))}.py"
    path.write_text(text)
    scope = {"__name__": module}
    exec(compile(text, str(path), "exec"), scope)
    return scope["function"]


PLAIN = """
def function(a):
    b = a + 1
    return b
"""
SAME = {
    "comments": "def function(a):\n    # why\n    b = a + 1\n    # more\n    return b\n",
    "blank lines": "def function(a):\n\n    b = a + 1\n\n\n    return b\n",
    "indentation": "if True:\n    def function(a):\n        b = a + 1\n        return b\n",
    "trailing blanks": "def function(a):   \n    b = a + 1  \n    return b\n",
}
OTHER = {
    "a number": "def function(a):\n    b = a + 2\n    return b\n",
    "a default": "def function(a=0):\n    b = a + 1\n    return b\n",
    "nesting": "def function(a):\n    if a:\n        b = a + 1\n    return b\n",
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_layout_and_comments_do_not_change_a_fingerprint(tmp_path, source):
    assert fingerprint(defined(source, tmp_path=tmp_path)) == fingerprint(defined(PLAIN, tmp_path=tmp_path))


@pytest.mark.parametrize("source", OTHER.values(), ids=OTHER)
def test_any_change_of_code_changes_the_fingerprint(tmp_path, source):
    assert fingerprint(defined(source, tmp_path=tmp_path)) != fingerprint(defined(PLAIN, tmp_path=tmp_path))


def test_a_fingerprint_is_sixteen_hex_digits(tmp_path):
    found = fingerprint(defined(PLAIN, tmp_path=tmp_path))
    assert len(found) == 16
    assert int(found, 16) >= 0


def test_source_that_cannot_be_read_matches_no_fingerprint():
    scope = {"__name__": GATE.home}
    exec("def function(a): return a", scope)
    assert look_at(scope["function"]) == Found(GATE.home, "unreadable")


def test_a_function_is_known_by_where_its_code_runs_not_by_what_it_claims(tmp_path):
    stock = defined(PLAIN, GATE.home, tmp_path)
    foreign = defined(PLAIN, "vllm.triton_utils", tmp_path)
    functools.update_wrapper(foreign, stock)
    assert foreign.__module__ == GATE.home, "what it claims"
    assert look_at(foreign).module == "vllm.triton_utils"


def test_a_wrapper_is_fingerprinted_by_its_own_source_not_by_what_it_wraps(tmp_path):
    stock = defined(PLAIN, GATE.home, tmp_path)
    wrapper = defined("def function(*args):\n    return stock(*args)\n", GATE.home, tmp_path)
    functools.update_wrapper(wrapper, stock)
    assert look_at(wrapper).fingerprint not in (look_at(stock).fingerprint, "unreadable")


class Callable:
    def __call__(self):
        """What a patch may put in the place of a function."""


NOT_FUNCTIONS = {
    "wrapt proxy": lambda function: wrapt.FunctionWrapper(function, lambda wrapped, self, args, kwargs: wrapped(*args)),
    "partial": functools.partial,
    "partial method": functools.partialmethod,
    "method of another object": lambda function: types.MethodType(function, object()),
    "callable object": lambda function: Callable(),
    "builtin": lambda function: len,
}


@pytest.mark.parametrize("wrap", NOT_FUNCTIONS.values(), ids=NOT_FUNCTIONS)
def test_what_is_not_a_plain_function_is_foreign_whatever_it_passes_itself_off_as(tmp_path, wrap):
    stock = defined(PLAIN, GATE.home, tmp_path)
    found = look_at(wrap(stock))
    assert found.module != GATE.home
    assert found.fingerprint == "not a function"


def test_nothing_is_found_where_nothing_is():
    assert look_at(None) is None
