"""``reset_to_zero`` and ``restore_value``: what is put back, for whom, and in which order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from smart_autotune.errors import BadValue
from smart_autotune.hooks import ResetRestore


def restoring(*names: str) -> ResetRestore:
    return ResetRestore("my_kernel", [], list(names))


def resetting(*names: str) -> ResetRestore:
    return ResetRestore("my_kernel", list(names), [])


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


# ---- reset_to_zero -------------------------------------------------------------------------------------------------


def test_reset_zeroes_what_it_names_and_nothing_else() -> None:
    call = {"x": numbers(4), "y": numbers(4)}
    resetting("x").before(call)
    assert torch.equal(call["x"], torch.zeros(4))
    assert torch.equal(call["y"], numbers(4))


def test_reset_of_a_view_leaves_the_rest_of_its_storage_alone() -> None:
    base = numbers(8)
    resetting("x").before({"x": base[::2]})
    assert base.tolist() == [0, 2, 0, 4, 0, 6, 0, 8]


def test_after_a_reset_nothing_is_put_back() -> None:
    hooks, call = resetting("x"), {"x": numbers(4)}
    hooks.before(call)
    call["x"].fill_(7)
    hooks.after(call)
    assert call["x"].tolist() == [7, 7, 7, 7]


def test_reset_only_takes_no_copies() -> None:
    hooks = ResetRestore("my_kernel", ["x"], ["y"])
    call = {"x": numbers(2), "y": numbers(2)}
    hooks.before(call, reset_only=True)
    call["y"].fill_(7)
    hooks.after(call)
    assert call["x"].tolist() == [0, 0]
    assert call["y"].tolist() == [7, 7]


# ---- restore_value -------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.t(),
    "every_other_row": lambda base: base[::2],
    "every_other_column": lambda base: base[:, ::2],
    "a_window": lambda base: base[1:3, 2:5],
    "one_column": lambda base: base[:, 3],
    "one_number": lambda base: base[2, 2],
    "empty": lambda base: base[4:],
    "diagonal": lambda base: base.diagonal(),
    "permuted": lambda base: base.reshape(2, 2, 6).permute(2, 0, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_restore_puts_a_view_back_and_leaves_the_rest_of_its_storage_alone(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    base = numbers(4, 6)
    hooks, call = restoring("x"), {"x": view(base)}
    before = call["x"].clone()
    hooks.before(call)
    base.fill_(-1)
    hooks.after(call)
    assert torch.equal(call["x"], before)
    view(base).fill_(-1)
    assert torch.equal(base, torch.full((4, 6), -1.0))  # nothing outside the view was written


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.float64])
def test_restore_is_exact_for_every_dtype(dtype: torch.dtype) -> None:
    hooks, call = restoring("x"), {"x": torch.tensor([0, 1, 3]).to(dtype)}
    before = call["x"].clone()
    hooks.before(call)
    call["x"].zero_()
    hooks.after(call)
    assert torch.equal(call["x"], before)


def test_restore_writes_into_the_callers_tensor() -> None:
    hooks, call = restoring("x"), {"x": numbers(4)}
    same = call["x"]
    hooks.before(call)
    call["x"].fill_(7)
    hooks.after(call)
    assert call["x"] is same


def test_restore_also_happens_after_a_launch_that_failed() -> None:
    hooks, call = restoring("x"), {"x": numbers(4)}
    hooks.before(call)
    call["x"].fill_(7)
    hooks.after(call, exception=RuntimeError("launch"))
    assert torch.equal(call["x"], numbers(4))


def test_a_tensor_in_both_lists_is_zeroed_for_the_launch_and_zero_after_it() -> None:
    hooks, call = ResetRestore("my_kernel", ["x"], ["x"]), {"x": numbers(4)}
    hooks.before(call)
    assert torch.equal(call["x"], torch.zeros(4))
    call["x"].fill_(7)
    hooks.after(call)
    assert torch.equal(call["x"], torch.zeros(4))


# ---- None, missing names -------------------------------------------------------------------------------------------


def test_none_is_skipped_in_both_lists_and_the_others_are_served() -> None:
    hooks = ResetRestore("my_kernel", ["a", "b"], ["c", "d"])
    call = {"a": None, "b": numbers(2), "c": None, "d": numbers(2)}
    hooks.before(call)
    assert call["b"].tolist() == [0, 0]
    call["d"].fill_(7)
    hooks.after(call)
    assert call["d"].tolist() == [1, 2]
    assert call["a"] is None and call["c"] is None


@pytest.mark.parametrize(("hooks", "option"), [(resetting("z"), "reset_to_zero"), (restoring("z"), "restore_value")])
def test_a_name_that_the_call_does_not_pass_is_refused_by_name(hooks: ResetRestore, option: str) -> None:
    with pytest.raises(BadValue) as caught:
        hooks.before({"x": numbers(2), "y": None})
    for word in ("my_kernel", option, "'z'", "x, y"):
        assert word in str(caught.value)


def test_a_refused_call_leaves_no_copies_for_the_next() -> None:
    hooks, call = restoring("x", "z"), {"x": numbers(2)}
    with pytest.raises(BadValue):
        hooks.before(call)
    call["x"].fill_(7)
    hooks.after(call)
    assert call["x"].tolist() == [7, 7]


def test_after_without_before_does_nothing() -> None:
    call = {"x": numbers(2)}
    restoring("x").after(call)
    assert call["x"].tolist() == [1, 2]


# ---- nesting, threads, memory --------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(depth=st.integers(1, 6))
def test_a_launch_within_a_launch_restores_its_own_values(depth: int) -> None:
    hooks, call = restoring("x"), {"x": torch.zeros(1)}
    for level in range(depth):
        call["x"].fill_(level)
        hooks.before(call)
    for level in reversed(range(depth)):
        call["x"].fill_(-1)
        hooks.after(call)
        assert call["x"].item() == level


def test_a_nested_launch_that_is_refused_leaves_the_outer_one_its_copies() -> None:
    hooks, call = restoring("x"), {"x": numbers(2)}
    hooks.before(call)
    with pytest.raises(BadValue):
        hooks.before({})
    call["x"].fill_(7)
    hooks.after(call)
    assert call["x"].tolist() == [1, 2]


def test_each_thread_gets_its_own_values_back() -> None:
    hooks, threads_count = restoring("x"), 8
    all_copied, all_written = threading.Barrier(threads_count), threading.Barrier(threads_count)
    restored: dict[int, float] = {}

    def launch(index: int) -> None:
        call = {"x": torch.full((3,), float(index))}
        hooks.before(call)
        all_copied.wait(10)
        call["x"].fill_(-1)
        all_written.wait(10)
        hooks.after(call)
        restored[index] = call["x"][0].item()

    threads = [threading.Thread(target=launch, args=(index,)) for index in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert restored == {index: float(index) for index in range(threads_count)}


def test_another_threads_end_of_launch_does_not_take_this_ones_copies() -> None:
    hooks, call = restoring("x"), {"x": numbers(2)}
    hooks.before(call)
    call["x"].fill_(7)
    other = threading.Thread(target=hooks.after, args=({"x": numbers(2)},))
    other.start()
    other.join(10)
    assert call["x"].tolist() == [7, 7]
    hooks.after(call)
    assert call["x"].tolist() == [1, 2]


def test_no_copy_outlives_its_launch() -> None:
    copies: list[weakref.ref[torch.Tensor]] = []

    class Watched(torch.Tensor):
        def clone(self, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
            copy = torch.Tensor.clone(self.as_subclass(torch.Tensor))
            copies.append(weakref.ref(copy))
            return copy

    hooks = restoring("x")
    call = {"x": numbers(2).as_subclass(Watched)}
    hooks.before(call)
    assert copies[0]() is not None
    hooks.after(call)
    assert copies[0]() is None
    assert not hooks._copies
