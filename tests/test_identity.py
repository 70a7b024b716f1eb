"""Keys and environment as text: equal where, and only where, one ranking may serve both."""

from __future__ import annotations

import enum
import subprocess
import sys
import threading

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from smart_autotune import identity, settings
from smart_autotune.identity import CannotBeWritten, canonical, plain
from support.kernels import scaled_copy
from support.stored import key

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner).map(tuple) | st.lists(inner), max_leaves=8)


class Color(enum.Enum):
    RED = 1


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError


class Named(str, enum.Enum):
    RED = "red"


def same(one: object, other: object) -> bool:
    """Equal in value and in type, all the way down."""
    if isinstance(one, (tuple, list)) and type(one) is type(other) and len(one) == len(other):
        return all(same(*pair) for pair in zip(one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(VALUES, VALUES)
def test_two_values_have_one_text_exactly_when_they_are_the_same(one: object, other: object) -> None:
    assert (canonical(plain(one)) == canonical(plain(other))) == same(one, other)


def test_one_and_true_and_text_and_float_are_four_values() -> None:
    assert len({canonical(plain(value)) for value in (1, True, "1", 1.0, (1,), [1], "true", None, "null")}) == 9


@pytest.mark.parametrize("value", [torch.float16, tl.float32, Color.RED, Named.RED, tl.constexpr(3), torch.Size([2])])
def test_a_value_that_says_what_it_is_can_be_written(value: object) -> None:
    assert canonical(plain(value))


@pytest.mark.parametrize("value", [object(), lambda: 0, plain, threading.Lock().acquire, (1, object())], ids=str)
def test_a_value_whose_text_holds_an_address_cannot(value: object) -> None:
    with pytest.raises(CannotBeWritten):
        plain(value)
    assert identity.key_text(key(value, type(value).__name__)) is None
    assert identity.file_name(key(value, type(value).__name__)) is None


def test_a_value_that_cannot_even_be_shown_cannot_be_written() -> None:
    with pytest.raises(CannotBeWritten):
        plain(Shy())


def test_a_jit_function_is_written_as_its_source_hash() -> None:
    assert plain(scaled_copy) == {"JITFunction": scaled_copy.cache_key}


def test_a_file_name_is_readable_and_the_same_each_time() -> None:
    name = identity.file_name(key())
    assert name is not None and name.startswith("decode-") and len(name) == len("decode-.json") + 20
    assert identity.file_name(key()) == name


@pytest.mark.parametrize("kernel", ["m.outer.<locals>.kérnel", "m.../../etc/passwd", "", "m." + "k" * 500, "m.\x00\n"])
def test_any_kernel_name_makes_one_plain_file_name(kernel: str) -> None:
    name = identity.file_name(key()._replace(kernel=f"{kernel}@00"))
    assert name is not None and name == identity.slug(name) and "/" not in name and len(name) < 120


@pytest.mark.parametrize(
    "other",
    [
        key(513), key("512"), key(True), key(512, "bool"), key(bucket=32), key(bucket=None),
        key()._replace(kernel="package.module.decode@0123456789abcdee"),
        key()._replace(kernel="package.other.decode@0123456789abcdef"),
        key()._replace(device=(("arch", "sm_90"), ("shared_bytes", 101_376), ("multiprocessors", 132))),
        key()._replace(dtypes=(("q", "torch.float16"), ("idx", "torch.int32"))),
    ],
)  # fmt: skip
def test_a_part_that_differs_is_another_file_and_is_named(other: object) -> None:
    assert identity.file_name(other) != identity.file_name(key())  # type: ignore[arg-type]
    assert len(identity.differences(identity.key_parts(key()), identity.key_parts(other))) == 1  # type: ignore[arg-type]


def test_the_settings_that_matter_are_part_of_it_and_others_are_not() -> None:
    name = identity.file_name(key())
    for change in ({"bench": "graph"}, {"budget_secs": 5.0}, {"compile_timeout_secs": 5.0}):
        with settings.override(**change):
            assert identity.file_name(key()) != name
    with settings.override(wait_secs=1.0, mode="pinned", strict=False, compile_workers=3):
        assert identity.file_name(key()) == name


def test_switches_of_triton_that_change_the_code_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = identity.file_name(key())
    for variable in ("TRITON_PTXAS_PATH", "DISABLE_LLVM_OPT", "TRITON_DEFAULT_FP_FUSION"):
        with monkeypatch.context() as scope:
            scope.setenv(variable, "1")
            assert identity.file_name(key()) != name, variable
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert identity.file_name(key()) == name


def test_versions_are_named() -> None:
    found = identity.environment()
    assert found["triton"] == triton.__version__ and found["torch"] == torch.__version__ and found["driver"]


def test_the_environment_initialises_neither_cuda_nor_the_driver() -> None:
    code = (
        "import torch, triton; from smart_autotune import identity; identity.environment();"
        "assert not torch.cuda.is_initialized(); assert triton.runtime.driver._active is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
