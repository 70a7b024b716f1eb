"""Inside a CUDA graph capture, stood in for by its flag: nothing is timed, what serves is compiled and loaded."""

from __future__ import annotations

import logging

import pytest
import torch
import triton

import smart_autotune as package
from smart_autotune import NoConfigFits, capture, smart_autotune
from support.fake_kernel import FakeKernel
from support.kernels import fresh, tile, tile_arguments, tile_product
from support.stub_driver import capturing


def batched(x, n, BLOCK=1):
    """x[batch, 1]."""


def tuned(fake, time_ms=lambda values: values["BLOCK"], sizes=(4, 2, 8)):
    configs = [triton.Config({"BLOCK": size}) for size in sizes]
    return smart_autotune(configs=configs, key=["n"], do_bench=fake.bench(time_ms))(fake)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_cold_key_in_a_capture_is_served_by_the_first_config_that_fits_loaded_before_its_launch(sm_120, caplog):
    benched = []
    kernel = smart_autotune(
        configs=[tile(8), tile(3), tile(2)], key=[], do_bench=lambda run, quantiles: benched.append(1) or run() or 1.0
    )(fresh(tile_product))
    order = []
    load, launched = sm_120.utils.load_binary, sm_120.launches
    sm_120.utils.load_binary = lambda *args: order.append(len(launched)) or load(*args)
    with capturing():
        compiled = kernel[(1,)](*tile_arguments())
        assert compiled.metadata.num_stages == 3
        kernel[(1,)](*tile_arguments())
    assert benched == [] and kernel.cache == {} and kernel.records == []
    assert [launch.metadata.num_stages for launch in launched] == [3, 3]
    assert order == [0], "one module load, before the first launch"
    (text,) = [text for text in warnings_in(caplog) if "cold key" in text]
    assert "tile_product" in text and "captured" in text and "first that fits" in text
    (key,) = kernel.cold_keys()
    assert key in package.cold_keys()
    assert key.describe() in text
    kernel[(1,)](*tile_arguments())
    assert len(benched) == 2 and kernel.cold_keys() == [] and key in kernel.cache


def test_a_cold_key_is_said_once_however_often_it_is_captured_and_again_for_another_key(sm_120, caplog):
    kernel = tuned(FakeKernel(batched))
    with capturing():
        for n in (63, 63, 100, 63):
            kernel[(1,)](None, n)
    assert len(warnings_in(caplog)) == len(kernel.cold_keys()) == 2


def test_in_a_capture_the_nearest_tuned_bucket_serves(sm_120, caplog):
    fastest = {4: 8, 64: 2}
    fake = FakeKernel(batched)
    kernel = tuned(fake, lambda values: abs(values["BLOCK"] - fastest[values["x"][1][0]]) + 1.0)
    for size in (4, 64):
        kernel[(1,)](torch.zeros(size, 1), 63)
    timed = len(kernel.do_bench.timed)
    with capturing():
        kernel[(1,)](torch.zeros(8, 1), 63)
        kernel[(1,)](torch.zeros(100, 1), 63)
    assert [launch["BLOCK"] for launch in fake.launches[-2:]] == [8, 2]
    assert len(kernel.do_bench.timed) == timed
    assert "nearest bucket 4" in warnings_in(caplog)[0] and "nearest bucket 64" in warnings_in(caplog)[1]
    assert sorted(key.bucket for key in kernel.cold_keys()) == [8, 128]


def test_in_a_capture_a_tuned_key_gets_its_best_without_a_word(sm_120, caplog):
    fake = FakeKernel(batched)
    kernel = tuned(fake)
    kernel[(1,)](None, 63)
    with capturing():
        kernel[(1,)](None, 63)
    assert fake.launches[-1]["BLOCK"] == 2 and warnings_in(caplog) == [] and kernel.cold_keys() == []


def test_in_a_capture_another_specialisation_of_a_tuned_key_is_compiled_and_loaded_before_its_launch(sm_120):
    kernel = smart_autotune(
        configs=[tile(8), tile(2)], key=[], batch=None,
        do_bench=lambda run, quantiles: run() or 10.0 - sm_120.launches[-1].metadata.num_stages,
    )(fresh(tile_product))  # fmt: skip
    kernel[(1,)](*tile_arguments(63))
    assert kernel.best_config.num_stages == 8
    with capturing():
        assert kernel[(1,)](*tile_arguments(64)).metadata.num_stages == 2
    assert max(shared for _, shared in sm_120.loaded) <= 101_376


def test_in_a_capture_one_that_nothing_fits_raises_before_the_device_is_touched(sm_120):
    fake = FakeKernel(batched, on_compile=lambda values: 663_808)
    kernel = tuned(fake)
    with capturing(), pytest.raises(NoConfigFits, match="663,808"):
        kernel[(1,)](None, 63)
    assert fake.launches == [] and fake.loads == []


def test_in_a_capture_a_kernel_with_one_config_goes_straight_through(sm_120, caplog):
    fake = FakeKernel(batched)
    kernel = tuned(fake, sizes=(4,))
    with capturing():
        kernel[(1,)](None, 63)
    assert len(fake.launches) == 1 and warnings_in(caplog) == []


def test_the_log_shows_no_value_of_a_tensor(sm_120, caplog):
    class Unprintable(torch.Tensor):
        def __repr__(self, **kwargs):
            raise AssertionError("printing a tensor synchronises")

    caplog.set_level(logging.DEBUG, logger="smart_autotune")
    kernel = tuned(FakeKernel(batched))
    x = torch.zeros(3, 1).as_subclass(Unprintable)
    with capturing():
        kernel[(1,)](x, 63)
    kernel[(1,)](x, 63)
    assert len(caplog.records) > 3 and "float32" in caplog.text
    kernel.explain()


def test_without_cuda_nothing_is_being_captured_and_relaxed_does_nothing():
    assert capture.is_capturing() is False
    with capture.relaxed():
        pass


class FakeCuda:
    """Has the one driver call that ``relaxed`` makes; exchanges modes as the driver does."""

    def __init__(self, status=0):
        self.mode, self.status, self.seen = 0, status, []

    def cuThreadExchangeStreamCaptureMode(self, pointer):
        box = pointer._obj
        if self.status == 0:
            self.mode, box.value = box.value, self.mode
        self.seen.append(self.mode)
        return self.status


def test_relaxed_exchanges_the_capture_mode_and_puts_the_former_one_back_after_an_error(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(capture, "_cuda", lambda: cuda)
    with pytest.raises(RuntimeError), capture.relaxed():
        assert cuda.mode == 2
        raise RuntimeError("in the scope")
    assert cuda.seen == [2, 0]


@pytest.mark.parametrize("known", [True, False])
def test_in_a_capture_every_load_happens_in_relaxed_mode_and_every_launch_in_the_captures_own(
    sm_120, monkeypatch, known
):
    cuda, modes = FakeCuda(), []
    load = sm_120.utils.load_binary
    sm_120.utils.load_binary = lambda *args: modes.append(cuda.mode) or load(*args)
    kernel = smart_autotune(configs=[tile(2), tile(3)], key=[], batch=None)(fresh(tile_product))
    if known:
        kernel[(1,)](*tile_arguments(63))
    modes.clear()
    monkeypatch.setattr(capture, "_cuda", lambda: cuda)
    with capturing():
        kernel[(1,)](*tile_arguments(64))
    assert modes == [2] and cuda.mode == 0


def test_relaxed_leaves_the_mode_alone_when_the_driver_refuses(monkeypatch):
    cuda = FakeCuda(status=3)
    monkeypatch.setattr(capture, "_cuda", lambda: cuda)
    with capture.relaxed():
        pass
    assert cuda.seen == [0]
