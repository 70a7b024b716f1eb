"""Errors: one telling line, ours or not ours, no tensors kept alive, and a NoConfigFits that travels."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
import weakref

import pytest
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.errors import AutotunerError, OutOfResources, PTXASError

from smart_autotune.errors import (
    BadType,
    BadValue,
    NoConfigFits,
    SmartAutotuneError,
    bare,
    is_ours,
    mark_not_ours,
    not_ours,
    one_line,
)

# What Triton 3.6.0 makes of a failed assembler: its own words, the assembler's, and how to run it again.
ASSEMBLER_TEXT = """Internal Triton PTX codegen error
`ptxas` stderr:
ptxas info    : (C7508) Potential Performance Loss
{complaint}

Repro command: bin/ptxas -lineinfo -v --gpu-name=sm_120a kernel.ptx -o kernel.ptx.o
"""
SOURCE = """def kernel(x, N: tl.constexpr):
    {line}
    offsets = tl.arange(0, N)"""


def compile_error(
    message: str | None, line: str = "pass", kind: type[CompilationError] = CompilationError
) -> CompilationError:
    """As Triton raises it: the source up to the fault, a caret under it, the message last (or none)."""
    node = ast.parse(SOURCE.format(line=line)).body[0].body[-1]  # type: ignore[attr-defined]
    return kind(SOURCE.format(line=line), node, message)


# ---- one line ------------------------------------------------------------------------------------------------------


def test_one_line_of_a_compile_error_is_its_message_not_the_source() -> None:
    text = one_line(compile_error("arange's range must be a power of 2"))
    assert text == "CompilationError: arange's range must be a power of 2"


def test_one_line_of_a_failed_static_assert_is_its_message() -> None:
    text = one_line(compile_error("BLOCK_T must divide the page", kind=CompileTimeAssertionFailure))
    assert text == "CompileTimeAssertionFailure: BLOCK_T must divide the page"


@pytest.mark.parametrize("line", ["error = tl.load(x)", "pass  # rounding error", "fatal_count = 0"])
def test_one_line_is_not_misled_by_source_that_speaks_of_errors(line: str) -> None:
    text = one_line(compile_error("arange's range must be a power of 2", line=line))
    assert text == "CompilationError: arange's range must be a power of 2"


def test_one_line_of_an_error_in_a_called_device_function_is_the_inner_message() -> None:
    try:
        try:
            raise compile_error("Cannot make_shape_compatible: incompatible dimensions")
        except CompilationError as inner:
            raise compile_error(None) from inner  # so Triton does for the caller of a device function
    except CompilationError as outer:
        text = one_line(outer)
    assert text == "CompilationError: Cannot make_shape_compatible: incompatible dimensions"


def test_one_line_of_an_error_that_says_something_is_not_its_causes() -> None:
    try:
        raise compile_error("the outer message") from ValueError("the inner message")
    except CompilationError as error:
        assert one_line(error) == "CompilationError: the outer message"
    try:
        raise RuntimeError("the outer message") from ValueError("the inner message")
    except RuntimeError as error:
        assert one_line(error) == "RuntimeError: the outer message"


@pytest.mark.parametrize(
    "complaint",
    [
        "ptxas fatal   : (C7600) Register allocation failed with register count of '8'",
        "ptxas error   : Entry function 'kernel' uses too much shared data (0x28000 bytes, 0x18c00 max)",
        "ptxas kernel.ptx, line 5; error   : Feature '.f8' not supported on .target sm_80",
        "ptxas kernel.ptx, line 5; error   : first\nptxas fatal   : Ptx assembly aborted due to errors",
    ],
)
def test_one_line_of_an_assembler_error_is_the_assemblers_own_complaint(complaint: str) -> None:
    text = one_line(PTXASError(ASSEMBLER_TEXT.format(complaint=complaint)))
    assert text == f"PTXASError: {complaint.splitlines()[0]}"


def test_one_line_of_a_crashed_assembler_is_not_how_to_run_it_again() -> None:
    text = one_line(PTXASError("`ptxas` raised SIGSEGV\n`ptxas` stderr:\n\nRepro command: bin/ptxas kernel.ptx\n"))
    assert "raised SIGSEGV" in text and "Repro" not in text


def test_one_line_of_any_other_text_is_its_last_line() -> None:
    assert one_line(RuntimeError("first\n\n  PassManager::run failed  \n\n")) == "RuntimeError: PassManager::run failed"


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError(""), ValueError("  \n \n")])
def test_one_line_of_an_error_without_a_text_is_its_type(error: Exception) -> None:
    assert one_line(error) == type(error).__name__


@pytest.mark.parametrize("width", [20, 300])
def test_one_line_is_cut_to_its_width_and_shows_that_it_was(width: int) -> None:
    text = one_line(RuntimeError("x" * 1000), width)
    assert len(text) == width
    assert text.endswith("…")
    assert one_line(RuntimeError("x" * 5), 19) == "RuntimeError: xxxxx"


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\rb", "a\x0bb", "a\u2028b"])
def test_one_line_is_one_line(text: str) -> None:
    assert len(one_line(RuntimeError(text)).splitlines()) == 1


# ---- ours or not ---------------------------------------------------------------------------------------------------


def test_an_error_is_ours_unless_it_says_otherwise() -> None:
    assert is_ours(KeyError("internal"))


def test_what_the_user_raises_inside_not_ours_reaches_the_caller_as_it_is() -> None:
    error = KeyError("the user's")
    with pytest.raises(KeyError) as caught, not_ours():
        raise error
    assert caught.value is error
    assert not is_ours(error)


def test_an_error_marked_by_hand_is_not_ours() -> None:
    error = OSError()
    mark_not_ours(error)
    assert not is_ours(error)


def test_marking_one_error_marks_no_other_of_its_kind() -> None:
    mark_not_ours(ValueError())
    assert is_ours(ValueError())


def test_the_mark_survives_two_scopes_and_what_lies_between() -> None:
    with pytest.raises(KeyError) as caught, not_ours():
        try:
            with not_ours():
                raise KeyError
        finally:
            pass
    assert not is_ours(caught.value)


@pytest.mark.parametrize("error", [BadType("x"), BadValue("x"), NoConfigFits("x"), SmartAutotuneError("x")])
def test_an_error_raised_on_purpose_is_for_the_caller_not_for_the_fallback(error: Exception) -> None:
    assert not is_ours(error)


def test_an_interrupt_passes_through_not_ours() -> None:
    with pytest.raises(KeyboardInterrupt), not_ours():
        raise KeyboardInterrupt


def test_not_ours_without_an_error_does_nothing() -> None:
    with not_ours():
        pass


@pytest.mark.parametrize(("kind", "stock"), [(BadType, TypeError), (BadValue, ValueError)])
def test_a_bad_argument_is_an_error_of_pythons_kind_too(kind: type[Exception], stock: type[Exception]) -> None:
    assert issubclass(kind, stock) and issubclass(kind, SmartAutotuneError)
    assert str(kind("kernel: key 'M'")) == "kernel: key 'M'"


# ---- bare ----------------------------------------------------------------------------------------------------------


class Tensor:
    """Stands for what a frame would keep alive."""


def fail_with(refs: list[weakref.ref[Tensor]], error: Exception) -> None:
    held = Tensor()
    refs.append(weakref.ref(held))
    raise error


def assert_all_freed(error: BaseException, refs: list[weakref.ref[Tensor]]) -> None:
    gc.collect()
    assert any(ref() is not None for ref in refs)  # the traceback does keep them, before
    assert bare(error) is error
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_bare_frees_what_the_frames_of_an_error_kept() -> None:
    refs: list[weakref.ref[Tensor]] = []
    with pytest.raises(ValueError) as caught:
        fail_with(refs, ValueError())
    error = caught.value
    del caught
    assert_all_freed(error, refs)


def test_bare_frees_what_the_frames_of_its_causes_kept() -> None:
    refs: list[weakref.ref[Tensor]] = []
    kept: list[BaseException] = []
    try:
        try:
            fail_with(refs, KeyError())
        except KeyError as cause:
            raise ValueError from cause
    except ValueError as error:
        kept.append(error)
    assert_all_freed(kept[0], refs)


def test_bare_frees_what_the_frames_of_a_hidden_context_kept() -> None:
    refs: list[weakref.ref[Tensor]] = []
    kept: list[BaseException] = []
    try:
        try:
            fail_with(refs, KeyError())
        except KeyError:
            raise ValueError from None
    except ValueError as error:
        kept.append(error)
    assert_all_freed(kept[0], refs)


def test_bare_frees_context_and_cause_where_an_error_has_both() -> None:
    refs: list[weakref.ref[Tensor]] = []
    kept: list[BaseException] = []
    try:
        try:
            fail_with(refs, KeyError())
        except KeyError:
            raise ValueError from OSError("another")
    except ValueError as error:
        kept.append(error)
    assert_all_freed(kept[0], refs)


def test_bare_comes_back_from_errors_that_cause_each_other() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert bare(one) is one


def test_a_bare_error_can_be_raised_again() -> None:
    with pytest.raises(ValueError, match="again"):
        raise bare(ValueError("again"))


# ---- NoConfigFits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AutotunerError, OutOfResources, SmartAutotuneError])
def test_no_config_fits_is_caught_as_what_stock_raises(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        raise NoConfigFits("my_kernel: none of 3 configs fits", 663_808, 101_376, "shared memory")


def test_no_config_fits_says_its_message_and_nothing_before_it() -> None:
    assert str(NoConfigFits("my_kernel: none of 3 configs fits")) == "my_kernel: none of 3 configs fits"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_config_fits_pickles_with_its_numbers(protocol: int) -> None:
    error = NoConfigFits("none fits", 663_808, 101_376, "shared memory")
    found = pickle.loads(pickle.dumps(error, protocol))
    assert type(found) is NoConfigFits
    assert (str(found), found.required, found.limit, found.name) == ("none fits", 663_808, 101_376, "shared memory")


def test_no_config_fits_can_be_copied_and_have_no_numbers() -> None:
    found = copy.copy(NoConfigFits("none was offered"))
    assert (str(found), found.required, found.limit, found.name) == ("none was offered", None, None, "")
