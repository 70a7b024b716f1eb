"""What an author may write above a kernel, and what is under the decorators."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import triton
import triton.language as tl
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from smart_autotune import checks
from smart_autotune.errors import BadType, BadValue


def plain(x, n=4, *, scale: float = 0.5, mask=None):
    return x, n, scale, mask


@triton.jit
def jitted(x_ptr, N, BLOCK: tl.constexpr = 16):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0, mask=tl.arange(0, BLOCK) < N)


# ---- under the decorators ------------------------------------------------------------------------------------------


def test_the_base_function_of_a_function_is_itself() -> None:
    assert checks.base_function(plain) is plain


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_base_function_lies_under_any_number_of_decorators(layers: int) -> None:
    wrapped: Any = jitted
    for _ in range(layers):
        wrapped = triton.heuristics({"EVEN": lambda named: True})(wrapped)
    assert checks.base_function(wrapped) is jitted.fn
    assert checks.innermost(wrapped) is jitted
    assert isinstance(checks.innermost(wrapped), JITFunction)


def test_defaults_are_those_that_the_author_wrote() -> None:
    assert checks.defaults(plain) == {"n": 4, "scale": 0.5, "mask": None}
    assert checks.defaults(jitted.fn) == {"BLOCK": 16}


# ---- configs -------------------------------------------------------------------------------------------------------


def configs() -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}) for block in (16, 32)]


def test_a_list_of_configs_is_kept_as_it_is() -> None:
    given = configs()
    assert checks.checked_configs(given) is given


@pytest.mark.parametrize(
    "kind", [tuple, iter, lambda given: (config for config in given), lambda given: dict.fromkeys(given)]
)
def test_other_iterables_of_configs_become_a_list_in_their_order(kind: Any) -> None:
    given = configs()
    if kind(given).__class__ is dict:
        with pytest.raises(BadType, match=r"configs is dict; allowed: an iterable of triton\.Config"):
            checks.checked_configs(kind(given))
    else:
        found = checks.checked_configs(kind(given))
        assert type(found) is list
        assert all(one is other for one, other in zip(found, given)) and len(found) == 2


@pytest.mark.parametrize("none", [None, [], ()])
def test_no_configs_is_an_empty_list(none: Any) -> None:
    assert checks.checked_configs(none) == []


@pytest.mark.parametrize(
    "junk", ["BLOCK", b"BLOCK", 5, triton.Config({}), {"BLOCK": 16}, lambda: []], ids=lambda x: type(x).__name__
)
def test_configs_that_are_no_iterable_of_configs_are_refused_by_type(junk: Any) -> None:
    with pytest.raises(BadType) as caught:
        checks.checked_configs(junk)
    assert f"configs is {type(junk).__name__}" in str(caught.value)
    assert "allowed: an iterable of triton.Config" in str(caught.value)


@pytest.mark.parametrize("junk", [{"BLOCK": 16}, None, 16, "x"], ids=repr)
def test_one_wrong_config_among_others_is_refused_by_its_index(junk: Any) -> None:
    with pytest.raises(BadType, match=rf"configs\[2\] is {type(junk).__name__}; allowed: triton.Config"):
        checks.checked_configs([*configs(), junk])


# ---- names ---------------------------------------------------------------------------------------------------------


def test_a_list_of_names_is_kept_as_it_is() -> None:
    given = ["M", "N"]
    assert checks.checked_names("my_kernel", "key", given) is given


@pytest.mark.parametrize("kind", [tuple, iter, dict.fromkeys])
def test_other_iterables_of_names_become_a_list(kind: Any) -> None:
    assert checks.checked_names("my_kernel", "key", kind(["M", "N"])) == ["M", "N"]


@pytest.mark.parametrize("none", [None, [], ()])
def test_no_names_is_an_empty_list(none: Any) -> None:
    assert checks.checked_names("my_kernel", "key", none) == []


@pytest.mark.parametrize("option", ["key", "reset_to_zero", "restore_value"])
def test_a_bare_string_is_not_taken_for_its_letters(option: str) -> None:
    with pytest.raises(BadType) as caught:
        checks.checked_names("my_kernel", option, "MN")
    assert str(caught.value) == f"my_kernel: {option}='MN'; allowed: a list of argument names, such as ['MN']"


@pytest.mark.parametrize("junk", [5, True, 1.5, b"MN", plain], ids=lambda x: type(x).__name__)
def test_names_that_are_no_list_are_refused_with_kernel_and_option(junk: Any) -> None:
    with pytest.raises(BadType) as caught:
        checks.checked_names("my_kernel", "key", junk)
    for word in ("my_kernel", "key", "allowed:", "argument names"):
        assert word in str(caught.value)


@pytest.mark.parametrize("junk", [5, None, ("M",)], ids=repr)
def test_one_wrong_name_among_others_is_refused_by_value_and_type(junk: Any) -> None:
    with pytest.raises(BadType) as caught:
        checks.checked_names("my_kernel", "restore_value", ["M", junk])
    for word in ("my_kernel", "restore_value", repr(junk), type(junk).__name__):
        assert word in str(caught.value)


# ---- top_k ---------------------------------------------------------------------------------------------------------


def check_top_k(top_k: Any) -> None:
    checks.check_top_k("my_kernel", {"perf_model": plain, "top_k": top_k})


@pytest.mark.parametrize("top_k", [0.3, 0.5, 1.0, 1e-9, 1, 2, 1000])
def test_a_share_or_a_count_is_a_top_k(top_k: Any) -> None:
    check_top_k(top_k)


@hypothesis.given(top_k=st.floats() | st.integers())
def test_a_number_is_a_top_k_exactly_when_it_is_a_share_or_a_count(top_k: float | int) -> None:
    if top_k >= 1 if isinstance(top_k, int) else 0 < top_k <= 1:
        check_top_k(top_k)
    else:
        with pytest.raises(BadValue):
            check_top_k(top_k)


@pytest.mark.parametrize("top_k", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_number_that_is_neither_is_refused_with_what_is_allowed(top_k: Any) -> None:
    with pytest.raises(BadValue) as caught:
        check_top_k(top_k)
    for word in ("my_kernel", f"top_k={top_k!r}", "(0, 1]", "int >= 1"):
        assert word in str(caught.value)


@pytest.mark.parametrize("top_k", [True, False, None, "half", [1], 1j, Decimal(1)])
def test_what_is_no_number_is_refused_by_type(top_k: Any) -> None:
    with pytest.raises(BadType) as caught:
        check_top_k(top_k)
    for word in ("my_kernel", f"top_k={top_k!r}", type(top_k).__name__, "int >= 1"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "prune",
    [None, {}, {"top_k": -1}, {"perf_model": None, "top_k": -1}, {"early_config_prune": plain}, {"perf_model": plain}],
)
def test_without_a_perf_model_or_a_top_k_there_is_nothing_to_check(prune: Any) -> None:
    checks.check_top_k("my_kernel", prune)


def test_a_wrapper_that_is_no_function_is_walked_through() -> None:
    assert checks.base_function(SimpleNamespace(fn=SimpleNamespace(fn=plain))) is plain
