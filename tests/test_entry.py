"""One tuning as JSON and back; and that nothing odd ever comes back as a tuning, or as an exception of another kind."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from smart_autotune import settings
from smart_autotune.entry import BadEntry, Stored, decode, encode
from smart_autotune.key import TuningKey
from smart_autotune.limits import DeviceLimits
from smart_autotune.verdict import OVER_LIMIT, Outcome, TuningRecord, Verdict
from support.stored import CONFIGS, LIMITS, key, record


def read(entry: Any, met: TuningKey | None = None, configs: Any = CONFIGS, limits: DeviceLimits = LIMITS) -> Stored:
    return decode(json.loads(json.dumps(entry)), met or key(), configs, limits)


def with_verdicts(*verdicts: Verdict, served_by: str = "tuned") -> TuningRecord:
    return TuningRecord("decode", key(), verdicts, served_by)


def written(**changes: Any) -> dict[str, Any]:
    """A good entry whose first verdict has other fields."""
    entry: dict[str, Any] = json.loads(json.dumps(encode(record(key()))))
    entry["verdicts"][0] = {n: v for n, v in {**entry["verdicts"][0], **changes}.items() if v is not None}
    return entry


# ---- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", Outcome)
def test_a_verdict_of_any_outcome_comes_back_as_it_was(outcome: Outcome) -> None:
    need = 240_000 if outcome in OVER_LIMIT else 65_536
    unit = {Outcome.OVER_THREADS: "threads", Outcome.OVER_TENSOR_MEMORY: "columns"}.get(outcome, "bytes")
    verdict = Verdict(
        CONFIGS[0], outcome, need, 232_448, unit, 'Fehler: "ü" \udc80\n', 12.5, (12.0, 13.25), 128, 0, 0.75
    )  # fmt: skip
    found = read(encode(with_verdicts(verdict)))
    assert found == Stored((verdict,), True, "tuned")
    assert found.verdicts[0].config is CONFIGS[0]


def test_what_is_not_known_stays_unknown() -> None:
    bare = Verdict(CONFIGS[1], Outcome.COMPILE_FAILED)
    assert read(encode(with_verdicts(bare))).verdicts == (bare,)


def test_the_order_is_kept_and_an_unfinished_sweep_says_so() -> None:
    whole = record(key())
    found = read(encode(whole, complete=False))
    assert found.verdicts == whole.verdicts and not found.complete
    assert [verdict.median_us for verdict in found.verdicts] == [1.0, 2.0, 3.0, 4.0]


@given(st.lists(st.floats(min_value=0, allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_times_come_back_to_the_last_bit(times: list[float]) -> None:
    whole = record(key(), tuple(times))
    assert read(encode(whole)).verdicts == whole.verdicts


def test_what_could_not_be_read_back_is_not_written() -> None:
    good = Verdict(CONFIGS[0], Outcome.WON, 1, 2, "bytes")
    odd = triton.Config({"BLOCK": 16, "ACTIVATION": lambda x: x})
    unwritable = [
        Verdict(odd, Outcome.COMPILE_FAILED),
        Verdict(CONFIGS[1], Outcome.SLOWER, None, 2, "bytes"),
        *(Verdict(CONFIGS[1], Outcome.SLOWER, 1, 2, "bytes", median_us=t) for t in (float("nan"), float("inf"), -1.0)),
    ]
    assert read(encode(with_verdicts(good, *unwritable)), configs=[*CONFIGS, odd]).verdicts == (good,)


# ---- on the author's configs of today ------------------------------------------------------------------------------


def hook(named: object) -> None: ...


def test_a_restored_config_is_todays_object_with_todays_hook() -> None:
    today = [triton.Config(dict(c.kwargs), num_warps=c.num_warps, pre_hook=hook) for c in CONFIGS]
    found = read(encode(record(key())), configs=today)
    assert len(found.verdicts) == 4 and all(any(v.config is c for c in today) for v in found.verdicts)


def test_a_config_no_longer_offered_is_left_out() -> None:
    found = read(encode(record(key())), configs=[CONFIGS[0], CONFIGS[3], triton.Config({"BLOCK": 64})])
    assert [verdict.config for verdict in found.verdicts] == [CONFIGS[0], CONFIGS[3]]


def test_configs_that_only_their_hooks_tell_apart_are_not_matched() -> None:
    twin = copy.copy(CONFIGS[1])
    twin.pre_hook = hook
    for configs in ([*CONFIGS, twin], [twin, *CONFIGS]):
        assert [v.config for v in read(encode(record(key())), configs=configs).verdicts] == [
            CONFIGS[2], CONFIGS[0], CONFIGS[3],
        ]  # fmt: skip
    both = with_verdicts(Verdict(CONFIGS[1], Outcome.WON, 1, 2, "bytes"), Verdict(twin, Outcome.COMPILE_FAILED))
    assert read(encode(both)).verdicts == ()


def test_the_same_config_declared_twice_is_matched_once() -> None:
    assert len(read(encode(record(key())), configs=[*CONFIGS, copy.copy(CONFIGS[0])]).verdicts) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"kwargs": {"BLOCK": 16.0}}, {"kwargs": {"BLOCK": "16"}}, {"kwargs": {"BLOCK": 16, "MORE": None}},
        {"num_warps": 2}, {"num_stages": 1}, {"num_ctas": 2}, {"maxnreg": 64}, {"ir_override": "a.ttgir"},
    ],
)  # fmt: skip
def test_configs_are_matched_by_all_that_they_set(change: dict[str, Any]) -> None:
    options = {"kwargs": {"BLOCK": 16}, "num_warps": 4, **change}
    assert read(encode(with_verdicts(Verdict(triton.Config(**options), Outcome.COMPILE_FAILED)))).verdicts == ()


def test_values_of_any_writable_kind_are_matched() -> None:
    odd = triton.Config({"D": torch.float16, "F": 1.5, "N": None, "T": (1, True, "x"), "B": True})
    verdict = Verdict(odd, Outcome.COMPILE_FAILED)
    again = triton.Config({"B": True, "T": (1, True, "x"), "N": None, "F": 1.5, "D": torch.float16})
    assert read(encode(with_verdicts(verdict)), configs=[again]).verdicts[0].config is again


def test_a_rescued_config_is_made_again_with_the_offered_ones_hook() -> None:
    offered = triton.Config({"BLOCK": 128}, num_stages=4, pre_hook=hook)
    saved = copy.copy(offered)
    saved.num_stages = 2
    entry = encode(with_verdicts(Verdict(saved, Outcome.WON, 1, 2, "bytes"), served_by="rescue"))
    (verdict,) = read(entry, configs=[offered]).verdicts
    assert verdict.config == saved and verdict.config.pre_hook is hook and offered.num_stages == 4
    with settings.override(rescue=False):
        assert read(entry, configs=[offered]).verdicts == ()
    assert read({**entry, "served_by": "tuned"}, configs=[offered]).verdicts == ()


# ---- what is refused, and why --------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [None, True, 1, 1.5, "text", [], {}, [{}], {"format": 2}, {"format": True}])
def test_json_that_is_no_entry_is_refused(entry: Any) -> None:
    with pytest.raises(BadEntry):
        read(entry)


@pytest.mark.parametrize("part", ["format", "key", "environment", "complete", "served_by", "verdicts"])
@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [1], {"a": 1}])
def test_a_part_of_another_type_is_refused(part: str, value: Any) -> None:
    if (part == "served_by" and value == "x") or (part == "verdicts" and value == []):
        return
    with pytest.raises(BadEntry):
        read({**written(), part: value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"outcome": "WONDERFUL"}, "outcome"), ({"outcome": ["WON"]}, "outcome"), ({"outcome": None}, "outcome"),
        ({"need": None}, "without its need"), ({"unit": None}, "without its need"), ({"unit": "miles"}, "unit"),
        ({"need": 232_449}, "over today's limit of 232448"), ({"need": -1}, "need"), ({"need": True}, "need"),
        ({"need": 1.0}, "need"), ({"need": "1"}, "need"), ({"registers": 1.5}, "registers"),
        ({"median_us": -0.5}, "median_us"), ({"median_us": "1"}, "median_us"), ({"median_us": 10**400}, "median_us"),
        ({"spread_us": [1.0]}, "spread_us"), ({"spread_us": 1.0}, "spread_us"), ({"spread_us": [1, -1]}, "spread_us"),
        ({"compile_secs": []}, "compile_secs"), ({"detail": 1}, "detail"), ({"config": []}, "config"),
        ({"outcome": "OVER_SHARED_MEMORY"}, "without a need over its limit"),
    ],
)  # fmt: skip
def test_a_verdict_that_cannot_be_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadEntry, match=reason):
        read(written(**change))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_times_that_are_no_numbers_are_refused(number: float) -> None:
    entry = written()
    entry["verdicts"][0]["median_us"] = number
    with pytest.raises(BadEntry):
        decode(entry, key(), CONFIGS, LIMITS)


def test_two_winners_are_refused() -> None:
    entry = written()
    entry["verdicts"][1]["outcome"] = "WON"
    with pytest.raises(BadEntry, match="more than one"):
        read(entry)


def test_a_need_over_a_smaller_cap_of_today_is_refused() -> None:
    with pytest.raises(BadEntry, match="over today's limit of 50000"):
        read(written(), limits=dataclasses.replace(LIMITS, shared_bytes=50_000))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda e: e["key"].update(kernel="other"), 'key.kernel is "other", today "package.module.decode"'),
        (lambda e: e["key"].update(source="ff"), "key.source"),
        (lambda e: e["key"]["device"].update(shared_bytes=1), "key.device.shared_bytes is 1, today 232448"),
        (lambda e: e["key"]["values"].update(topk=["int", "512"]), "key.values.topk"),
        (lambda e: e["key"]["values"].update(topk=["int", 512.0]), "key.values.topk"),
        (lambda e: e["key"]["dtypes"].pop("idx"), "key.dtypes.idx is absent"),
        (lambda e: e["key"].update(batch=["q", 32]), "key.batch"),
        (lambda e: e["key"].update(more=1), "key.more is 1, today absent"),
        (lambda e: e["environment"].update(triton="3.5.0"), 'environment.triton is "3.5.0"'),
        (lambda e: e["environment"].update(bench="graph"), "environment.bench"),
    ],
)
def test_parts_of_another_key_are_named_one_by_one(edit: Callable[[Any], Any], named: str) -> None:
    entry = written()
    edit(entry)
    with pytest.raises(BadEntry) as caught:
        read(entry)
    assert named in str(caught.value) and ";" not in str(caught.value)


# ---- any damage at all ---------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(Outcome)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for name, child in children for place in places(child, (*path, name)))]


@given(st.data())
def test_whatever_stands_in_place_of_a_part_the_answer_is_an_entry_or_bad_entry(data: st.DataObject) -> None:
    entry = written()
    place = data.draw(st.sampled_from(places(entry)))
    value = data.draw(JSON)
    if not place:
        entry = value
    else:
        target: Any = entry
        for step in place[:-1]:
            target = target[step]
        target[place[-1]] = value
    try:
        found = decode(entry, key(), CONFIGS, LIMITS)
    except BadEntry as error:
        assert str(error)
        return
    assert all(verdict.config in CONFIGS for verdict in found.verdicts)
    assert all(not v.fits or (v.need is not None and v.need <= LIMITS.shared_bytes) for v in found.verdicts)


def test_json_of_any_depth_is_refused() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for entry in ({**written(), "key": nested}, {**written(), "format": nested}, written(config={"kwargs": nested})):
        with pytest.raises(BadEntry):
            decode(entry, key(), CONFIGS, LIMITS)
