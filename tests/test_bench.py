"""What is timed, with which arguments, what a failing config costs, and who wins a near tie."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from smart_autotune import Outcome, smart_autotune
from support.fake_kernel import FakeKernel


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def tuned(fake=None, sizes=(4, 2, 8), time_ms=lambda values: values["BLOCK"], **options):
    fake = fake or FakeKernel(shape)
    options.setdefault("do_bench", fake.bench(time_ms))
    return smart_autotune(configs=[triton.Config({"BLOCK": size}) for size in sizes], key=["n"], **options)(fake)


def outcomes(kernel):
    return {v.config.kwargs["BLOCK"]: v.outcome for v in kernel.records[-1].verdicts}


# ---- one config fails while it is timed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), Outcome.OUT_OF_DEVICE_MEMORY),
        (MemoryError("host"), Outcome.OUT_OF_DEVICE_MEMORY),
        (OutOfResources(2048, 1024, "threads"), Outcome.OVER_THREADS),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), Outcome.LAUNCH_FAILED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_one_configs_failure_while_timed_is_its_verdict_and_the_others_are_timed(sm_120, error, outcome):
    def fails_for_2(values):
        if values["BLOCK"] == 2:
            raise error

    kernel = tuned(FakeKernel(shape, on_launch=fails_for_2))
    kernel[(1,)](None, 63)
    assert outcomes(kernel) == {4: Outcome.WON, 8: Outcome.SLOWER, 2: outcome}
    failed = next(v for v in kernel.records[-1].verdicts if v.config.kwargs["BLOCK"] == 2)
    assert failed.median_us is None
    assert str(error).split()[0] in failed.detail or failed.need == 2048


def test_when_there_is_no_memory_to_time_anything_the_first_that_fits_serves_and_the_key_stays_cold(sm_120, caplog):
    full = [True]
    fake = FakeKernel(shape, on_compile=lambda values: 200_000 if values["BLOCK"] == 4 else 64)

    def bench(run, quantiles):
        if full:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory: the flush buffer of the benchmark")
        run()
        return float(fake.launches[-1]["BLOCK"])

    kernel = tuned(fake, sizes=(4, 8, 2), do_bench=bench)
    kernel[(1,)](None, 63)
    assert [launch["BLOCK"] for launch in fake.launches] == [8]
    assert kernel.cache == {} and kernel.records == [] and len(kernel.cold_keys()) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    full.clear()
    kernel[(1,)](None, 63)
    assert fake.launches[-1]["BLOCK"] == 2 and kernel.cold_keys() == []


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "Triton Error [CUDA]: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: device-side assert triggered",
    ],
)
def test_after_an_error_that_loses_the_device_the_sweep_stops_names_the_config_and_keeps_nothing(sm_120, caplog, text):
    def fails_for_2(values):
        if values["BLOCK"] == 2:
            raise RuntimeError(text)

    fake = FakeKernel(shape, on_launch=fails_for_2)
    kernel = tuned(fake)
    with pytest.raises(RuntimeError, match=text.replace("[", r"\[")):
        kernel[(1,)](None, 63)
    assert [launch["BLOCK"] for launch in fake.launches] == [4, 2], "8 was not tried any more"
    assert kernel.cache == {} and kernel.records == []
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and "BLOCK=2" in errors[0] and "shape" in errors[0]


def test_each_config_is_named_in_the_log_before_it_runs_so_that_a_hang_has_a_name(sm_120, caplog):
    caplog.set_level(logging.DEBUG, logger="smart_autotune")
    named = []
    fake = FakeKernel(shape, on_launch=lambda values: named.append(caplog.records[-1].getMessage()))
    tuned(fake)[(1,)](None, 63)
    assert ["BLOCK=4" in named[0], "BLOCK=2" in named[1], "BLOCK=8" in named[2]] == [True] * 3
    assert all("timing" in text for text in named[:3])


def test_when_every_config_fails_at_its_launch_the_first_error_is_raised_and_nothing_is_kept(sm_120):
    def fails(values):
        raise RuntimeError(f"invalid argument for block {values['BLOCK']}")

    kernel = tuned(FakeKernel(shape, on_launch=fails))
    with pytest.raises(RuntimeError, match="block 4"):
        kernel[(1,)](None, 63)
    assert kernel.cache == {} and kernel.records == [] and not hasattr(kernel, "best_config")


def test_a_keyboard_interrupt_ends_the_sweep(sm_120):
    def interrupted(values):
        raise KeyboardInterrupt

    kernel = tuned(FakeKernel(shape, on_launch=interrupted))
    with pytest.raises(KeyboardInterrupt):
        kernel[(1,)](None, 63)
    assert kernel.cache == {} and len(kernel.fn.launches) == 1
    assert kernel.nargs is None


# ---- what a benchmark may return ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["three quantiles", "tuple", "one number", "one in a list"])
def test_a_benchmark_may_return_one_number_or_several(sm_120, kind):
    fake = FakeKernel(shape)

    def bench(run, quantiles):
        run()
        time = fake.launches[-1]["BLOCK"] / 2
        return {"three quantiles": [time, time - 0.25, time + 0.25], "tuple": (time, time, time), "one number": time,
                "one in a list": [time]}[kind]  # fmt: skip

    kernel = tuned(fake, do_bench=bench)
    kernel[(1,)](None, 63)
    medians = {v.config.kwargs["BLOCK"]: v.median_us for v in kernel.records[-1].verdicts}
    assert medians == {4: 2000.0, 2: 1000.0, 8: 4000.0}
    winner = kernel.records[-1].winner
    assert winner.spread_us == {"three quantiles": (750.0, 1250.0), "tuple": (1000.0, 1000.0)}.get(kind)


@pytest.mark.parametrize("returned", [None, "fast", [], ["fast"]])
def test_a_benchmark_that_returns_no_time_is_an_error_that_says_what_is_allowed(sm_120, returned):
    kernel = tuned(do_bench=lambda run, quantiles: returned)
    with pytest.raises(TypeError, match=r"shape: do_bench returned .*; allowed: milliseconds"):
        kernel[(1,)](None, 63)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_time_that_is_no_number_of_milliseconds_never_wins(sm_120, bad):
    kernel = tuned(time_ms=lambda values: bad if values["BLOCK"] == 4 else values["BLOCK"])
    kernel[(1,)](None, 63)
    assert outcomes(kernel) == {2: Outcome.WON, 8: Outcome.SLOWER, 4: Outcome.LAUNCH_FAILED}


# ---- near ties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_ms", "winner"),
    [
        ({4: 1.009, 2: 1.0, 8: 1.005}, 4),
        ({4: 1.02, 2: 1.0, 8: 1.005}, 2),
        ({4: 1.02, 2: 1.005, 8: 1.0}, 2),
        ({4: 1.02, 2: 1.02, 8: 1.0}, 8),
        ({4: 0.0, 2: 0.0, 8: 1.0}, 4),
    ],
)
def test_less_than_one_percent_apart_the_config_declared_first_wins(sm_120, times_ms, winner):
    kernel = tuned(time_ms=lambda values: times_ms[values["BLOCK"]])
    kernel[(1,)](None, 63)
    assert kernel.best_config.kwargs["BLOCK"] == winner
    order = [v.config.kwargs["BLOCK"] for v in kernel.records[-1].verdicts]
    assert order[0] == winner
    assert [times_ms[block] for block in order[1:]] == sorted(times_ms[block] for block in order[1:])


def test_jitter_below_one_percent_does_not_change_the_winner_between_runs(sm_120):
    winners = set()
    for jitter in ({4: 1.0, 2: 1.004}, {4: 1.004, 2: 1.0}):
        kernel = tuned(sizes=(4, 2), time_ms=lambda values, jitter=jitter: jitter[values["BLOCK"]])
        kernel[(1,)](None, 63)
        winners.add(kernel.best_config.kwargs["BLOCK"])
    assert winners == {4}


# ---- representative inputs ------------------------------------------------------------------------------------------


def test_tune_args_are_timed_and_the_live_launch_gets_the_real_arguments(sm_120):
    asked = []

    def representative(named):
        asked.append(named)
        return {"x": torch.zeros(1000)}

    fake = FakeKernel(shape)
    kernel = tuned(fake, tune_args=representative)
    kernel[(1,)](torch.zeros(1), 63)
    kernel[(1,)](torch.zeros(1), n=63)
    assert [launch["x"] for launch in fake.launches] == [("tensor", (1000,))] * 3 + [("tensor", (1,))] * 2
    assert all(launch["n"] == 63 for launch in fake.launches)
    (named,) = asked
    assert named["x"].shape == (1,) and named["n"] == 63
    assert kernel.records[-1].key.bucket == 1, "the key is the live call's"


def test_tune_args_keep_restored_values_right(sm_120):
    stand_in = torch.zeros(7)
    fake = FakeKernel(shape, on_launch=lambda values: values["x"].add_(1))
    kernel = tuned(fake, tune_args=lambda named: {"x": stand_in}, restore_value=["x"])
    x = torch.zeros(63)
    kernel[(1,)](x, 63)
    assert torch.equal(x, torch.ones(63)) and torch.equal(stand_in, torch.zeros(7))


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (None, TypeError, "shape: tune_args returned NoneType; allowed: a dict"),
        ([("x", 1)], TypeError, "shape: tune_args returned list"),
        ({"y": 1}, ValueError, "shape: tune_args replaces 'y', not an argument; arguments: x, n, BLOCK"),
    ],
)
def test_tune_args_that_return_something_else_are_an_error_that_says_what_is_allowed(sm_120, returned, error, text):
    kernel = tuned(tune_args=lambda named: returned)
    with pytest.raises(error, match=text):
        kernel[(1,)](None, 63)
    assert kernel.fn.launches == [] and kernel.cache == {}


def test_tune_args_that_raise_reach_the_caller_as_they_are(sm_120):
    def broken(named):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tuned(tune_args=broken)[(1,)](None, 63)


# ---- a whole operation ----------------------------------------------------------------------------------------------


def test_timed_call_is_what_is_timed_in_place_of_the_launch(sm_120):
    ran = []

    def whole(named, config):
        return lambda: ran.append((named["n"], config.kwargs["BLOCK"]))

    fake = FakeKernel(shape)
    kernel = tuned(fake, timed_call=whole, do_bench=lambda run, quantiles: run() or float(ran[-1][1]))
    kernel[(1,)](None, 63)
    assert ran == [(63, 4), (63, 2), (63, 8)]
    assert [launch["BLOCK"] for launch in fake.launches] == [2], "only the caller's own launch"


def test_timed_call_sees_the_representative_arguments(sm_120):
    seen = []
    kernel = tuned(
        tune_args=lambda named: {"x": torch.zeros(1000)},
        timed_call=lambda named, config: lambda: seen.append(named["x"].shape[0]),
        do_bench=lambda run, quantiles: run() or 1.0,
    )
    kernel[(1,)](torch.zeros(1), 63)
    assert seen == [1000] * 3


def test_a_timed_call_that_fails_for_one_config_costs_that_config_alone(sm_120):
    def whole(named, config):
        if config.kwargs["BLOCK"] == 4:
            raise RuntimeError("no scratch for 4")
        return lambda: None

    kernel = tuned(timed_call=whole, do_bench=lambda run, quantiles: run() or 1.0)
    kernel[(1,)](None, 63)
    assert outcomes(kernel)[4] is Outcome.LAUNCH_FAILED
    assert kernel.best_config.kwargs["BLOCK"] == 2


def test_a_timed_call_that_returns_no_callable_is_an_error_that_says_what_is_allowed(sm_120):
    kernel = tuned(timed_call=lambda named, config: 3.0)
    with pytest.raises(TypeError, match="shape: timed_call returned float; allowed: a callable"):
        kernel[(1,)](None, 63)
    assert kernel.cache == {}


def test_values_are_reset_and_restored_around_a_timed_call_too(sm_120):
    x = torch.zeros(7)
    kernel = tuned(
        timed_call=lambda named, config: lambda: named["x"].add_(1), restore_value=["x"],
        do_bench=lambda run, quantiles: run() or 1.0,
    )  # fmt: skip
    kernel[(1,)](x, 63)
    assert torch.equal(x, torch.zeros(7))
