"""A call as data: from the arguments to JSON, from JSON to the very same binary."""

from __future__ import annotations

import json

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from smart_autotune import replay
from smart_autotune.checks import innermost
from smart_autotune.replay import Binder, NotReplayable
from support import recorded_kernels as kernels
from support.kernels import fresh, scaled_copy

SM_90 = GPUTarget("cuda", 90, 32)


def through_json(recipe, jit):
    return replay.decode(json.loads(json.dumps(replay.encode(recipe, jit.arg_names))), jit.arg_names)


def odd_values(bias=None, **changed):
    values = {
        "x": torch.zeros(64), "y": torch.zeros(64, dtype=torch.float16), "bias": bias, "n": 64, "one": 1, "scale": 0.5,
        "pair": (3, 4), "OP": kernels.doubled, "DTYPE": tl.float16, "FACTOR": 1.5, "SIZES": (1, 16), "NAME": "a name",
        "BLOCK": 64,
    }  # fmt: skip
    return {**values, **changed}


def copied(n=1000, dtype=torch.float32, **options):
    return {"x": torch.zeros(n, dtype=dtype), "y": torch.zeros(n), "n": n, "scale": 2.0, "BLOCK": 64, **options}


def unaligned(n):
    return {**copied(n), "x": torch.zeros(n + 1)[1:]}


def with_descriptor():
    base = torch.zeros(128, 64, dtype=torch.float16)
    return {"a_desc": TensorDescriptor.from_tensor(base, [64, 64]), "c_ptr": base, "M": 128, "BLOCK_M": 64,
            "BLOCK_K": 64}  # fmt: skip


CALLS = {
    "plain": (scaled_copy, copied()),
    "another dtype": (scaled_copy, copied(dtype=torch.bfloat16)),
    "not aligned, not divisible": (scaled_copy, unaligned(1001)),
    "an int that is 1": (scaled_copy, copied(1)),
    "an int of 64 bits": (scaled_copy, copied() | {"n": 1 << 40}),
    "launch options": (scaled_copy, copied(num_warps=8, num_stages=2, num_ctas=2, maxnreg=64, enable_fp_fusion=False)),
    "constants of many types": (innermost(kernels.odd), odd_values()),
    "a tensor where there was None": (innermost(kernels.odd), odd_values(bias=torch.zeros(64))),
    "another function": (innermost(kernels.odd), odd_values(OP=tl.sigmoid)),
    "a named tuple, an enumeration": (
        innermost(kernels.odd), odd_values(SIZES=kernels.Pair(1, 16), NAME=kernels.Mode.ADD),
    ),
    "a descriptor": (innermost(kernels.described), with_descriptor()),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_comes_back_compiles_to_what_triton_itself_compiles(sm_90, name):
    jit, values = CALLS[name]
    jit = fresh(jit)
    options = {key: value for key, value in values.items() if key not in jit.arg_names}
    arguments = {key: value for key, value in values.items() if key in jit.arg_names}
    own = jit.run(**arguments, **options, grid=(1,), warmup=True)
    again = through_json(Binder(jit, SM_90).recipe((), values), jit).compile(jit, SM_90)
    assert again.hash == own.hash
    assert (again.metadata.shared, again.asm["ptx"]) == (own.metadata.shared, own.asm["ptx"])


def test_positional_and_keyword_arguments_make_one_recipe():
    values = copied()
    arguments = [values[name] for name in scaled_copy.arg_names]
    binder = Binder(scaled_copy, SM_90)
    assert binder.recipe(arguments, {}) == binder.recipe((), values)


def test_the_recipe_of_one_gpu_compiles_for_another():
    jit = kernels.product
    a = torch.zeros(64, 64, dtype=torch.float16)
    values = {"a": a, "b": a, "c": torch.zeros(64, 64), "stride_a": 64, "stride_b": 64, "K": 64}
    recipe = Binder(jit, SM_90).recipe((), {**values, "BM": 64, "BN": 64, "BK": 64, "num_stages": 3})
    needs = [recipe.compile(jit, GPUTarget("cuda", arch, 32)).metadata.shared for arch in (90, 120)]
    assert needs == [49_152, 32_768]


def test_no_data_of_a_tensor_is_in_it():
    text = json.dumps(replay.encode(Binder(scaled_copy, SM_90).recipe((), copied()), scaled_copy.arg_names))
    assert json.loads(text)["signature"]["x"] == "*fp32"
    assert "tensor" not in text and "1000" not in text and "2.0" not in text


# ---- values ----------------------------------------------------------------------------------------------------------

VALUES = [
    None, True, False, 0, -3, 1 << 70, "", "text", 0.1, float("inf"), float("-0.0"), (), (1, (2.0, "x")), [1, [2]],
    {"a": 1, 2: None}, tl.float8e4nv, tl.int64, torch.bfloat16, kernels.Mode.MULTIPLY, kernels.Pair(1, 2),
    kernels.doubled, tl.sigmoid,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_equal_and_of_its_type(value):
    back = replay.unplain(json.loads(json.dumps(replay.plain(value))))
    assert back == value and type(back) is type(value)
    assert repr(back) == repr(value)


def test_a_constexpr_comes_back_as_one():
    back = replay.unplain(replay.plain(tl.constexpr(4)))
    assert isinstance(back, tl.constexpr) and back.value == 4


def test_not_a_number_comes_back():
    assert repr(replay.unplain(json.loads(json.dumps(replay.plain(float("nan")))))) == "nan"


@pytest.mark.parametrize("value", [object(), torch.zeros(2), {1, 2}, b"x", lambda: 1, (1, object())], ids=type)
def test_a_value_without_a_lasting_text_is_named_by_its_type_alone(value):
    with pytest.raises(NotReplayable) as caught:
        replay.plain(value)
    assert "0x" not in str(caught.value) and "tensor(" not in str(caught.value)


def test_a_constant_that_cannot_be_written_is_named():
    recipe = replay.Recipe({"x": "*fp32"}, {(0,): object()}, {}, {})
    with pytest.raises(NotReplayable, match=r"constant x is a builtins\.object"):
        replay.encode(recipe, ["x"])


BAD_VALUES = [
    1.5, [], {}, {"a": 1, "b": 2}, {"tensor": 1}, {"float": "x"}, {"float": None}, {"dtype": "fp33"}, {"dtype": 5},
    {"torch_dtype": "nn"}, {"torch_dtype": "no_such"}, {"function": ["os", "system"]}, {"function": "x"},
    {"function": ["no_such_module_here", "f"]}, {"enum": ["os", "system", "x"]}, {"namedtuple": ["os", "system", []]},
    {"namedtuple": ["builtins", "tuple", [1]]}, {"tuple": 5}, {"list": [[]]}, {"dict": [1]}, {"enum": []},
    {"namedtuple": ["support.recorded_kernels", "Pair", [1]]}, {"function": ["", ""]}, {"function": [1, 2]},
]  # fmt: skip


@pytest.mark.parametrize("raw", BAD_VALUES, ids=repr)
def test_a_value_of_a_record_that_is_none_is_refused_in_one_line(raw):
    with pytest.raises(NotReplayable) as caught:
        replay.unplain(raw)
    assert str(caught.value) and "\n" not in str(caught.value)


# ---- records ---------------------------------------------------------------------------------------------------------

GOOD = {"signature": {"x": "*fp32", "n": "i32"}, "constants": {}, "attributes": {}, "options": {}}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (None, "signature is NoneType"),
        ({}, "signature is NoneType"),
        ({**GOOD, "constants": []}, "constants is list"),
        ({**GOOD, "signature": {"x": "*fp32"}}, "other arguments than the recorded one: n"),
        ({**GOOD, "signature": {"x": "*fp32", "n": "i32", "m": "i32"}}, "other arguments than the recorded one: m"),
        ({**GOOD, "constants": {"y": 1}}, "no argument 'y'"),
        ({**GOOD, "constants": {"x.-1": 1}}, "no argument 'x.-1'"),
        ({**GOOD, "attributes": {"x": 5}}, "attributes of an argument are int"),
    ],
)
def test_a_recipe_that_does_not_go_with_the_kernel_is_refused(raw, text):
    with pytest.raises(NotReplayable, match=text):
        replay.decode(raw, ["x", "n"])


def test_what_recipes_share_is_taken_out_and_put_back():
    first = {**GOOD, "constants": {"A": 1, "B": 2}, "options": {"num_warps": 4}}
    second = {**GOOD, "constants": {"A": True, "B": 2, "C": 3}, "options": {"num_warps": 8}}
    shared = replay.common([first, second])
    assert shared["constants"] == {"B": 2} and shared["options"] == {} and shared["signature"] == GOOD["signature"]
    owns = [replay.without(recipe, shared) for recipe in (first, second)]
    assert owns[0] == {"constants": {"A": 1}, "options": {"num_warps": 4}}
    assert [replay.merged(shared, own) for own in owns] == [first, second]
    assert replay.merged(shared, owns[1])["constants"]["A"] is True


def test_an_interpreted_function_cannot_be_recorded():
    with pytest.raises(NotReplayable, match="TRITON_INTERPRET"):
        replay.with_jit_replaced(lambda: None, lambda jit: jit)


def test_wrappers_stay_and_the_wrapped_is_not_touched():
    heuristic = triton.heuristics({"BLOCK": lambda args: 64})(scaled_copy)
    twin = replay.with_jit_replaced(heuristic, lambda jit: "stand-in")
    assert twin.fn == "stand-in" and twin.values == heuristic.values and heuristic.fn is scaled_copy
