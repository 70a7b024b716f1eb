"""The timer against a simulated device: a host's clock, a device's, and a host that is held up between two calls."""

from __future__ import annotations

import itertools
import types

import pytest

from smart_autotune import gpu_bench
from smart_autotune.gpu_bench import ATTEMPTS, FIRST_SAMPLES, GpuTimer, Run

CALL_US = 5.0  # what any call into the driver costs the host
FLUSH_US = 20.0


class Device:
    """In microseconds: ``now`` is the host's clock, ``free`` when the device will have done what it was given."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def enqueue(self, device_us: float) -> None:
        self.now += CALL_US
        self.free = max(self.now, self.free) + device_us

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.enqueue(0.0)
        self.reached = self._device.free

    def query(self) -> bool:
        return self.reached <= self._device.now

    def elapsed_time(self, end: Event) -> float:
        return (end.reached - self.reached) / 1e3


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(gpu_bench, "_event", device.event)
    monkeypatch.setattr(gpu_bench, "_sleep", lambda cycles: device.enqueue(cycles / gpu_bench.CYCLES_PER_MS * 1e3))
    monkeypatch.setattr(gpu_bench.torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(
        gpu_bench, "flush_buffer", lambda: types.SimpleNamespace(zero_=lambda: device.enqueue(FLUSH_US))
    )
    clock = types.SimpleNamespace(perf_counter=lambda: device.now / 1e6, monotonic=lambda: device.now / 1e6)
    monkeypatch.setattr(gpu_bench, "time", clock)
    return device


def run_of(device: Device, device_us: float, held_up_us=lambda: 0.0, waits: bool = False) -> Run:
    def launch():
        device.now += held_up_us()
        device.enqueue(device_us)
        if waits:
            device.synchronize()

    return Run(launch)


def test_a_sample_is_the_devices_time_alone(device):
    run = run_of(device, 24.0)
    GpuTimer().screen(run)
    assert run.samples_us == pytest.approx([24.0] * FIRST_SAMPLES)


def test_a_host_held_up_while_others_compile_is_in_no_sample_and_the_fast_config_is_not_lost(device):
    compiling = [True]
    held_up = run_of(device, 24.0, held_up_us=lambda: 5_000.0 if compiling[0] and next(turns) % 2 else 0.0)
    turns = itertools.count()
    others = [run_of(device, us) for us in (30.0, 33.0, 200.0)]
    timer = GpuTimer()
    for run in (held_up, *others):
        timer.screen(run)
    compiling.clear()
    compiling.append(False)
    timer.decide([held_up, *others])
    assert held_up.median_us == pytest.approx(24.0)
    assert max(held_up.samples_us) == pytest.approx(24.0)
    assert len(held_up.samples_us) > FIRST_SAMPLES  # it stayed in for the later rounds
    assert others[2].samples_us == pytest.approx([200.0] * FIRST_SAMPLES)  # out after the first


def test_a_host_that_stays_slow_is_outwaited(device):
    """Two threads that never rest: every other launch is held up, also while the choice is made."""
    turns = itertools.count()
    run = run_of(device, 24.0, held_up_us=lambda: 5_000.0 if next(turns) % 2 else 0.0)
    other = run_of(device, 26.0)
    timer = GpuTimer()
    timer.screen(run)
    timer.screen(other)
    timer.decide([run, other])
    assert max(run.samples_us) == pytest.approx(24.0)
    assert max(other.samples_us) == pytest.approx(26.0)
    assert not run.waits


def test_one_slow_launch_does_not_make_all_later_waits_long(device):
    turns = itertools.count()
    run = run_of(device, 24.0, held_up_us=lambda: 20_000.0 if next(turns) == 1 else 0.0)
    other = run_of(device, 24.0)
    timer = GpuTimer()
    timer.screen(run)
    timer.screen(other)
    begin = device.now
    timer.decide([run, other])
    assert len(run.samples_us) == gpu_bench.ROUNDS[-1][1]
    assert device.now - begin < 20_000.0


def test_an_operation_that_waits_for_the_device_is_timed_as_it_is(device):
    """Its samples can never be enqueued ahead: kept at the last attempt, and from then on at the first."""
    launches = itertools.count()
    run = run_of(device, 100.0, held_up_us=lambda: next(launches) * 0.0, waits=True)
    other = run_of(device, 101.0, waits=True)
    timer = GpuTimer()
    for one in (run, other):
        timer.screen(one)
        assert one.samples_us == []
    timer.decide([run, other])
    assert run.waits and len(run.samples_us) == gpu_bench.ROUNDS[-1][1]
    assert min(run.samples_us) >= 100.0
    screened = 2 + FIRST_SAMPLES
    assert next(launches) == screened + ATTEMPTS * FIRST_SAMPLES + len(run.samples_us) - FIRST_SAMPLES


def test_nothing_to_decide_is_no_error(device):
    GpuTimer().decide([])
