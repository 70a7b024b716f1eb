"""The batch part of the key: where the size comes from, how it is rounded, and when it stays out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from smart_autotune import batch as batch_module
from smart_autotune import settings
from smart_autotune.batch import BATCH_NAMES, BatchRule, next_power_of_2
from smart_autotune.errors import BadType, BadValue

unhurried = hypothesis.settings(deadline=None)


@pytest.fixture(autouse=True)
def batch_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch_module, "_asked_by_server", False)
    with settings.override(batch="auto", deterministic=False):
        yield


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def rule(named: dict[str, Any], keys: tuple[str, ...] = (), batch: Any = "auto", buckets: Any = "pow2") -> BatchRule:
    return BatchRule("my_kernel", tuple(named), keys, batch, buckets)


def part(named: dict[str, Any], keys: tuple[str, ...] = (), batch: Any = "auto", buckets: Any = "pow2") -> Any:
    return rule(named, keys, batch, buckets).part(named)


def exact(size: int) -> int:
    return size


# ---- rounding ------------------------------------------------------------------------------------------------------


@unhurried
@hypothesis.given(size=st.integers(1, 1 << 40))
def test_next_power_of_2_is_the_smallest_one_that_holds_the_size(size: int) -> None:
    rounded = next_power_of_2(size)
    assert rounded & (rounded - 1) == 0
    assert rounded // 2 < size <= rounded


@pytest.mark.parametrize("size", [0, -1, -1000])
def test_next_power_of_2_of_nothing_is_one(size: int) -> None:
    assert next_power_of_2(size) == 1


@unhurried
@hypothesis.given(one=st.integers(-5, 5000), other=st.integers(-5, 5000))
def test_rounding_to_powers_of_2_is_monotone(one: int, other: int) -> None:
    bucket_of = rule({}).bucket_of
    assert (one <= other) <= (bucket_of(one) <= bucket_of(other))


@unhurried
@hypothesis.given(
    edges=st.lists(st.integers(1, 1000), min_size=1, unique=True).map(sorted),
    one=st.integers(0, 1200),
    other=st.integers(0, 1200),
)
def test_rounding_to_a_list_is_monotone_and_up_to_the_nearest_edge(edges: list[int], one: int, other: int) -> None:
    bucket_of = rule({}, buckets=edges).bucket_of
    assert (one <= other) <= (bucket_of(one) <= bucket_of(other))
    assert bucket_of(one) == min((edge for edge in edges if edge >= one), default=edges[-1])


@pytest.fixture
def captured() -> Iterator[Any]:
    """Tells which sizes a server captures; forgotten after the test."""
    yield batch_module.end_buckets_at
    batch_module.end_buckets_at(())


@pytest.mark.parametrize(
    ("sizes", "rounded"),
    [
        ([1, 2, 4, 8, 12, 16, 96, 160], {1: 1, 9: 16, 33: 64, 65: 96, 97: 160, 160: 160, 161: 256, 5000: 8192}),
        ([24, 1, 3, 6, 12], {1: 1, 2: 2, 3: 3, 4: 6, 7: 12, 13: 24, 24: 24, 25: 32}),
        ([20], {1: 1, 9: 16, 17: 20, 21: 32}),
        ([1, 2, 4, 8], {3: 4, 9: 16}),
        ([], {3: 4, 9: 16}),
        ([0, -4], {0: 1, 3: 4}),
    ],
)
def test_powers_of_two_give_way_to_the_largest_captured_size_below_each(
    captured: Any, sizes: list[int], rounded: dict[int, int]
) -> None:
    bucket_of = rule({}).bucket_of
    assert bucket_of is next_power_of_2
    captured(sizes)
    assert {size: rule({}).bucket_of(size) for size in rounded} == rounded


@unhurried
@hypothesis.given(sizes=st.lists(st.integers(1, 600)), one=st.integers(0, 2000), other=st.integers(0, 2000))
def test_captured_sizes_round_up_monotone_and_into_no_more_buckets(sizes: list[int], one: int, other: int) -> None:
    batch_module.end_buckets_at(sizes)
    try:
        bucket_of = rule({}).bucket_of
        assert bucket_of(one) >= one and (one <= other) <= (bucket_of(one) <= bucket_of(other))
        buckets = {bucket_of(size) for size in range(1, 1025)}
        assert len(buckets) <= 12 and all(bucket_of(bucket) == bucket for bucket in buckets)
        assert bucket_of(max(sizes, default=1)) == max(sizes, default=1) or not sizes
    finally:
        batch_module.end_buckets_at(())


def test_captured_sizes_change_no_rounding_of_the_author(captured: Any) -> None:
    captured([20])
    assert part({"B": 17}, buckets=[16, 64]) == ("B", 64)
    assert part({"B": 17}, buckets=exact) == ("B", 17)
    assert part({"B": 17}) == ("B", 20)


def test_launches_planned_before_are_looked_at_again(captured: Any) -> None:
    before = settings.current()
    captured([1, 2, 4])
    assert settings.current() is before, "nothing changes"
    captured([20])
    assert settings.current() is not before and settings.current() == before
    now = settings.current()
    captured([20])
    assert settings.current() is now


def test_a_size_beyond_the_last_bucket_is_in_the_last() -> None:
    assert part({"B": 1000}, buckets=[16, 64]) == ("B", 64)


@pytest.mark.parametrize("buckets", [[16, 64], (16, 64), range(16, 80, 48)], ids=["list", "tuple", "range"])
def test_buckets_may_be_any_ascending_integers(buckets: Any) -> None:
    assert part({"B": 17}, buckets=buckets) == ("B", 64)


def test_buckets_from_a_generator_serve_more_than_one_call() -> None:
    found = rule({"B": 1}, buckets=(1 << exponent for exponent in (2, 4)))
    assert [found.part({"B": size}) for size in (1, 5, 4)] == [("B", 4), ("B", 16), ("B", 4)]


def test_buckets_do_not_change_with_the_authors_list() -> None:
    edges = [16, 64]
    found = rule({"B": 17}, buckets=edges)
    edges.insert(1, 32)
    assert found.part({"B": 17}) == ("B", 64)


def test_buckets_may_be_a_function() -> None:
    assert part({"B": 17}, buckets=lambda size: -(-size // 10) * 10) == ("B", 20)


@pytest.mark.parametrize(
    "buckets",
    [[64, 16], [16, 16, 64], [True, 64], [16.0, 64], [0, 16], [-1, 16], [], "pow3", "16,64", None, 16, ["16"], [None]],
    ids=repr,
)
def test_buckets_that_do_not_ascend_are_refused_with_what_is_allowed(buckets: Any) -> None:
    with pytest.raises(BadValue) as caught:
        rule({"B": 1}, buckets=buckets)
    for word in ("my_kernel", "batch_buckets", repr(buckets), "pow2", "ascending"):
        assert word in str(caught.value)


@pytest.mark.parametrize("junk", [None, 2.0, "16", True, (16,)], ids=repr)
def test_a_bucket_function_must_return_an_integer(junk: Any) -> None:
    with pytest.raises(BadType) as caught:
        part({"B": 17}, buckets=lambda size: junk)
    for word in ("my_kernel", "batch_buckets(17)", type(junk).__name__, "allowed: int"):
        assert word in str(caught.value)


def test_what_a_bucket_function_raises_is_the_authors_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        part({"B": 17}, buckets=lambda size: size // 0)


# ---- auto ----------------------------------------------------------------------------------------------------------


@unhurried
@hypothesis.given(names=st.lists(st.sampled_from(BATCH_NAMES), min_size=1, unique=True), upper=st.booleans())
def test_auto_prefers_names_in_their_order_whatever_the_signatures(names: list[str], upper: bool) -> None:
    named = {name.upper() if upper else name: 3 for name in names}
    best = min(names, key=BATCH_NAMES.index)
    assert part({"x": tensor(9, 9), **named}) == (best.upper() if upper else best, 4)


@pytest.mark.parametrize("name", ["B", "bs", "batch", "batch_size", "num_seqs", "num_tokens", "n_tokens", "M"])
def test_auto_knows_the_usual_names_in_any_case(name: str) -> None:
    for spelled in (name, name.lower(), name.upper(), name.title()):
        assert part({"x": tensor(100, 4), spelled: 5}) == (spelled, 8)


@pytest.mark.parametrize("value", [True, 4.0, "4", None, tensor(9, 9), tensor()], ids=lambda value: str(type(value)))
def test_auto_skips_a_batch_name_that_holds_no_integer(value: Any) -> None:
    assert part({"M": value, "bs": None, "x": tensor(3, 3)})[1] in (4, 16)
    assert part({"x": tensor(3, 3), "M": value}) == ("x", 4)


def test_auto_goes_on_to_the_next_name_when_the_best_holds_no_integer() -> None:
    assert part({"batch_size": None, "B": tensor(2, 2), "M": 100}) == ("M", 128)


def test_auto_takes_the_first_dimension_of_the_first_tensor() -> None:
    assert part({"scale": 0.5, "rows": 7, "x": tensor(100, 3), "y": tensor(5, 5)}) == ("x", 128)


def test_auto_skips_tensors_without_dimensions_and_arguments_that_are_none() -> None:
    assert part({"mask": None, "scale": tensor(), "x": tensor(5)}) == ("x", 8)


def test_auto_takes_an_empty_tensor_for_what_it_is() -> None:
    assert part({"x": tensor(0, 8)}, buckets=exact) == ("x", 0)


def test_auto_is_not_fooled_by_a_shape_without_a_dtype() -> None:
    class Grid:
        shape = (77,)

    assert part({"grid": Grid(), "x": tensor(5)}) == ("x", 8)


def test_auto_finds_nothing_where_there_is_nothing() -> None:
    assert part({"alpha": 3, "scale": 0.5, "name": "x"}) is None


@pytest.mark.parametrize(
    "key",
    ["M", "m", "BATCH_SIZE", "bs", "num_tokens", "n_tokens", "bucket", "N_BUCKET", "max_batch", "my_total_tokens"],
)
def test_auto_is_off_when_the_authors_key_holds_the_batch_already(key: str) -> None:
    named = {"x": tensor(5), "bs": 3, key: 7}
    assert part(named, keys=("N", key)) is None
    assert repr(key) in rule(named, keys=("N", key)).off_because()


@pytest.mark.parametrize("key", ["N", "topk_rounded", "HEADS", "block_m", "bsize_k"])
def test_auto_stays_on_for_keys_that_are_no_batch(key: str) -> None:
    assert part({"x": tensor(5), key: 7}, keys=(key,)) == ("x", 8)
    assert rule({"x": tensor(5), key: 7}, keys=(key,)).off_because() == ""


def test_a_batch_that_the_author_names_stays_on_whatever_the_key() -> None:
    assert part({"x": tensor(5), "bs": 3}, keys=("bs",), batch="x") == ("x", 8)


# ---- named by the author -------------------------------------------------------------------------------------------


def test_a_named_tensor_gives_its_first_dimension() -> None:
    assert part({"k": tensor(99), "q": tensor(5, 7)}, batch="q") == ("q", 8)


def test_a_named_integer_gives_its_value() -> None:
    assert part({"x": tensor(99), "seqs": 5}, batch="seqs") == ("seqs", 8)


@pytest.mark.parametrize(("dim", "bucket"), [(0, 4), (1, 32), (2, 1)])
def test_a_name_with_a_dimension_gives_that_dimension(dim: int, bucket: int) -> None:
    assert part({"q": tensor(3, 17, 1)}, batch=("q", dim)) == ("q", bucket)


def test_a_function_gets_the_named_arguments() -> None:
    named = {"q": tensor(3, 5), "groups": 4}
    assert part(named, batch=lambda given: given["q"].shape[0] * given["groups"]) == ("batch()", 16)


@pytest.mark.parametrize("batch", ["q", ("q", 1), lambda named: named["q"]], ids=["name", "dimension", "function"])
def test_none_means_that_this_call_has_no_batch(batch: Any) -> None:
    assert part({"q": None, "x": tensor(5)}, batch=batch) is None


def test_a_named_argument_that_the_call_leaves_out_means_no_batch() -> None:
    assert BatchRule("my_kernel", ("x", "q"), (), "q", "pow2").part({"x": tensor(5)}) is None


def test_batch_none_turns_the_batch_off() -> None:
    assert part({"bs": 3, "x": tensor(5)}, batch=None) is None


def test_a_name_that_is_no_argument_is_refused_with_a_near_match() -> None:
    with pytest.raises(BadValue) as caught:
        rule({"query": None, "scale": None}, batch="qery")
    for word in ("my_kernel", "'qery'", "query"):
        assert word in str(caught.value)
    assert "scale" not in str(caught.value)


def test_a_name_like_no_argument_is_refused_with_all_of_them() -> None:
    with pytest.raises(BadValue, match=r"query, scale"):
        rule({"query": None, "scale": None}, batch="zzz")


@pytest.mark.parametrize("spec", [("q", -1), ("q", 1.0), ("q", "1"), ("q", None), ("q", True)], ids=repr)
def test_a_dimension_must_be_an_index(spec: Any) -> None:
    with pytest.raises((BadValue, BadType)) as caught:
        rule({"q": None}, batch=spec)
    for word in ("my_kernel", repr(spec), "dimension"):
        assert word in str(caught.value)


@pytest.mark.parametrize("spec", [5, 1.5, ("q",), ("q", 1, 2), (), (1, "q"), (None, 0), b"q"], ids=repr)
def test_a_batch_that_is_no_name_pair_or_function_is_refused_with_what_is_allowed(spec: Any) -> None:
    with pytest.raises((BadValue, BadType)) as caught:
        rule({"q": None}, batch=spec)
    for word in ("my_kernel", "batch", repr(spec)):
        assert word in str(caught.value)


def test_a_dimension_that_the_tensor_has_not_is_named_with_the_argument() -> None:
    with pytest.raises(BadValue) as caught:
        part({"q": tensor(3, 5)}, batch=("q", 2))
    for word in ("my_kernel", "'q'", "2 dimensions"):
        assert word in str(caught.value)


@pytest.mark.parametrize("junk", [2.0, "16", True, (16,)], ids=repr)
@pytest.mark.parametrize("source", ["q", "batch()"])
def test_a_size_must_be_an_integer_or_none(source: str, junk: Any) -> None:
    with pytest.raises(BadType) as caught:
        part({"q": junk}, batch="q" if source == "q" else lambda named: named["q"])
    for word in ("my_kernel", repr(source), type(junk).__name__, "allowed: int or None"):
        assert word in str(caught.value)


def test_what_a_batch_function_raises_is_the_authors_own_error() -> None:
    with pytest.raises(KeyError):
        part({"q": 1}, batch=lambda named: named["missing"])


# ---- turned off ----------------------------------------------------------------------------------------------------

SPECS = ["auto", "q", ("q", 0), lambda named: 5]
SPEC_NAMES = ["auto", "name", "dimension", "function"]


@pytest.mark.parametrize("batch", SPECS, ids=SPEC_NAMES)
def test_the_setting_turns_every_kind_of_batch_off(batch: Any) -> None:
    found = rule({"q": tensor(5)}, batch=batch)
    with settings.override(batch="off"):
        assert found.part({"q": tensor(5)}) is None
        assert found.off_because() == "SMART_AUTOTUNE_BATCH=off"
    assert found.part({"q": tensor(5)})[1] == 8


@pytest.mark.parametrize("batch", SPECS, ids=SPEC_NAMES)
def test_deterministic_mode_turns_every_kind_of_batch_off(batch: Any) -> None:
    found = rule({"q": tensor(5)}, batch=batch)
    with settings.override(deterministic=True):
        assert found.part({"q": tensor(5)}) is None
        assert "invariant" in found.off_because()


def test_nothing_is_asked_of_the_author_while_the_batch_is_off() -> None:
    with settings.override(batch="off"):
        assert part({"q": 1}, batch=lambda named: 1 // 0) is None


SWITCHES = ("VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")


@pytest.mark.parametrize(("variable", "value"), list(itertools.product(SWITCHES, ["1", "true", "True", "yes"])))
def test_a_servers_own_invariance_switch_turns_the_batch_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setattr(batch_module, "_asked_by_server", None)
    monkeypatch.setenv(variable, value)
    assert part({"q": tensor(5)}) is None


@pytest.mark.parametrize("value", ["0", "false", "", None], ids=repr)
def test_a_servers_switch_that_is_off_or_absent_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setattr(batch_module, "_asked_by_server", None)
    for variable in SWITCHES:
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert part({"q": tensor(5)}) == ("q", 8)


# ---- for code that reads the size itself -----------------------------------------------------------------------------


def test_where_the_size_is_read_from_is_said_for_each_kind_of_batch() -> None:
    named = {"M": 3, "x": tensor(5), "BS": None, "q": tensor(5, 7)}
    assert rule(named).readable_from == ("auto", "BS", "M")
    assert rule(named, batch="q").readable_from == ("argument", "q", 0)
    assert rule(named, batch=("q", 1)).readable_from == ("argument", "q", 1)
    assert rule(named, batch=None).readable_from == ("never",)
    assert rule(named, batch=lambda given: 5).readable_from is None


@pytest.mark.parametrize("batch", SPECS, ids=SPEC_NAMES)
def test_the_size_is_read_from_nowhere_while_the_batch_is_off(batch: Any) -> None:
    found = rule({"q": tensor(5)}, batch=batch)
    with settings.override(batch="off"):
        assert found.readable_from == ("never",)


def test_the_size_is_read_from_nowhere_where_the_authors_key_holds_it() -> None:
    assert rule({"M": 3}, keys=("M",)).readable_from == ("never",)


def read_by_itself(source: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The description taken at its word."""
    if source == ("never",):
        return None
    if source[0] == "argument":
        value = named[source[1]]
        return value if value is None or isinstance(value, int) else value.shape[source[2]]
    integers = [named[name] for name in source[1:] if type(named[name]) is int]
    firsts = [value.shape[0] for value in named.values() if isinstance(value, torch.Tensor) and value.dim()]
    return next(iter(integers + firsts), None)


ANYTHING = st.sampled_from([None, 3, True, 0.5, tensor(), tensor(5), tensor(9, 17)])


@unhurried
@hypothesis.given(
    named=st.fixed_dictionaries({name: ANYTHING for name in ("x", "M", "bs", "alpha")}),
    batch=st.sampled_from(["auto", "x", None]),
)
def test_reading_the_size_as_described_finds_the_same(named: dict[str, Any], batch: Any) -> None:
    x = named["x"]
    hypothesis.assume(batch != "x" or x is None or type(x) is int or (isinstance(x, torch.Tensor) and x.dim() > 0))
    found = rule(named, batch=batch, buckets=exact)
    described = found.readable_from
    assert described is not None
    part_found = found.part(named)
    assert read_by_itself(described, named) == (part_found[1] if part_found else None)
