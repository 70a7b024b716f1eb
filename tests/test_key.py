"""The tuning key: equal exactly when its named parts are, and able to say which part differs."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from smart_autotune import settings
from smart_autotune.errors import BadType, is_ours
from smart_autotune.key import ArgumentBinder, KeyReader, TuningKey
from smart_autotune.limits import DeviceLimits, of_arch

ARGUMENTS = ("x", "y", "M", "N")
SM90 = DeviceLimits("sm_90", 232_448, multiprocessors=132)
SM120 = DeviceLimits("sm_120", 101_376, multiprocessors=188)
NAN = float("nan")

unhurried = hypothesis.settings(deadline=None)


def read(
    named: Mapping[str, Any],
    keys: tuple[str, ...] = ("M", "N"),
    device: DeviceLimits = SM90,
    batch: tuple[str, int] | None = None,
    source: str = "kernel@1",
) -> TuningKey:
    return KeyReader("kernel", ARGUMENTS, keys, lambda _: batch).read(named, source, device)


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def same_value(one: Any, other: Any) -> bool:
    """What "equal" means for key values: same type, and floats by their digits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return one == other


@triton.jit
def doubled(x):
    return x * 2


@triton.jit
def halved(x):
    return x / 2


# ---- equality ------------------------------------------------------------------------------------------------------

LOOK_ALIKES = [
    0,
    1,
    True,
    False,
    0.0,
    -0.0,
    1.0,
    NAN,
    "1",
    "",
    "True",
    "None",
    None,
    (),
    (1,),
    (True,),
    (1.0,),
    ((1,),),
]
scalars = st.sampled_from(LOOK_ALIKES) | st.integers(-2, 2) | st.floats() | st.text(max_size=2)
values = scalars | st.tuples(scalars, scalars)
TENSORS = {dtype: tensor(dtype, 4) for dtype in (torch.float16, torch.float32)}
dtypes = st.sampled_from([None, *TENSORS])
parts = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["kernel@1", "kernel@2"]),
        "device": st.sampled_from([SM90, SM120]),
        "batch": st.sampled_from([None, ("x", 16), ("x", 32), ("y", 16)]),
        "dtypes": st.tuples(dtypes, dtypes),
        "values": st.dictionaries(st.sampled_from(["M", "N"]), values),
    }
)


def key_of(described: Mapping[str, Any]) -> TuningKey:
    x, y = (TENSORS.get(dtype) for dtype in described["dtypes"])
    named = {"x": x, "y": y, **dict(sorted(described["values"].items()))}
    return read(named, device=described["device"], batch=described["batch"], source=described["source"])


def expected_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    found = {"kernel"} if one["source"] != other["source"] else set()
    found |= {part for part in ("device", "batch") if one[part] != other[part]}
    mine, theirs = one["values"], other["values"]
    for name in mine.keys() | theirs.keys():
        if name not in mine or name not in theirs or not same_value(mine[name], theirs[name]):
            found.add(f"values:{name}")
    pairs = zip(("x", "y"), one["dtypes"], other["dtypes"])
    return found | {f"dtypes:{name}" for name, mine, theirs in pairs if mine != theirs}


@unhurried
@hypothesis.given(one=parts, other=parts)
def test_two_keys_are_equal_exactly_when_their_named_parts_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    differing = expected_differences(one, other)
    assert (key_of(one) == key_of(other)) == (not differing)
    assert set(key_of(one).differences(key_of(other))) == differing


@unhurried
@hypothesis.given(described=parts)
def test_equal_calls_give_equal_keys_with_equal_hashes(described: dict[str, Any]) -> None:
    assert key_of(described) == key_of(described)
    assert hash(key_of(described)) == hash(key_of(described))


@unhurried
@hypothesis.given(one=values, other=values)
def test_a_changed_value_always_changes_the_key(one: Any, other: Any) -> None:
    assert (read({"M": one}) == read({"M": other})) == same_value(one, other)


def test_one_true_and_one_point_zero_are_three_keys() -> None:
    assert len({read({"M": 1}), read({"M": True}), read({"M": 1.0})}) == 3


def test_nan_equals_itself_so_that_it_does_not_tune_at_each_call() -> None:
    assert read({"M": float("nan")}) == read({"M": float("nan")})


def test_an_absent_argument_is_not_an_argument_of_none() -> None:
    assert read({"N": 4}) != read({"M": None, "N": 4})


def test_four_for_one_name_is_not_four_for_the_other() -> None:
    assert read({"M": 4}) != read({"N": 4})


def test_dtypes_keep_the_names_of_their_arguments_where_another_is_none() -> None:
    half = tensor(torch.float16, 4)
    assert read({"x": half, "y": None}) != read({"x": None, "y": half})


def test_another_shape_with_the_same_key_values_is_the_same_key() -> None:
    assert read({"x": tensor(torch.float16, 4), "M": 4}) == read({"x": tensor(torch.float16, 99), "M": 4})


def test_arguments_outside_the_authors_key_do_not_matter() -> None:
    assert read({"M": 4, "N": 1}, keys=("M",)) == read({"M": 4, "N": 2}, keys=("M",))


def test_a_lowered_cap_is_another_key() -> None:
    with settings.override(shared_bytes_cap=65_536):
        lowered = of_arch("sm_90")
    assert read({"M": 4}, device=lowered).differences(read({"M": 4}, device=of_arch("sm_90"))) == ["device"]


def test_the_batch_part_is_read_off_the_named_arguments() -> None:
    reader = KeyReader("kernel", ARGUMENTS, (), lambda named: ("M", named["M"] * 2))
    assert reader.read({"M": 8}, "kernel@1", SM90).batch == ("M", 16)


# ---- values that may be in a key -----------------------------------------------------------------------------------


def test_an_integer_of_another_integer_type_is_the_same_key() -> None:
    class Size(enum.IntEnum):
        FOUR = 4

    assert read({"M": Size.FOUR}) == read({"M": 4})


def test_a_numpy_number_is_the_same_key_as_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    assert read({"M": numpy.int64(4)}).values == read({"M": 4}).values
    assert read({"M": numpy.float32(0.5)}).values == read({"M": 0.5}).values


def test_a_constexpr_is_the_same_key_as_its_value() -> None:
    assert read({"M": tl.constexpr(4)}) == read({"M": 4})


def test_dtypes_are_fine_as_key_values() -> None:
    assert read({"M": tl.float32}) == read({"M": tl.float32})
    assert read({"M": tl.float32}) != read({"M": tl.float16})
    assert read({"M": torch.float32}) != read({"M": torch.float16})


def test_a_device_function_is_keyed_by_its_source() -> None:
    assert read({"M": doubled}) == read({"M": doubled})
    assert read({"M": doubled}) != read({"M": halved})


def test_a_tensor_named_in_the_key_is_refused_by_name() -> None:
    with pytest.raises(BadType, match=r"kernel: key 'M' is a tensor; allowed: hashable values"):
        read({"M": tensor(torch.float16, 4)})


@pytest.mark.parametrize(("value", "given"), [([1, 2], "list"), ({1: 2}, "dict"), ({1}, "set")])
def test_an_unhashable_key_value_is_refused_by_name_and_type(value: object, given: str) -> None:
    with pytest.raises(BadType, match=rf"kernel: key 'N' is an unhashable {given}; allowed: hashable values"):
        read({"M": 1, "N": value})


@pytest.mark.parametrize("inner", [[1], tensor(torch.float16, 4)], ids=["list", "tensor"])
def test_a_tuple_is_refused_for_what_is_in_it(inner: object) -> None:
    with pytest.raises(BadType, match="kernel: key 'M'"):
        read({"M": (1, (2, inner))})


def test_an_unhashable_argument_outside_the_key_is_nobodys_business() -> None:
    assert read({"M": 1, "N": [1, 2]}, keys=("M",)).values == (("M", "int", 1),)


# ---- values that heuristics fill in --------------------------------------------------------------------------------


def read_with_heuristics(named: dict[str, Any], **heuristics: Any) -> tuple[tuple[str, str, Any], ...]:
    reader = KeyReader("kernel", ("x", "M", "N", "EVEN"), ("EVEN", "N"), lambda _: None, heuristics)
    return reader.read(named, "kernel@1", SM90).values


def test_a_key_value_that_a_heuristic_fills_in_is_part_of_the_key() -> None:
    found = read_with_heuristics({"M": 4, "N": 8}, EVEN=lambda named: named["M"] % 2 == 0)
    assert found == (("EVEN", "bool", True), ("N", "int", 8))


def test_a_heuristics_value_is_the_key_also_where_the_argument_has_a_value() -> None:
    # Triton lets the heuristic win; a default in the signature must not stand for its value.
    found = read_with_heuristics({"M": 4, "N": 8, "EVEN": False}, EVEN=lambda named: named["M"] % 2 == 0)
    assert found == (("EVEN", "bool", True), ("N", "int", 8))


def test_a_heuristic_may_read_what_an_earlier_one_filled_in() -> None:
    found = read_with_heuristics({"M": 4, "N": 8}, HALF=lambda named: named["M"] // 2, EVEN=lambda named: named["HALF"])
    assert found == (("EVEN", "int", 2), ("N", "int", 8))


def test_a_heuristic_that_reads_a_configs_value_is_left_out_of_the_key() -> None:
    found = read_with_heuristics({"M": 4, "N": 8}, EVEN=lambda named: named["M"] % named["BLOCK"] == 0)
    assert found == (("N", "int", 8),)


def test_a_heuristic_left_out_does_not_take_the_value_of_the_one_before_it() -> None:
    reader = KeyReader(
        "kernel", ("A", "B"), ("A", "B"), lambda _: None, {"A": lambda _: 1, "B": lambda named: named["BLOCK"]}
    )
    assert reader.read({}, "kernel@1", SM90).values == (("A", "int", 1),)


def test_a_heuristic_that_is_no_key_is_not_called() -> None:
    assert read_with_heuristics({"N": 8}, OTHER=lambda named: 1 // 0) == (("N", "int", 8),)


def test_what_a_heuristic_raises_is_the_authors_own_error() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        read_with_heuristics({"N": 8}, EVEN=lambda named: 1 // 0)
    assert not is_ours(caught.value)


def test_a_heuristic_cannot_change_the_callers_arguments() -> None:
    named = {"M": 4, "N": 8}
    read_with_heuristics(named, EVEN=lambda given: given.pop("N") == 8)
    assert named == {"M": 4, "N": 8}


# ---- names that are not arguments ----------------------------------------------------------------------------------


def test_a_key_name_that_is_no_argument_is_one_warning_with_the_near_matches(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="smart_autotune"):
        reader = KeyReader("my_kernel", ("n_rows", "stride"), ("n_row",), lambda _: None)
        for _ in range(3):
            reader.read({"n_rows": 4}, "my_kernel@1", SM90)
    (message,) = caplog.messages
    assert "my_kernel" in message and "'n_row'" in message and "n_rows" in message and "stride" not in message


def test_a_key_name_like_no_argument_says_that_there_is_no_near_match(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="smart_autotune"):
        KeyReader("my_kernel", ("x_ptr",), ("QQQQ",), lambda _: None)
    assert "none" in caplog.messages[0]


def test_key_names_that_are_arguments_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="smart_autotune"):
        read({"M": 1, "N": 2})
    assert not caplog.messages


# ---- the key as a value --------------------------------------------------------------------------------------------


def test_a_key_is_a_tuple_as_stocks_cache_keys_are() -> None:
    assert isinstance(read({"M": 1}), tuple)


def test_keys_of_neighbouring_buckets_have_the_same_rest() -> None:
    small, large = (read({"M": 1}, batch=("x", bucket)) for bucket in (16, 32))
    assert small != large
    assert small.rest == large.rest
    assert (small.bucket, large.bucket, small.rest.bucket) == (16, 32, None)


def test_a_key_without_a_batch_has_no_bucket() -> None:
    assert read({"M": 1}).bucket is None


def test_describe_names_every_part_on_one_line() -> None:
    key = read({"x": tensor(torch.bfloat16, 4), "y": tensor(torch.int32, 4), "M": 64}, batch=("x", 16))
    text = key.describe()
    assert "\n" not in text
    for part in ("M=64", "x:bfloat16", "y:int32", "batch(x)<=16", "sm_90", "232448 B"):
        assert part in text


# ---- binding -------------------------------------------------------------------------------------------------------


@unhurried
@hypothesis.given(positional=st.integers(0, 4), order=st.permutations(ARGUMENTS))
def test_one_call_binds_alike_however_it_is_written(positional: int, order: list[str]) -> None:
    given = {"x": 1, "y": 2, "M": 3, "N": 4}
    args = [given[name] for name in ARGUMENTS[:positional]]
    kwargs = {name: given[name] for name in order if name not in ARGUMENTS[:positional]}
    bound = ArgumentBinder(ARGUMENTS, {}, frozenset())(args, kwargs)
    assert list(bound.items()) == list(given.items())


def test_defaults_are_filled_in_so_that_leaving_one_out_is_giving_it() -> None:
    bind = ArgumentBinder(("x", "M"), {"M": 4}, frozenset())
    assert bind([1], {}) == bind([1, 4], {}) == {"x": 1, "M": 4}


def test_a_default_does_not_replace_what_the_caller_gave_not_even_none() -> None:
    assert ArgumentBinder(("x",), {"x": 4}, frozenset())([None], {}) == {"x": None}
    assert ArgumentBinder(("x",), {"x": 4}, frozenset())([], {"x": None}) == {"x": None}


def test_names_that_the_configs_provide_get_no_default() -> None:
    bind = ArgumentBinder(("x", "BLOCK"), {"BLOCK": 16}, frozenset({"BLOCK"}))
    assert bind([1], {}) == {"x": 1}
    assert bind([1], {"BLOCK": 32}) == {"x": 1, "BLOCK": 32}


def test_launch_options_are_not_arguments() -> None:
    assert ArgumentBinder(("x",), {}, frozenset())([1], {"num_warps": 8}) == {"x": 1}
