"""What one block may use: by arch name without a driver, by device from the driver."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
import triton
from hypothesis import strategies as st
from triton.backends.nvidia.driver import CudaDriver

from smart_autotune import limits, settings

# Opt-in shared memory per block in bytes, as the CUDA programming guide gives it by compute capability.
PUBLISHED = {
    "sm_70": 98_304,
    "sm_75": 65_536,
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_87": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
    "sm_121": 101_376,
}


class CountingDriver:
    """A driver that counts how often it is asked. Each device has its own cap."""

    def __init__(self, arch: int | str = 90, shared_bytes: int = 232_448, warp_size: int = 32) -> None:
        self.target = SimpleNamespace(arch=arch, warp_size=warp_size)
        self.shared_bytes = shared_bytes
        self.asked: list[int] = []

    @property
    def utils(self) -> CountingDriver:  # no attribute: a cycle would keep a dead driver's address in use
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        self.asked.append(device)
        return {"max_shared_mem": self.shared_bytes + device, "multiprocessor_count": 132}

    def get_current_target(self) -> Any:
        return self.target


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    limits._of_device.clear()


# ---- by arch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", PUBLISHED)
def test_the_cap_of_each_arch_is_the_published_one(arch: str) -> None:
    found = limits.of_arch(arch)
    assert (found.arch, found.shared_bytes, found.what_if) == (arch, PUBLISHED[arch], False)


def test_every_arch_of_the_table_is_checked_here() -> None:
    assert limits.SHARED_BYTES_BY_ARCH == PUBLISHED


@pytest.mark.blackwell
def test_a_higher_arch_number_does_not_mean_more_shared_memory() -> None:
    assert limits.of_arch("sm_120").shared_bytes < limits.of_arch("sm_90").shared_bytes


@pytest.mark.parametrize("arch", PUBLISHED)
def test_threads_and_tensor_memory_are_the_same_everywhere(arch: str) -> None:
    found = limits.of_arch(arch)
    assert (found.threads, found.tensor_columns, found.warp_size) == (1024, 512, 32)


@pytest.mark.parametrize(
    ("given", "near"),
    [("sm120", "sm_120"), ("120", "sm_120"), ("sm_91", "sm_90"), ("SM_90", "sm_90"), ("sm90", "sm_90")],
)
def test_an_unknown_arch_is_refused_with_a_near_match_and_the_known_ones(given: str, near: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(given))) as caught:
        limits.of_arch(given)
    assert f"did you mean {near}?" in str(caught.value)
    assert str(caught.value).endswith("known: " + ", ".join(PUBLISHED))


@pytest.mark.parametrize("given", ["hopper", "", "gfx942"])
def test_an_arch_like_no_other_is_refused_without_a_guess(given: str) -> None:
    with pytest.raises(ValueError, match="known: sm_70, ") as caught:
        limits.of_arch(given)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(("arch", "name"), [(120, "sm_120"), (90, "sm_90"), ("gfx942", "gfx942")])
def test_an_arch_name_is_made_of_tritons_target(arch: int | str, name: str) -> None:
    assert limits.arch_name(arch) == name


# ---- by device -----------------------------------------------------------------------------------------------------


def test_the_driver_is_asked_once_for_each_device() -> None:
    driver = CountingDriver()
    for _ in range(3):
        for device in (0, 1):
            assert limits.of_device(driver, device).shared_bytes == 232_448 + device
    assert driver.asked == [0, 1]


def test_the_cap_comes_from_the_driver_not_from_a_table() -> None:
    assert limits.of_device(CountingDriver(arch=90, shared_bytes=111), 0).shared_bytes == 111


def test_a_device_of_an_arch_that_no_table_has_is_fine() -> None:
    found = limits.of_device(CountingDriver(arch="gfx942", shared_bytes=65_536, warp_size=64), 0)
    assert (found.arch, found.shared_bytes, found.warp_size) == ("gfx942", 65_536, 64)
    assert found.multiprocessors == 132


def test_two_drivers_do_not_share_their_answers() -> None:
    hopper, blackwell = CountingDriver(90), CountingDriver(120, 101_376)
    assert limits.of_device(hopper, 0).arch == "sm_90"
    assert limits.of_device(blackwell, 0).arch == "sm_120"
    assert limits.of_device(hopper, 0).arch == "sm_90"


def test_a_new_driver_at_a_dead_ones_address_is_asked_itself() -> None:
    for arch in (90, 120, 80, 89) * 10:
        driver = CountingDriver(arch, shared_bytes=arch)
        found = limits.of_device(driver, 0)
        assert (found.arch, found.shared_bytes) == (f"sm_{arch}", arch)
        del driver


class Cuda(CudaDriver):  # type: ignore[misc]  # triton is untyped
    """Triton's CUDA driver on a machine without one; what it is asked is noted."""

    def __init__(self) -> None:
        self.utils = CountingDriver(shared_bytes=111)

    def get_current_target(self) -> Any:
        return SimpleNamespace(arch=90, warp_size=32)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """The limits that Triton and torch know of its device 0 already."""
    monkeypatch.setattr(limits, "max_shared_mem", {0: 232_448}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: SimpleNamespace(multi_processor_count=78)}.__getitem__)
    return Cuda()


def test_on_cuda_what_triton_and_torch_know_is_not_asked_again(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", cuda)
    assert limits.of_device(cuda, 0) == limits.DeviceLimits("sm_90", 232_448, multiprocessors=78)
    assert cuda.utils.asked == []


def test_a_cuda_driver_that_is_not_the_active_one_is_asked_itself(cuda: Cuda, sm_120: Any) -> None:
    assert limits.of_device(cuda, 0) == limits.DeviceLimits("sm_90", 111, multiprocessors=132)
    assert cuda.utils.asked == [0]


# ---- what if -------------------------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None)
@hypothesis.given(cap=st.integers(1, 300_000), arch=st.sampled_from(sorted(PUBLISHED)))
def test_the_what_if_cap_only_lowers(cap: int, arch: str) -> None:
    with settings.override(shared_bytes_cap=cap):
        found = limits.of_arch(arch)
    assert found.shared_bytes == min(cap, PUBLISHED[arch])
    assert found.what_if == (cap < PUBLISHED[arch])


def test_a_what_if_cap_equal_to_the_devices_is_no_what_if() -> None:
    with settings.override(shared_bytes_cap=232_448):
        assert limits.of_arch("sm_90") == limits.DeviceLimits("sm_90", 232_448, what_if=False)


def test_limits_are_not_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.of_arch("sm_90").shared_bytes = 1  # type: ignore[misc]


def test_the_what_if_cap_holds_for_its_scope_and_asks_the_driver_no_more() -> None:
    driver = CountingDriver()
    seen = [limits.of_device(driver, 0)]
    with settings.override(shared_bytes_cap=101_376):
        seen.append(limits.of_device(driver, 0))
    seen.append(limits.of_device(driver, 0))
    assert [(found.shared_bytes, found.what_if) for found in seen] == [
        (232_448, False),
        (101_376, True),
        (232_448, False),
    ]
    assert driver.asked == [0]


def test_the_what_if_cap_changes_nothing_else() -> None:
    plain = limits.of_arch("sm_90")
    with settings.override(shared_bytes_cap=1):
        lowered = limits.of_arch("sm_90")
    assert (lowered.arch, lowered.threads, lowered.tensor_columns) == (plain.arch, plain.threads, plain.tensor_columns)
