"""What a tuning says of its inputs."""

from __future__ import annotations

import logging

import pytest
import torch
import triton

from smart_autotune import smart_autotune
from support.fake_kernel import FakeKernel


def decode(q, seq_lens, prefix_lens, n, BLOCK=1):
    """q[batch, 1] · seq_lens, prefix_lens [batch]."""


def tuned(**options):
    fake = FakeKernel(decode)
    configs = [triton.Config({"BLOCK": size}) for size in (4, 2)]
    return smart_autotune(configs=configs, key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]), **options)(fake)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def launch(kernel, seq_lens, prefix_lens=None, n=63):
    kernel[(1,)](torch.zeros(3, 1), seq_lens, prefix_lens, n)


def lengths(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dummy", [lengths(1, 1, 1), lengths(0, 0, 0)])
def test_tuned_on_a_warm_ups_dummy_lengths_is_a_warning_once_a_kernel_and_in_each_record(sm_120, caplog, dummy):
    kernel = tuned()
    for n in (63, 64):
        launch(kernel, dummy, n=n)
    assert warnings_in(caplog) == [
        "decode: tuned while seq_lens held only 0 or 1: a warm-up's dummy input? give tune_args="
    ]
    assert all("seq_lens held only 0 or 1" in record.notes[0] for record in kernel.records)


@pytest.mark.parametrize(
    "real",
    [
        lengths(1, 1, 2),
        lengths(7, 7, 7),
        lengths(1, 1, 1, dtype=torch.int64),
        torch.ones(3, 1, dtype=torch.int32),
        torch.ones((1 << 16) + 1, dtype=torch.int32),
        torch.ones(0, dtype=torch.int32),
        None,
    ],
    ids=["one differs", "seven", "int64", "two dimensions", "too many to look at", "empty", "none"],
)
def test_other_lengths_are_none(sm_120, caplog, real):
    kernel = tuned()
    launch(kernel, real)
    assert warnings_in(caplog) == [] and kernel.records[0].notes == ()


def test_an_empty_cached_prefix_is_a_real_call(sm_120, caplog):
    launch(tuned(), lengths(5, 6, 7), prefix_lens=lengths(0, 0, 0))
    assert warnings_in(caplog) == []


def test_with_tune_args_nothing_is_said_of_the_live_lengths(sm_120, caplog):
    launch(tuned(tune_args=lambda named: {"seq_lens": lengths(9, 8, 7)}), lengths(1, 1, 1))
    assert warnings_in(caplog) == []
