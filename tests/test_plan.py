"""The direct path is exact: whatever it launches, stock would have launched, and where it must not, it does not."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import signal
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import smart_autotune
from smart_autotune import plan, plan_source, settings
from smart_autotune.batch import next_power_of_2
from support import plan_kernels as kernels
from support.plan_kernels import OMITTED
from support.side_by_side import (
    STOCK_RUN,
    Bed,
    Trio,
    bed,
    counted,
    engine_of,
    fresh,
    named_only,
    patched,
    scripted,
    tensors_of_a_gpu,
)  # fmt: skip
from support.stub_driver import StubDriver, StubLauncher, active

EXAMPLES, STEPS = 50, 30  # a call a step, through ours twice; see MIN_CALLS
MIN_CALLS, MIN_DIRECT_SHARE = 5_000, 0.5


# ---- any call, through stock and through ours -----------------------------------------------------------------------


class Spec(NamedTuple):
    """A kernel and the values that its arguments may have; ``decides`` names the argument that picks the winner."""

    kernel: Any
    values: Mapping[str, Sequence[Any]]
    key: tuple[str, ...] = ()
    decides: str = ""


def spec(kernel: Any, *values: Sequence[Any], **options: Any) -> Spec:
    return Spec(kernel, dict(zip(kernel.arg_names, values)), **options)


ANY_INT = [kernels.INTS, kernels.SCALARS]
SPECS = [
    spec(kernels.nothing),
    spec(kernels.only_blocks),
    spec(kernels.copied, kernels.TENSORS, kernels.FEW_TENSORS, kernels.INTS, kernels.FLOATS),
    spec(kernels.copied, kernels.FEW_TENSORS, kernels.TENSORS, kernels.SCALARS, [2.0, 3], key=("n",), decides="n"),
    spec(
        kernels.optional, kernels.FEW_TENSORS, [OMITTED, *kernels.FEW_TENSORS], [OMITTED, None, *kernels.FEW_TENSORS],
        [OMITTED, 16, 1, 5, 2**40], [OMITTED, 2.5, 3], [OMITTED, False, True, 1],
    ),
    spec(
        kernels.optional, kernels.FEW_TENSORS, [OMITTED, None], [OMITTED, kernels.TENSORS[3]],
        [OMITTED, 16, 17, 1, 33], key=("n", "causal"), decides="n",
    ),
    spec(kernels.constants, kernels.FEW_TENSORS, [4, 16, 1], kernels.ALIKE),
    spec(kernels.constants, kernels.FEW_TENSORS, [4, 16, 1], kernels.CONSTANTS, key=("MODE", "n"), decides="n"),
    spec(kernels.unspecialised, kernels.FEW_TENSORS, kernels.FEW_TENSORS, *[kernels.INTS] * 3),
    spec(
        kernels.annotated, kernels.FEW_TENSORS, kernels.INTS, kernels.INTS, [True, False, 1, 0], [1.0, 2, True],
        kernels.INTS,
    ),
    spec(kernels.colliding, kernels.FEW_TENSORS, *[[1, 5, 32, 2.5]] * 13, key=("z",), decides="z"),
    spec(kernels.builtins, kernels.FEW_TENSORS, *[[1, 5, 32]] * 9, key=("repr",), decides="repr"),
    spec(kernels.reserved, [3], [1], kernels.FEW_TENSORS, [1, 16]),
    spec(kernels.underscored, kernels.FEW_TENSORS, [1, 5], [1, 16]),
]  # fmt: skip

GRIDS = [
    (3,), (2, 3), (2, 3, 4), (5, 6, 7, 8), [4], [4, 5],
    lambda meta: (meta.get("BLOCK", 9),),
    lambda meta: [len(meta), 2],
    lambda meta: (len(repr([(name, type(value).__name__) for name, value in meta.items()])),),
]  # fmt: skip


def winner_by(decides: str) -> Any:
    """The fastest block depends on whether the deciding argument is even: two winners, the same for stock and ours."""

    def time_ms(values: Mapping[str, Any]) -> float:
        value = values.get(decides)
        even = isinstance(value, (int, float)) and value % 2 == 0
        block = values.get("BLOCK", 1)
        return float(block) if even else 1000.0 / block

    return time_ms


@st.composite
def calls(draw: Any, specs: Sequence[Spec]) -> tuple[Spec, list[tuple[tuple[Any, ...], dict[str, Any], Any]]]:
    """A kernel and a run of calls that share most of their values, each passed in its own way."""
    chosen = draw(st.sampled_from(specs))
    pick = {name: st.sampled_from(values) for name, values in chosen.values.items()}
    pool = draw(st.lists(st.fixed_dictionaries(pick), min_size=1, max_size=3))
    found = []
    for _ in range(STEPS):
        given_values = draw(st.sampled_from(pool))
        values = {name: given_values[name] for name in chosen.values}  # in signature order
        if values and draw(st.integers(0, 2)) == 0:
            changed = draw(st.sampled_from(list(values)))
            values[changed] = draw(pick[changed])
            if draw(st.booleans()):
                pool.append(values)
        found.append(passed(draw, values))
    return chosen, found


def passed(draw: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The values as a call passes them: some by position, the rest by keyword in some order; and a grid."""
    names = list(values)
    gap = next((i for i, name in enumerate(names) if values[name] is OMITTED), len(names))
    unnamed = [i + 1 for i, name in enumerate(names) if name in ("grid", "warmup")]  # stock's own keywords
    count = draw(st.integers(max(unnamed, default=0), gap))
    rest = [name for name in names[count:] if values[name] is not OMITTED]
    turn = draw(st.integers(0, max(len(rest) - 1, 0)))
    keywords = {name: values[name] for name in rest[turn:] + rest[:turn]}
    return tuple(values[name] for name in names[:count]), keywords, draw(st.sampled_from(GRIDS))


SEEN: Counter[str] = Counter()

exhaustive = profile(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@exhaustive
@given(run=calls(SPECS), batch=st.sampled_from(["auto", "off"]))
def test_every_call_reaches_the_launcher_as_stocks_does(device, run, batch):
    chosen, sequence = run
    with ExitStack() as scope:
        driver = scope.enter_context(active(StubDriver(120)))
        scope.enter_context(settings.override(strict=True, batch=batch))
        scope.enter_context(named_only())
        scope.enter_context(tensors_of_a_gpu() if device == "gpu" else nullcontext())
        scope.enter_context(patched())
        full = scope.enter_context(counted())
        trio = Trio(driver, chosen.kernel, chosen.key, configs_of(chosen), winner_by(chosen.decides))
        for args, kwargs, grid in sequence:
            outcome = trio.run(args, kwargs, grid)
            SEEN["calls"] += 2
            SEEN["refused"] += 2 * (outcome.error is not None)
        SEEN["full path"] += full.of(trio.decorated) + full.of(trio.patched)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("chosen", SPECS, ids=lambda chosen: chosen.kernel.__name__)
def test_no_value_of_an_argument_is_served_by_the_plan_of_another(sm_120, chosen, device):
    """Each argument through all its values, round after round: plans of all of them exist, and each finds its own."""
    with tensors_of_a_gpu() if device == "gpu" else nullcontext(), bed(sm_120) as made:
        made.made(
            chosen.kernel, key=chosen.key, configs=configs_of(chosen), time_ms=winner_by(chosen.decides), batch="auto"
        )
        first = {name: values[0] for name, values in chosen.values.items()}
        for name, values in [*chosen.values.items()] * 3 if chosen.values else [("", [0])] * 3:
            for value in values:
                call = {**first, name: value} if name else {}
                positional = [call.pop(word) for word in list(call) if word in ("grid", "warmup")]
                outcome = made.run(*positional, **{k: v for k, v in call.items() if v is not OMITTED})
                SEEN["calls"] += 2
                SEEN["full path"] += 2 * (outcome.path != "direct")
                SEEN["refused"] += 2 * (outcome.error is not None)


def test_the_calls_above_were_many_and_most_of_them_direct():
    if not SEEN:
        pytest.skip("the property tests did not run")
    direct = SEEN["calls"] - SEEN["full path"]
    print(f"{SEEN['calls']} calls, {direct} direct, {SEEN['refused']} refused by stock")
    assert SEEN["calls"] >= MIN_CALLS
    assert direct >= MIN_DIRECT_SHARE * SEEN["calls"]
    assert SEEN["refused"] < 0.2 * SEEN["calls"]


def configs_of(chosen: Spec) -> list[Any]:
    names = chosen.kernel.arg_names
    if "BLOCK" not in names:
        return [triton.Config({}, num_warps=warps) for warps in (4, 8)]
    return [triton.Config({"BLOCK": size}) for size in (64, 128, 32)]


# ---- what is checked at each launch ---------------------------------------------------------------------------------


@pytest.fixture
def bench(sm_120) -> Iterator[Bed]:
    with bed(sm_120) as made:
        yield made


@pytest.fixture
def copied(bench) -> Bed:
    """``copied`` with a call that is direct by now."""
    bench.made(kernels.copied).warm(*CALL)
    return bench


X, Y = torch.zeros(64), torch.zeros(64)
CALL = (X, Y, 16, 2.5)


def test_a_call_is_direct_once_the_full_path_has_launched_it(bench):
    paths = [bench.made(kernels.copied).path(*CALL)] + [bench.path(*CALL) for _ in range(3)]
    assert paths[0] == "full" and paths[2:] == ["direct", "direct"]


@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_hook_added_later_is_called_and_gone_again_the_calls_are_direct(copied, place):
    seen = []
    chain = getattr(knobs.runtime, place)
    chain.add(seen.append)
    try:
        with calling_hooks(copied.driver):
            assert copied.path(*CALL) == "full"
    finally:
        chain.remove(seen.append)
    assert [call.get()["name"] for call in seen] == [copied.run(*CALL).kernel.name] * 3
    assert copied.path(*CALL) == "direct"


@contextmanager
def calling_hooks(driver: StubDriver) -> Iterator[None]:
    """The stub's launcher calls launch hooks as Triton's C launcher does."""
    launch = StubLauncher.__call__

    def hooked(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        launch(self, x, y, z, stream, function, packed, metadata, enter, leave, *args)

    with mock.patch.object(StubLauncher, "__call__", hooked):
        yield


def test_proton_or_who_else_hooks_launches_sees_the_kernels_own_launch_metadata(bench):
    described = fresh(kernels.copied)
    described.launch_metadata = lambda grid, metadata, args: {"name": f"copied of {args['n']} on {grid}"}
    bench.made(described).warm(*CALL)
    seen = []

    def hook(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        with calling_hooks(bench.driver):
            assert bench.path(*CALL) == "full"
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["copied of 16 on (3,)"] * 3


@pytest.mark.parametrize("hook", [None, lambda metadata: None])
@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_a_launch_hook_put_in_the_chains_place_takes_the_full_path(bench, monkeypatch, hook, when):
    bench.made(kernels.copied)
    if when == "later":
        bench.warm(*CALL)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", hook)
        assert [bench.path(*CALL) for _ in range(3)] == ["full"] * 3
    bench.warm(*CALL)


@pytest.mark.parametrize(
    "knob", [("runtime", "debug", True), ("compilation", "instrumentation_mode", "default")], ids=lambda knob: knob[1]
)
def test_a_knob_that_selects_another_binary_is_seen(copied, monkeypatch, knob):
    before = copied.run(*CALL)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(knobs, knob[0]), knob[1], knob[2])
        assert copied.path(*CALL) == "full"
        assert copied.warm(*CALL).kernel.hash != before.kernel.hash
    assert copied.warm(*CALL).kernel.hash == before.kernel.hash


def test_debug_set_on_the_kernel_is_seen(copied):
    before = copied.run(*CALL)
    for tuner in copied.tuners:
        tuner.fn.debug = True
    assert copied.path(*CALL) == "full"
    assert copied.warm(*CALL).kernel.hash != before.kernel.hash


def test_a_pre_run_hook_is_called_at_each_launch(copied):
    seen = []
    for tuner in copied.tuners:
        tuner.fn.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["BLOCK"]))
    assert [copied.path(*CALL) for _ in range(2)] == ["full"] * 2
    assert seen == [32] * 6
    for tuner in copied.tuners:
        tuner.fn.pre_run_hooks.clear()
    copied.warm(*CALL)


@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_run_overridden_on_the_kernel_is_what_runs(bench, when):
    bench.made(kernels.copied)
    if when == "later":
        bench.warm(*CALL)
    seen = []
    for tuner in bench.tuners:
        run = tuner.fn.run
        tuner.fn.run = lambda *args, run=run, **kwargs: (seen.append(kwargs["warmup"]), run(*args, **kwargs))[1]
    bench.run(*CALL)
    del seen[:]
    assert [bench.path(*CALL) for _ in range(2)] == ["full"] * 2
    assert seen == [False] * 6
    for tuner in bench.tuners:
        del tuner.fn.run
    bench.warm(*CALL)


@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_run_overridden_on_tritons_class_is_what_runs(bench, monkeypatch, when):
    bench.made(kernels.copied)
    if when == "later":
        bench.warm(*CALL)
    seen, run = [], JITFunction.run

    @functools.wraps(run)
    def wrapper(self, *args, **kwargs):
        seen.append(kwargs["warmup"])
        return run(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", wrapper)
        bench.run(*CALL)
        del seen[:]
        assert [bench.path(*CALL) for _ in range(2)] == ["full"] * 2
        assert seen == [False] * 6
    bench.warm(*CALL)


def test_a_run_that_was_wrapped_before_we_were_imported_is_never_passed_by(bench, monkeypatch):
    run = JITFunction.run
    wrapper = functools.wraps(run)(lambda self, *args, **kwargs: run(self, *args, **kwargs))
    monkeypatch.setattr(JITFunction, "run", wrapper)
    for module in (plan, plan_source):
        monkeypatch.setattr(module, "STOCK_JIT_RUN", wrapper)
    bench.made(kernels.copied)
    assert [bench.path(*CALL) for _ in range(4)] == ["full"] * 4


def test_a_wrapper_put_under_the_tuner_later_is_what_runs(copied):
    seen = []

    def even(args):
        seen.append(args["n"])
        return 5

    for tuner in copied.tuners:
        tuner.fn = triton.heuristics({"scale": even})(tuner.fn)
    assert [copied.path(X, Y, 16) for _ in range(3)] == ["full"] * 3
    assert copied.run(X, Y, 16).launch.args[3] == 5 and seen


def test_a_global_that_changed_since_the_compile_raises_as_in_stock(bench, monkeypatch):
    bench.made(kernels.uses_a_global).warm(X, 16)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "FACTOR", tl.constexpr(4))
        assert isinstance(bench.run(X, 16).error, RuntimeError)
        patch.delattr(kernels, "FACTOR")
        assert isinstance(bench.run(X, 16).error, RuntimeError)
    assert bench.path(X, 16) == "direct"


def test_a_config_hook_set_later_is_called(copied):
    seen = []
    for tuner in copied.tuners:
        tuner.best_config.pre_hook = lambda args: seen.append(args["BLOCK"])
    try:
        assert [copied.path(*CALL) for _ in range(2)] == ["full"] * 2
    finally:
        copied.trio.stock.best_config.pre_hook = None
    assert seen == [32] * 6
    assert copied.path(*CALL) == "direct"


def test_the_compiled_kernels_that_triton_forgot_are_compiled_again(copied):
    before = copied.run(*CALL).kernel
    for tuner in copied.tuners:
        tuner.fn.device_caches.clear()
    after = copied.run(*CALL)
    assert after.path == "full" and after.kernel is not before
    copied.warm(*CALL)


def test_another_driver_is_another_world(copied):
    """Triton's own caches know no driver: they are cleared with it, as who swaps a driver has to."""
    decorated, sm_90 = copied.trio.decorated, StubDriver(90)
    decorated._do_bench = decorated.do_bench = lambda run, quantiles=None: (run(), [1.0] * 3)[1]
    copied.driver.launches.clear()
    with active(sm_90):
        decorated.fn.device_caches.clear()
        hashes = {decorated[(3,)](*CALL).hash for _ in range(3)}
    assert len(hashes) == 1 and hashes != {copied.trio.stock.fn.run(*CALL, BLOCK=64, grid=(3,), warmup=True).hash}
    assert sm_90.launches and copied.driver.launches == []


def test_another_device_has_a_kernel_of_its_own(copied):
    first = copied.run(*CALL).kernel
    copied.driver.device = 1
    assert copied.path(*CALL) == "full"
    second = copied.warm(*CALL).kernel
    assert second is not first
    copied.driver.device = 0
    again = copied.run(*CALL)
    assert again.path == "direct" and again.kernel is first


# ---- what the user does to the tuner --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["clear", "pop", "popitem", "del", "reassign"])
def test_a_cleared_cache_is_tuned_again(copied, how):
    for tuner in copied.tuners:
        forget(tuner, how)
    slow_is_best(copied)
    outcome = copied.run(*CALL)
    assert outcome.path == "full" and copied.trio.stock.best_config.kwargs["BLOCK"] == 128


def forget(tuner, how):
    if how == "reassign":
        tuner.cache = {}
    elif how == "pop":
        tuner.cache.pop(next(iter(tuner.cache)))
    elif how == "del":
        del tuner.cache[next(iter(tuner.cache))]
    else:
        getattr(tuner.cache, how)()


def slow_is_best(made):
    names = made.trio.stock.arg_names
    bench = scripted(made.driver, names, lambda values: -float(values["BLOCK"]) + 1000)
    for tuner in made.tuners:
        tuner._do_bench = bench
        tuner.__dict__.pop("do_bench", None)


def test_a_dict_put_in_the_caches_place_is_heeded_too(copied):
    for tuner in copied.tuners:
        tuner.cache = {}
    for _ in range(3):
        copied.run(*CALL)
    slow_is_best(copied)
    for tuner in copied.tuners:
        tuner.cache.clear()
    copied.run(*CALL)
    assert copied.trio.stock.best_config.kwargs["BLOCK"] == 128


def test_a_cache_cleared_while_a_call_is_on_the_full_path_is_not_overlooked(bench):
    bench.made(kernels.copied).warm(*CALL)
    settings.renew()  # so that the next call is on the full path

    def grid_of(tuner):
        return lambda meta: (tuner.cache.clear(), (3,))[1]

    stock, decorated, patched_tuner = bench.tuners
    STOCK_RUN(stock, *CALL, grid=grid_of(stock), warmup=False)
    decorated[grid_of(decorated)](*CALL)
    patched_tuner.run(*CALL, grid=grid_of(patched_tuner), warmup=False)
    slow_is_best(bench)
    assert bench.path(*CALL) == "full"
    assert stock.best_config.kwargs["BLOCK"] == 128


def test_configs_put_in_the_lists_place_are_read_as_stock_reads_them(copied):
    for tuner in copied.tuners:
        tuner.configs = [triton.Config({"BLOCK": 256})]
    assert copied.path(*CALL) == "full"
    assert copied.warm(*CALL).launch.args[-1] == 256


@pytest.mark.parametrize("begin", [(64, 32), (64,)])
def test_a_config_list_changed_in_place_is_read_as_stock_reads_it(bench, begin):
    bench.made(kernels.copied, configs=[triton.Config({"BLOCK": size}) for size in begin])
    for tuner in bench.tuners:
        tuner.configs = list(tuner.configs)
    bench.warm(*CALL)
    for size in (256, 512):
        for tuner in bench.tuners:
            tuner.configs[:] = [triton.Config({"BLOCK": size})]
        assert bench.path(*CALL) == "full"
        assert bench.warm(*CALL).launch.args[-1] == size


@pytest.mark.parametrize("change", [lambda: settings.override(mode="stock"), lambda: settings.override(max_buckets=3)])
def test_other_settings_are_another_world(copied, change):
    with change():
        assert copied.path(*CALL) == "full"
    assert copied.path(*CALL) in ("direct", "full")
    copied.warm(*CALL)


def test_freezing_and_thawing_send_the_next_call_down_the_full_path(copied):
    smart_autotune.freeze()
    assert copied.path(*CALL) == "full"
    copied.warm(*CALL)
    smart_autotune.thaw()
    assert copied.path(*CALL) == "full"
    copied.warm(*CALL)


def test_what_was_served_while_frozen_is_tuned_once_thawed(bench):
    bench.made(kernels.copied)
    smart_autotune.freeze()
    kernel = bench.trio.decorated
    for _ in range(3):
        kernel[(3,)](*CALL)
    assert bench.full.of(kernel) < 3 and kernel.best_config.kwargs["BLOCK"] == 64
    smart_autotune.thaw()
    kernel[(3,)](*CALL)
    assert kernel.best_config.kwargs["BLOCK"] == 32


def test_a_call_that_only_compiles_launches_nothing(copied):
    for kernel in (copied.trio.decorated, copied.trio.patched):
        copied.driver.launches.clear()
        compiled = kernel.run(*CALL, grid=(3,), warmup=True)
        assert compiled.metadata.hash == copied.run(*CALL).kernel.hash
    for kernel in copied.tuners[1:]:
        before = len(copied.driver.launches)
        kernel.run(*CALL, grid=(3,), warmup=True)
        kernel.warmup(*CALL, grid=(3,))
        assert len(copied.driver.launches) == before


# ---- what never is direct -------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor subclass."""


NOT_READ = {
    "a tensor subclass": (X.as_subclass(Wrapped), Y, 16, 2.5),
    "a numpy int": (X, Y, np.int64(16), 2.5),
    "a numpy float": (X, Y, 16, np.float32(2.5)),
    "a tuple": (X, Y, (16, X), 2.5),
    "an enum": (X, Y, signal.SIGTERM, 2.5),
}


@pytest.mark.parametrize("args", NOT_READ.values(), ids=NOT_READ)
def test_other_argument_classes_take_the_full_path_and_do_not_disturb_the_others(copied, args):
    outcomes = [copied.run(*args) for _ in range(3)]
    assert {outcome.path for outcome in outcomes} == {"full"}
    assert copied.path(*CALL) == "direct" or copied.warm(*CALL)


@pytest.mark.parametrize(
    "wrong",
    [
        {"args": CALL[:3]},
        {"args": (*CALL, 1)},
        {"args": (*CALL, 1, 2, 3)},
        {"args": CALL, "kwargs": {"unknown": 1}},
        {"args": CALL, "kwargs": {"learn": True}},
        {"args": CALL, "kwargs": {"learn__": True}},
        {"args": CALL, "kwargs": {"n": 16}},
        {"args": CALL, "kwargs": {"num_warps": 8}},
        {"args": CALL, "kwargs": {"num_ctas": 1}},
        {"args": CALL, "kwargs": {"stream": 0}},
        {"args": (X, Y, 2**64, 2.5)},
        {"args": (X, Y, -(2**63) - 1, 2.5)},
        {"args": CALL, "grid": ()},
        {"args": CALL, "grid": 3},
        {"args": CALL, "grid": lambda meta: None},
        {"args": CALL, "grid": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["cold", "warm"])
def test_a_call_that_stock_refuses_is_refused_with_the_same_error_type(bench, wrong, when):
    bench.made(kernels.copied)
    if when == "warm":
        bench.warm(*CALL)
        bench.warm(X, Y, 2**63 + 1, 2.5), bench.warm(X, Y, -(2**40) + 1, 2.5)
    outcome = bench.run(*wrong["args"], grid=wrong.get("grid", (3,)), **wrong.get("kwargs", {}))
    assert outcome.error is not None
    bench.warm(*CALL)


def test_a_value_that_the_configs_give_is_refused_by_the_call_also_where_a_plan_exists(copied):
    with pytest.raises((TypeError, ValueError)):  # stock's type depends on whether it has tuned
        copied.trio.decorated[(3,)](*CALL, BLOCK=64)
    with pytest.raises((TypeError, ValueError)):
        copied.trio.patched[(3,)](*CALL, BLOCK=64)


def test_an_option_of_the_launch_that_no_config_gives_is_part_of_the_plan(bench):
    """``launch_pdl=True``, say: calls with it and without it are two plans, each with the kernel stock launches."""
    bench.made(kernels.copied).warm(*CALL)
    for fused in (False, True):
        paths = [bench.path(*CALL, enable_fp_fusion=fused) for _ in range(3)]
        assert paths == ["full", "direct", "direct"]
    bench.warm(*CALL)
    plain, fused, unfused = (
        bench.run(*CALL, **options).kernel for options in ({}, {"enable_fp_fusion": True}, {"enable_fp_fusion": False})
    )
    assert fused.hash == plain.hash != unfused.hash


@pytest.mark.parametrize("other", [1, 0, "False", None], ids=repr)
def test_another_type_of_a_known_options_value_is_another_plan(bench, other):
    bench.made(kernels.copied).warm(*CALL)
    for _ in range(3):
        bench.run(*CALL, enable_fp_fusion=False)
    assert bench.run(*CALL, enable_fp_fusion=other).path == "full"
    assert bench.path(*CALL, enable_fp_fusion=False) == "direct"


def test_an_option_that_is_no_plain_value_takes_the_full_path(bench):
    bench.made(kernels.copied).warm(*CALL)
    paths = [bench.path(*CALL, extern_libs={"libdevice": triton.knobs.nvidia.libdevice_path or ""}) for _ in range(3)]
    assert "direct" not in paths


def test_heuristics_below_the_tuner_take_the_full_path(bench):
    bench.made(kernels.copied)
    for name, tuner in (("decorated", bench.trio.decorated), ("patched", bench.trio.patched)):
        tuner.fn = triton.heuristics({"scale": lambda args: 5})(tuner.fn)
        setattr(bench.trio, name, tuner)
    bench.trio.stock.fn = triton.heuristics({"scale": lambda args: 5})(bench.trio.stock.fn)
    assert [bench.path(X, Y, 16) for _ in range(4)] == ["full"] * 4


def test_config_hooks_take_the_full_path(bench):
    seen = []
    hooked = [triton.Config({"BLOCK": size}, pre_hook=lambda args: seen.append(args["n"])) for size in (64, 32)]
    bench.made(kernels.copied, configs=hooked)
    bench.run(*CALL)
    del seen[:]
    assert [bench.path(*CALL) for _ in range(3)] == ["full"] * 3 and seen == [16] * 9


def test_a_batch_size_that_only_a_function_knows_takes_the_full_path(bench):
    bench.made(kernels.copied, batch=lambda named: named["n"])
    decorated = bench.trio.decorated
    for count in range(1, 4):
        decorated[(3,)](*CALL)
        assert bench.full.of(decorated) == count


def test_a_scalar_tensor_first_leaves_the_batch_size_to_the_full_path(bench):
    bench.made(kernels.copied)
    scalar = torch.zeros(())
    for _ in range(3):
        assert bench.path(scalar, Y, 5, 2.5) == "full"
    with settings.override(batch="off"):
        bench.warm(scalar, Y, 5, 2.5)


def test_a_parameter_is_a_tensor_of_its_own_class(bench):
    weight = torch.nn.Parameter(torch.zeros(64))
    bench.made(kernels.copied).warm(weight, Y, 16, 2.5)
    assert bench.path(X, Y, 16, 2.5) == "full"
    bench.warm(X, Y, 16, 2.5)
    assert bench.path(weight, Y, 16, 2.5) == "direct" or bench.warm(weight, Y, 16, 2.5)


def test_kernels_with_scratch_memory_or_tensor_descriptors_take_the_full_path(sm_120):
    """Compiled for real: the scratch size is in the metadata."""
    with patched(), counted() as full:
        made = Bed(sm_120, full).made(kernels.with_scratch, configs=[triton.Config({"BLOCK": 16})] * 2)
        x = torch.zeros(16, 16)
        outcomes = [made.run(x, 16) for _ in range(3)]
    assert outcomes[0].kernel.metadata.global_scratch_size > 0
    assert [outcome.path for outcome in outcomes] == ["full"] * 3


def test_a_tensor_descriptor_takes_the_full_path(bench):
    described = TensorDescriptor.from_tensor(torch.zeros(16, 16), [16, 16])
    bench.made(kernels.copied)
    assert [bench.path(described, Y, 16, 2.5) for _ in range(3)] == ["full"] * 3


def test_another_release_of_triton_takes_the_full_path(bench, monkeypatch):
    monkeypatch.setattr(plan, "VERIFIED", "3.7.0")
    bench.made(kernels.copied)
    assert [bench.path(*CALL) for _ in range(4)] == ["full"] * 4


def test_a_launcher_that_somebody_wrapped_is_called_not_passed_by(bench, monkeypatch):
    launched = []

    class Launcher(StubLauncher):
        launch_cooperative_grid = launch_pdl = False

        def __call__(self, *args):
            launched.append(args[:3])
            super().__call__(*args)

        def launch(self, *args):
            raise AssertionError("the wrapper was passed by")

    bench.driver.launcher_cls = Launcher
    bench.made(kernels.copied).warm(*CALL)
    del launched[:]
    bench.warm(*CALL)
    assert launched == [(3, 1, 1)] * 9


# ---- names, configs, grids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, count",
    [(kernels.colliding, 14), (kernels.builtins, 10)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_argument_names_that_the_generated_text_might_use_are_direct(bench, kernel, count):
    values = [X, *range(2, count + 1)]
    bench.made(kernel).warm(*values, grid=(5, 6, 7))
    bench.warm(*values[:3], **dict(zip(kernel.arg_names[3:], values[3:])), grid=lambda meta: (len(meta),))


@pytest.mark.parametrize("kernel, values", [(kernels.reserved, (3, 1, X, 16)), (kernels.underscored, (X, 5, 16))])
def test_argument_names_that_cannot_be_told_from_ours_take_the_full_path(bench, kernel, values):
    bench.made(kernel)
    assert [bench.path(*values) for _ in range(3)] == ["full"] * 3


def test_a_kernel_without_arguments_is_direct(bench):
    bench.made(kernels.nothing, configs=[triton.Config({}, num_warps=warps) for warps in (4, 8)]).warm()


def test_configs_that_name_their_values_in_another_order_or_number_keep_them_apart(bench):
    configs = [
        triton.Config({"BLOCK": 64, "WIDTH": 4}),
        triton.Config({"WIDTH": 8, "BLOCK": 32}),
        triton.Config({"BLOCK": 128, "enable_fp_fusion": False, "WIDTH": 2}),
        triton.Config({"BLOCK": 256}),
    ]
    winners = {1: 64, 2: 32, 3: 128, 4: 256}

    def time_ms(values):
        return 1.0 if values["BLOCK"] == winners[values["n"]] else 2.0

    bench.made(kernels.wide, key=["n"], configs=configs, time_ms=time_ms)
    seen = {}
    for _ in range(4):
        for n in winners:
            outcome = bench.run(X, n, grid=lambda meta: (meta["BLOCK"], meta["WIDTH"]))
            seen[n] = (outcome.path, outcome.launch.grid)
    assert seen == {n: ("direct", (winners[n], width, 1)) for n, width in zip(winners, (4, 8, 2, 4))}


def test_a_grid_function_sees_the_config_of_its_own_launch(bench):
    """Stock sets ``best_config`` before it asks for the grid."""
    time_ms = winner_by("n")
    bench.made(kernels.copied, key=["n"], time_ms=time_ms)

    def grid_of(tuner):
        return lambda meta: (tuner.best_config.kwargs["BLOCK"] if hasattr(tuner, "best_config") else 1,)

    stock, decorated = bench.trio.stock, bench.trio.decorated
    for n in (2, 3, 2, 3, 2, 3, 2):
        STOCK_RUN(stock, X, Y, n, 2.5, grid=grid_of(stock), warmup=False)
        theirs = bench.driver.launches[-1].grid
        decorated[grid_of(decorated)](X, Y, n, 2.5)
        assert bench.driver.launches[-1].grid == theirs == ((32 if n == 2 else 128), 1, 1)
    assert bench.full.of(decorated) < 7


def test_a_single_config_is_launched_directly_too(bench):
    bench.made(kernels.copied, configs=[triton.Config({"BLOCK": 64})]).warm(*CALL)


# ---- batch buckets --------------------------------------------------------------------------------------------------

BUCKETS = {
    "auto, the first tensor": (kernels.copied, {}),
    "auto, an int": (kernels.batched, {}),
    "an argument": (kernels.copied, {"batch": "src"}),
    "an argument's dimension": (kernels.copied, {"batch": ("src", 1)}),
    "an int argument": (kernels.copied, {"batch": "n"}),
    "a list": (kernels.copied, {"batch": "n", "batch_buckets": [4, 16, 64]}),
    "a function": (kernels.copied, {"batch": "n", "batch_buckets": lambda size: size // 10}),
}


@pytest.mark.parametrize("kernel, options", BUCKETS.values(), ids=BUCKETS)
def test_each_bucket_is_served_by_its_own_ranking_and_a_new_one_is_tuned(bench, kernel, options):
    now = {"size": 0}

    def tuned(batch_size):
        """The block that won for this size: 64 for small ones, 128 for large ones."""
        src = torch.zeros(batch_size, batch_size)
        now["size"] = batch_size
        decorated[(3,)](src, Y, batch_size, 2.5)
        return decorated.best_config.kwargs["BLOCK"], len(decorated.records)

    time_ms = lambda values: 1.0 if values["BLOCK"] == (64 if now["size"] <= 16 else 128) else 2.0  # noqa: E731
    decorated = bench.made(kernel, time_ms=time_ms, **options).trio.decorated
    assert [tuned(size)[0] for size in (13, 60, 13, 60, 13, 60)] == [64, 128] * 3
    count = len(decorated.records)
    before = bench.full.of(decorated)
    assert [tuned(size) for size in (14, 61, 13, 60)] == [(64, count), (128, count)] * 2
    direct = 4 - (bench.full.of(decorated) - before)
    assert direct >= 2
    assert tuned(3) == (64, count + 1), "a new bucket is tuned, not served by another's plan"
    assert tuned(3) == (64, count + 1)


@pytest.mark.parametrize("size", range(-3, 70))
def test_the_batch_part_of_a_plan_is_as_fine_as_the_bucket(size):
    exec_key = (size - 1).bit_length() if size > 0 else 0
    assert (1 << exec_key) == next_power_of_2(size)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_plans_keep_no_tensor_alive(bench):
    bench.made(kernels.copied)
    x = torch.zeros(64)
    bench.warm(x, x[4:], 16, 2.5)
    del bench.driver.launches[:]
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_plans_hold_their_compiled_kernels(bench):
    kernel = bench.made(kernels.copied).trio.decorated
    for _ in range(3):
        compiled = weakref.ref(kernel[(3,)](*CALL))
    del bench.driver.launches[:]
    gc.collect()
    assert compiled() is not None
    assert kernel[(3,)](*CALL) is compiled()


def test_plans_are_bounded(bench, monkeypatch):
    monkeypatch.setattr(plan, "MOST_PLANS", 8)
    kernel = bench.made(kernels.constants).trio.decorated
    most = 0
    for mode in range(40):
        bench.run(X, 5, mode + 2)
        most = max(most, count_plans(kernel))
    assert 0 < most <= 8
    bench.warm(X, 5, 2)


def test_combinations_of_argument_classes_are_bounded(bench, monkeypatch):
    monkeypatch.setattr(plan, "MOST_FUNCTIONS", 3)
    bench.made(kernels.constants)
    constants = [2, 2.5, "a", None, True, tl.float32, torch.float16]
    with settings.override(batch="off"):
        for _ in range(4):
            paths = [bench.path(X, 5, mode) for mode in constants]
    assert sorted(paths) == ["direct"] * 3 + ["full"] * 4


def count_plans(tuner):
    return sum(len(one.plans) for one in engine_of(tuner).plans._functions.values())


def test_arguments_that_are_now_none_now_a_tensor_are_direct_each(bench):
    bench.made(kernels.optional)
    calls = [(X, None), (X, Y), (X, None, Y), (X, Y, Y)]
    for _ in range(3):
        for args in calls:
            bench.run(*args)
    assert [bench.path(*args) for args in calls * 2] == ["direct"] * 8


# ---- what else must go on working -----------------------------------------------------------------------------------


def test_triton_prints_what_it_tuned(bench, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")  # setting the knob itself would outlive the test
    bench.made(kernels.copied).warm(*CALL)
    printed = capsys.readouterr().out
    assert printed.count("Triton autotuning for function copied") == 3


def test_configs_and_the_cache_can_be_pickled(copied):
    for tuner in copied.tuners[1:]:
        assert pickle.loads(pickle.dumps(tuner.configs)) == tuner.configs
        cache = pickle.loads(pickle.dumps(tuner.cache))
        assert type(cache) is dict and list(cache.values()) == [tuner.best_config]
        assert copy.deepcopy(tuner.cache).keys() == cache.keys()


def test_a_fault_of_ours_turns_direct_launches_off_and_says_so_once(bench, monkeypatch, caplog):
    def broken(*args):
        raise KeyError("the source")

    monkeypatch.setattr(plan, "Source", broken)
    with settings.override(strict=False):
        bench.made(kernels.copied)
        assert [bench.path(*CALL) for _ in range(4)] == ["full"] * 4
        said = [record.getMessage() for record in caplog.records if "direct launches are off" in record.getMessage()]
        assert len(said) == 2, "once a tuner"
    decorated = Bed(bench.driver, bench.full).made(kernels.copied).trio.decorated
    with settings.override(strict=True), pytest.raises(KeyError):
        for _ in range(3):
            decorated[(3,)](*CALL)


def test_a_reassigned_launcher_of_one_kernel_is_not_anothers(bench):
    one = bench.made(kernels.copied).trio
    two = Trio(bench.driver, kernels.copied, time_ms=lambda values: 1000.0 - values["BLOCK"])
    for _ in range(4):
        assert one.run(CALL, {}, (3,)).launch.args[-1] == 32
        assert two.run(CALL, {}, (3,)).launch.args[-1] == 128
