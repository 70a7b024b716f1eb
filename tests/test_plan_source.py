"""The generated text: what it reads, compares and passes on."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
import triton

from smart_autotune.batch import BatchRule
from smart_autotune.plan_source import MISSING, NOT_PLANNED, STOCK_JIT_RUN, Source, _device_reader, int_class
from smart_autotune.view import AutotunerView
from support import plan_kernels as kernels
from support.side_by_side import fresh

TENSOR, HOST = ("tensor", torch.Tensor, "is_cuda"), ("tensor", torch.Tensor, "is_cpu")
INT, FLOAT, NONE, CONFIG = ("scalar", int), ("scalar", float), ("scalar", type(None)), ("config",)


def source(kernel: Any, *kinds: Any, key=(), batch=None, buckets="pow2", defaults=None, sizes=(64, 128)) -> Source:
    configs = [triton.Config({"BLOCK": size}) for size in sizes]
    tuner = triton.autotune(configs=configs, key=list(key), do_bench=lambda run, quantiles: [1.0])(fresh(kernel))
    view = AutotunerView(tuner, tuner.run)
    rule = BatchRule("kernel", view.arg_names, view.keys, batch, buckets)
    return Source(view, rule, kinds, defaults or {})


def power_of_2(size: str) -> str:
    return f"({size} - 1).bit_length() if {size} > 0 else 0"


def functions(text: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def line(text: str, start: str, function: str = "launch") -> str:
    body = text[text.index(f"def {function}(") :]
    return next(one.strip() for one in body.splitlines() if one.strip().startswith(start))


def test_pointers_of_a_gpu_are_passed_as_addresses_and_others_as_they_came(sm_120):
    text, _ = source(kernels.copied, TENSOR, HOST, INT, FLOAT, CONFIG).text()
    passed = "x__, y__, z__, stream_of__(device__), *head__, p_src__, dst, n, scale, c_BLOCK__"
    assert line(text, "start__(") == f"start__({passed})"
    guards = line(text, "if not (")
    assert "src.is_cuda" in guards and "dst.is_cpu" in guards


def test_a_gpus_tensor_class_is_read_through_the_generated_function(sm_120, monkeypatch):
    """A class that is no tensor at all, to see which attributes are asked for."""

    class Pointer:
        is_cuda, dtype, address = True, torch.float16, 4096

        def data_ptr(self) -> int:
            return self.address

    made = source(kernels.copied, ("tensor", Pointer, "is_cuda"), ("tensor", Pointer, "is_cuda"), INT, FLOAT, CONFIG)
    text, names = made.text()
    launched: list[Any] = []
    config = triton.Config({"BLOCK": 64})
    exec(text, names)
    jit = names["jit__"]
    src, dst = Pointer(), Pointer()
    dst.address = 4104
    key = names["key_of"](src, dst, 5, scale=2.0)
    assert key == (0, torch.float16, True, torch.float16, False, 0)
    plan = (lambda *args: launched.append(args), ("head",), "kernel", config, (64,), jit.device_caches[0])
    names["plans__"] = {key: plan}
    assert names["launch"](src, dst, 7, 2.0, grid=lambda meta: (meta["BLOCK"], meta["n"])) == "kernel"
    assert launched == [(64, 7, 1, 0, "head", 4096, 4104, 7, 2.0, 64)]
    for other in (Pointer(), Pointer()):
        other.is_cuda = False
        assert names["launch"](src, other, 7, 2.0, grid=(1,)) is NOT_PLANNED
    assert names["launch"](src, dst, 16, 2.0, grid=(1,)) is NOT_PLANNED
    assert names["launch"](src, dst, 7, 2, grid=(1,)) is NOT_PLANNED
    assert names["launch"](src, dst, 7, 2.0, BLOCK=64, grid=(1,)) is NOT_PLANNED
    assert names["launch"](src, dst, 7, 2.0, grid=(1,), warmup=True) is NOT_PLANNED
    assert len(launched) == 1


@pytest.mark.parametrize("kernel", [kernels.nothing, kernels.colliding, kernels.builtins, kernels.copied])
def test_no_name_of_ours_can_be_an_arguments(sm_120, kernel):
    kinds = [CONFIG if name == "BLOCK" else INT for name in kernel.arg_names]
    text, names = source(kernel, *kinds).text()
    assert all(name.endswith("__") for name in names)
    for function in functions(text).values():
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert {name for name in used if not name.endswith("__")} <= {*kernel.arg_names, "grid", "warmup"}
        own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert not own & set(kernel.arg_names)


def test_a_call_and_its_key_have_the_same_signature_guards_and_key(sm_120):
    text, _ = source(kernels.copied, TENSOR, TENSOR, INT, FLOAT, CONFIG, key=["n"], batch="src").text()
    made = functions(text)
    assert ast.dump(made["launch"].args) == ast.dump(made["key_of"].args)
    for count, statement in enumerate(made["key_of"].body[:-1]):
        assert ast.dump(statement) == ast.dump(made["launch"].body[count])


@pytest.mark.parametrize(
    "options, kinds, part",
    [
        ({}, (TENSOR, TENSOR, INT), None),
        ({"batch": "src"}, (TENSOR, TENSOR, INT), power_of_2("src.size(0)")),
        ({"batch": ("dst", 1)}, (TENSOR, TENSOR, INT), power_of_2("dst.size(1)")),
        ({"batch": "src"}, (NONE, TENSOR, INT), None),
        ({"batch": "auto"}, (NONE, TENSOR, INT), power_of_2("dst.size(0)")),
        ({"batch": "auto"}, (NONE, NONE, INT), None),
        ({"batch": "n", "buckets": [1, 8]}, (TENSOR, TENSOR, INT), "bucket_of__(n)"),
        ({"batch": "auto", "key": ["n"]}, (HOST, TENSOR, INT), power_of_2("src.size(0)")),
    ],
)  # fmt: skip
def test_the_batch_part_is_read_where_the_rule_finds_it(sm_120, options, kinds, part):
    text, _ = source(kernels.copied, *kinds, FLOAT, CONFIG, **options).text()
    key = line(text, "key__ =")
    assert part in key if part else "bit_length" not in key and "bucket_of__" not in key
    if part and part.startswith("("):
        name, dim = part[1:].split(".size(")[0], part.split("size(")[1][0]
        assert f"{name}.dim() > {dim}" in line(text, "if not (")


def test_defaults_stand_in_the_signature_and_what_is_not_passed_is_seen(sm_120):
    text, names = source(kernels.copied, TENSOR, TENSOR, INT, FLOAT, CONFIG, defaults={"n": 7}).text()
    arguments = functions(text)["launch"].args
    found = dict(zip((a.arg for a in arguments.args), (names[ast.unparse(d)] for d in arguments.defaults)))
    assert found == {"src": MISSING, "dst": MISSING, "n": 7, "scale": MISSING, "BLOCK": MISSING}


def test_only_kernels_that_read_globals_pay_for_their_check(sm_120):
    assert "used_global_vals" not in source(kernels.copied, TENSOR, TENSOR, INT, FLOAT, CONFIG).text()[0]
    made = source(kernels.uses_a_global, TENSOR, INT, CONFIG)
    assert made._jit.cache_key  # collects the globals, as the compile does
    assert "used_global_vals" in made.text()[0]


LIMITS = sorted(
    {0, 1, 2, 15, 16, 17}
    | {sign * 2**bits + off for sign in (1, -1) for bits in (4, 31, 32, 63, 64) for off in (-16, -1, 0, 1, 16)}
)


def test_ints_of_one_class_are_specialised_alike_by_triton():
    specialise = triton.runtime.jit.native_specialize_impl
    classes: dict[int, set[Any]] = {}
    for value in LIMITS:
        try:
            told = specialise(triton.backends.compiler.BaseBackend, value, False, True, True)
        except OverflowError:
            told = "refused"
        classes.setdefault(int_class(value), set()).add(told)
    assert all(len(told) == 1 for told in classes.values()), classes
    inlined = {value: (0 if value & 15 else 1) for value in LIMITS if 1 < value <= 2**31 - 1}
    assert all(int_class(value) == found for value, found in inlined.items())


def test_the_device_is_read_without_torchs_wrapper_only_where_it_is_torchs():
    class Driver:
        get_current_device = staticmethod(torch.cuda.current_device)

    assert _device_reader(Driver()) is getattr(torch._C, "_cuda_getDevice", None)
    Driver.get_current_device = staticmethod(lambda: 5)
    assert _device_reader(Driver())() == 5


def test_stocks_run_is_tritons_own():
    assert STOCK_JIT_RUN.__module__ == "triton.runtime.jit" and not hasattr(STOCK_JIT_RUN, "__wrapped__")
