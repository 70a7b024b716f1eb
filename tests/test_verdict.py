"""Verdicts and records: what became of each config, as data."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from typing import Any

import hypothesis
import pytest
import triton
from hypothesis import strategies as st

from smart_autotune.key import TuningKey
from smart_autotune.verdict import FITS, OVER_LIMIT, Outcome, TuningRecord, Verdict, describe, distinct

KEY = TuningKey("kernel@1", (("arch", "sm_90"), ("shared_bytes", 232_448)), (("M", "int", 4),), (), ("x", 16))

# The words of logs, tables and stored records: they do not change.
WORDS = {
    "WON", "SLOWER", "OVER_SHARED_MEMORY", "OVER_TENSOR_MEMORY", "OVER_THREADS", "PRUNED_BY_USER", "COMPILE_FAILED",
    "COMPILE_TIMEOUT", "ASSEMBLER_FAILED", "LAUNCH_FAILED", "OUT_OF_DEVICE_MEMORY", "NOT_TIMED",
}  # fmt: skip


def config(block: int = 16, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block}, **options)


def record(*outcomes: Outcome) -> TuningRecord:
    verdicts = tuple(Verdict(config(2**index), outcome) for index, outcome in enumerate(outcomes))
    return TuningRecord("my_kernel", KEY, verdicts, "tuned")


# ---- outcomes ------------------------------------------------------------------------------------------------------


def test_the_outcomes_are_the_words_of_the_design() -> None:
    assert {outcome.value for outcome in Outcome} == WORDS


@pytest.mark.parametrize("outcome", Outcome)
def test_an_outcome_reads_as_its_word_in_texts_and_json(outcome: Outcome) -> None:
    assert str(outcome) == f"{outcome}" == f"{outcome.value}" == outcome.name
    assert json.loads(json.dumps(outcome)) == outcome.name
    assert Outcome(outcome.name) is outcome


def test_no_outcome_is_both_over_a_limit_and_fitting() -> None:
    assert not OVER_LIMIT & FITS
    assert {outcome for outcome in Outcome if outcome.name.startswith("OVER_")} == OVER_LIMIT


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", Outcome)
def test_a_verdict_fits_when_nothing_stopped_its_config(outcome: Outcome) -> None:
    assert Verdict(config(), outcome).fits == (outcome.name in ("WON", "SLOWER", "NOT_TIMED"))


@hypothesis.given(need=st.integers(0, 1 << 40), limit=st.integers(0, 1 << 40))
def test_the_excess_is_need_over_limit(need: int, limit: int) -> None:
    assert Verdict(config(), Outcome.NOT_TIMED, need, limit, "bytes").excess == need - limit


@pytest.mark.parametrize(("need", "limit"), [(None, 1), (1, None), (None, None)])
def test_there_is_no_excess_where_a_number_is_not_known(need: int | None, limit: int | None) -> None:
    assert Verdict(config(), Outcome.COMPILE_FAILED, need, limit).excess is None


def test_a_need_of_zero_is_known() -> None:
    assert Verdict(config(), Outcome.NOT_TIMED, 0, 101_376, "bytes").excess == -101_376


def test_a_verdict_is_not_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Verdict(config(), Outcome.WON).outcome = Outcome.SLOWER  # type: ignore[misc]


def test_a_verdict_keeps_the_authors_own_config() -> None:
    mine = config()
    assert dataclasses.replace(Verdict(mine, Outcome.NOT_TIMED), outcome=Outcome.WON).config is mine


# ---- records -------------------------------------------------------------------------------------------------------


def test_the_winner_is_the_verdict_that_won_wherever_it_stands() -> None:
    found = record(Outcome.OVER_THREADS, Outcome.SLOWER, Outcome.WON)
    assert found.winner is found.verdicts[2]


@pytest.mark.parametrize("outcomes", [(), (Outcome.SLOWER,), (Outcome.OVER_SHARED_MEMORY, Outcome.COMPILE_FAILED)])
def test_without_a_verdict_that_won_there_is_no_winner(outcomes: tuple[Outcome, ...]) -> None:
    assert record(*outcomes).winner is None


@hypothesis.given(outcomes=st.lists(st.sampled_from(Outcome)))
def test_dropped_counts_by_reason_exactly_what_does_not_fit(outcomes: list[Outcome]) -> None:
    found = record(*outcomes)
    assert sum(found.dropped.values()) == sum(not verdict.fits for verdict in found.verdicts)
    assert all(count == outcomes.count(Outcome(word)) for word, count in found.dropped.items())
    assert not {str(outcome) for outcome in FITS} & set(found.dropped)


def test_a_record_knows_when_it_was_made() -> None:
    before = time.time()
    assert before <= record(Outcome.WON).created <= time.time()


def test_a_record_is_not_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record(Outcome.WON).served_by = "rescue"  # type: ignore[misc]


# ---- configs in words ----------------------------------------------------------------------------------------------


def test_describe_gives_the_authors_values_first_and_launch_options_last() -> None:
    found = describe(triton.Config({"BLOCK_T": 16, "SPLIT": 2}, num_warps=8, num_stages=3))
    assert found == "BLOCK_T=16, SPLIT=2, num_warps=8, num_stages=3"


def test_describe_of_a_config_without_values_is_its_launch_options() -> None:
    assert describe(triton.Config({}, num_warps=4, num_stages=2)) == "num_warps=4, num_stages=2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ctas": 2}, "num_ctas=2"),
        ({"maxnreg": 128}, "maxnreg=128"),
        ({"ir_override": "kernel.ttgir"}, "ir_override=kernel.ttgir"),
    ],
)
def test_describe_names_a_launch_option_only_when_it_was_chosen(options: dict[str, Any], words: str) -> None:
    assert describe(config(**options)).endswith(f", {words}")
    assert next(iter(options)) not in describe(config())


CHOICES = [
    config(16), config(32), config(16, num_warps=8), config(16, num_stages=2), config(16, num_ctas=2),
    config(16, maxnreg=64), config(16, ir_override="a"), config(16, ir_override="b"), triton.Config({"BLOCK_N": 16}),
]  # fmt: skip


def test_describe_tells_any_two_different_configs_apart() -> None:
    assert len({describe(choice) for choice in CHOICES}) == len(CHOICES)


# ---- each config once ----------------------------------------------------------------------------------------------


def hook(named: object) -> None: ...


VARIANTS = [*CHOICES, config(16, pre_hook=hook), triton.Config({"BLOCK": [16]}), triton.Config({"BLOCK": True})]


@hypothesis.given(st.lists(st.sampled_from([*VARIANTS, *map(copy.copy, VARIANTS)])))
def test_distinct_keeps_the_first_of_equal_configs_in_order(offered: list[triton.Config]) -> None:
    found = distinct(offered)
    expected = [choice for index, choice in enumerate(offered) if choice not in offered[:index]]
    assert [id(choice) for choice in found] == [id(choice) for choice in expected]
