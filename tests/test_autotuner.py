"""Being a drop-in: what others read off the object, what the decorator accepts, what it refuses in which words."""

from __future__ import annotations

import copy
import inspect
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver as triton_driver
from triton.runtime.errors import AutotunerError

from smart_autotune import SmartAutotuner, settings, smart_autotune
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def decorated(decorate=smart_autotune, configs=None, time_ms=lambda values: values["BLOCK"], **options):
    fake = FakeKernel(shape)
    options.setdefault("do_bench", fake.bench(time_ms))
    return decorate(configs=configs or blocks(4, 2, 8), key=["n"], **options)(fake)


def in_a_child(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- the same shape as stock ----------------------------------------------------------------------------------------


def test_it_is_an_autotuner():
    kernel = decorated()
    assert isinstance(kernel, Autotuner) and isinstance(kernel, SmartAutotuner)
    assert not isinstance(kernel.fn, Autotuner)


ATTRIBUTES = [
    "fn", "base_fn", "configs", "keys", "arg_names", "cache", "cache_results", "reset_to_zero", "restore_value",
    "pre_hook", "post_hook", "user_defined_pre_hook", "user_defined_post_hook", "perf_model", "configs_top_k",
    "early_config_prune", "num_warmups", "num_reps", "use_cuda_graph", "prune_configs", "warmup", "run", "do_bench",
    "best_config", "configs_timings", "bench_time",
]  # fmt: skip


@pytest.mark.parametrize("launches", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reset_to_zero": ["x"], "restore_value": ["x"]},
        {"pre_hook": lambda kwargs, reset_only=False: None, "post_hook": lambda kwargs, exception: None},
        {"prune_configs_by": {"perf_model": lambda **kwargs: 1.0, "top_k": 2}},
    ],
    ids=["plain", "reset and restore", "hooks", "model"],
)
def test_attributes_appear_when_stocks_do_with_stocks_types(sm_120, launches, options):
    kinds = []
    for decorate in (triton.autotune, smart_autotune):
        kernel = decorated(decorate, **options)
        for _ in range(launches):
            kernel[(1,)](torch.zeros(3), 100)
        kinds.append({name: type(getattr(kernel, name)) for name in ATTRIBUTES if hasattr(kernel, name)})
    stock, ours = kinds
    assert list(ours) == list(stock)
    for name in ATTRIBUTES if launches else ATTRIBUTES[:-3]:
        assert issubclass(ours[name], stock[name]) or callable(getattr(kernel, name)), name
    assert ("best_config" in ours) is (launches > 0)


def test_the_values_of_attributes_after_a_run_are_those_of_stock(sm_120):
    configs = blocks(4, 2, 8)
    values = []
    for decorate in (triton.autotune, smart_autotune):
        kernel = decorated(decorate, configs, reset_to_zero=["x"], restore_value=["x"])
        kernel[(1,)](torch.zeros(3), 100)
        assert kernel.base_fn is shape and kernel.fn.arg_names == kernel.arg_names and kernel.configs is configs
        assert isinstance(kernel.bench_time, float) and kernel.bench_time >= 0
        assert all(isinstance(key, tuple) for key in kernel.cache)
        values.append(
            [
                kernel.keys, kernel.arg_names, kernel.best_config, list(kernel.cache.values()), kernel.reset_to_zero,
                kernel.restore_value, kernel.user_defined_pre_hook, kernel.user_defined_post_hook,
                {config: timings[0] for config, timings in kernel.configs_timings.items()}, kernel.nargs,
            ]
        )  # fmt: skip
    assert values[1] == values[0]


def test_a_config_that_failed_is_infinitely_slow_in_configs_timings_as_with_stock(sm_120):
    timings = []
    for decorate in (triton.autotune, smart_autotune):

        def needs(values):
            if values["BLOCK"] == 2:
                raise triton.runtime.errors.OutOfResources(663_808, 101_376, "shared memory")

        fake = FakeKernel(shape, on_compile=needs)
        kernel = decorate(configs=blocks(4, 2, 8), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"] / 4))(fake)
        kernel[(1,)](None, 100)
        timings.append({config.kwargs["BLOCK"]: list(found) for config, found in kernel.configs_timings.items()})
    assert timings[1] == timings[0] == {4: [1.0] * 3, 2: [math.inf] * 3, 8: [2.0] * 3}


def test_configs_timings_hold_only_what_the_authors_prune_kept_as_with_stock(sm_120):
    timings = []
    for decorate in (triton.autotune, smart_autotune):
        kernel = decorated(
            decorate, prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: configs[1:]}
        )
        kernel[(1,)](None, 100)
        timings.append({config.kwargs["BLOCK"]: found[0] for config, found in kernel.configs_timings.items()})
    assert timings[1] == timings[0] == {2: 2, 8: 8}


def test_a_subclass_that_overrides_prune_configs_with_one_argument_is_asked(sm_120):
    class OnlyTheLast(SmartAutotuner):
        def prune_configs(self, kwargs):
            asked.append((dict(self.nargs), sorted(kwargs)))
            return super().prune_configs(kwargs)[-2:]

    asked = []
    fake = FakeKernel(shape)
    kernel = OnlyTheLast(
        fake, fake.arg_names, blocks(1, 4, 2), ["n"], None, None, do_bench=fake.bench(lambda v: v["BLOCK"])
    )
    kernel[(1,)](None, n=100)
    assert kernel.best_config.kwargs == {"BLOCK": 2}
    assert asked == [({"x": None}, ["grid", "n", "warmup"])]


def test_a_deep_copy_is_a_tuner_of_its_own(sm_120):
    kernel = smart_autotune(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
    kernel[(1,)](*copy_arguments())
    twin = copy.deepcopy(kernel)
    assert type(twin) is type(kernel) and twin.fn is kernel.fn and twin.configs == kernel.configs
    twin[(1,)](*copy_arguments(63))
    assert len(kernel.records) == 1 and len(kernel.cache) == 1
    assert twin.best_config in twin.configs
    assert twin._engine.view.autotuner is twin


def test_a_deep_copy_resets_by_hooks_of_its_own(sm_120):
    fake = FakeKernel(shape)
    kernel = smart_autotune(configs=blocks(4, 2), key=["n"], restore_value=["x"])(fake)
    twin = copy.deepcopy(kernel)
    assert twin.pre_hook.__self__ is not kernel.pre_hook.__self__
    twin[(1,)](torch.zeros(3), 100)
    assert len(twin.records) == 1 and kernel.records == []


# ---- the decorator's signature --------------------------------------------------------------------------------------


def test_the_signature_begins_with_stocks_twelve_parameters():
    ours = list(inspect.signature(smart_autotune).parameters.values())
    stocks = list(inspect.signature(triton.autotune).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[:12]] == [(p.name, p.kind, p.default) for p in stocks]
    assert len(stocks) == 12
    assert {p.kind for p in ours[12:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert [p.name for p in ours[12:]] == ["batch", "batch_buckets", "tune_args", "timed_call", "examples"]


def test_the_class_takes_what_stocks_takes_in_the_same_places():
    ours = list(inspect.signature(SmartAutotuner.__init__).parameters)
    stocks = list(inspect.signature(Autotuner.__init__).parameters)
    assert ours[: len(stocks)] == stocks


def test_all_twelve_parameters_are_accepted_and_the_deprecated_ones_warn():
    with pytest.warns(DeprecationWarning):
        kernel = smart_autotune(
            blocks(1, 2), ["n"], {"top_k": 1, "perf_model": lambda **kwargs: 1.0}, ["x"], ["x"],
            lambda kwargs, reset_only=False: None, lambda kwargs, exception: None, 5, 10, False, lambda run, **_: 1.0,
            True,
        )(FakeKernel(shape))  # fmt: skip
    assert (kernel.num_warmups, kernel.num_reps, kernel.cache_results) == (5, 10, True)


def test_the_users_benchmark_is_used_even_beside_the_deprecated_warmup(sm_120):
    fake = FakeKernel(shape)
    bench = fake.bench(lambda values: values["BLOCK"])
    with pytest.warns(DeprecationWarning):
        kernel = smart_autotune(configs=blocks(4, 2), key=["n"], warmup=1, rep=1, do_bench=bench)(fake)
    kernel[(1,)](None, 100)
    assert len(bench.timed) == 2


@pytest.mark.parametrize("given", [{"warmup": 7}, {"rep": 13}, {"warmup": 7, "rep": 13}])
def test_deprecated_warmup_and_rep_reach_stocks_benchmark(sm_120, monkeypatch, given):
    seen = []
    monkeypatch.setattr("triton.testing.do_bench", lambda run, **options: seen.append(options) or [1.0, 1.0, 1.0])
    with pytest.warns(DeprecationWarning):
        kernel = smart_autotune(configs=blocks(4, 2), key=["n"], **given)(FakeKernel(shape))
    kernel[(1,)](None, 100)
    expected = (given.get("warmup", 25), given.get("rep", 100))
    assert [(options["warmup"], options["rep"]) for options in seen] == [expected] * 2


def test_use_cuda_graph_reaches_stocks_graph_benchmark(sm_120, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "triton.testing.do_bench_cudagraph", lambda run, **options: seen.append(options) or [1.0, 1.0, 1.0]
    )
    with pytest.warns(DeprecationWarning):
        kernel = smart_autotune(configs=blocks(4, 2), key=["n"], use_cuda_graph=True)(FakeKernel(shape))
    kernel[(1,)](None, 100)
    assert len(seen) == 2


def test_without_a_benchmark_of_the_users_the_drivers_own_is_used(sm_120):
    timed = []
    sm_120.bench = lambda run, quantiles: timed.append(run()) or [1.0, 1.0, 1.0]
    kernel = smart_autotune(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
    kernel[(1,)](*copy_arguments())
    assert len(timed) == 2 and len(sm_120.launches) == 3


def test_printing_prints_stocks_lines(sm_120, monkeypatch, capsys):
    printed = []
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
    for decorate in (triton.autotune, smart_autotune):
        kernel = decorated(decorate)
        kernel[(1,)](None, 100)
        kernel[(1,)](None, 100)
        lines = capsys.readouterr().out.splitlines()
        printed.append([line.split()[:5] for line in lines if not line.startswith(("Autotuning kernel", "with key"))])
    stock, ours = ([line for line in lines if line[0] != "finished"] for lines in printed)
    assert ours == stock and len(ours) == 2
    monkeypatch.delenv("TRITON_PRINT_AUTOTUNING")
    decorated()[(1,)](None, 100)
    assert capsys.readouterr().out == ""


# ---- without a driver -----------------------------------------------------------------------------------------------


def test_decorating_and_importing_touch_no_driver_and_no_cuda():
    out = in_a_child(
        """
        import triton.runtime.driver as module

        def refuse():
            raise SystemExit("a driver was asked for")
        module._create_driver = refuse
        import smart_autotune, triton, torch
        from support.kernels import scaled_copy

        configs = [triton.Config({"BLOCK": b}) for b in (64, 128)]
        decorate = smart_autotune.smart_autotune(configs=configs, key=["n"], restore_value=["y"], batch="x")
        kernel = decorate(triton.heuristics({"n": lambda args: 1})(scaled_copy))
        kernel.records, kernel.cold_keys(), kernel.explain()
        assert not torch.cuda.is_initialized()
        print("decorated", isinstance(kernel, triton.runtime.autotuner.Autotuner))
        """
    )
    assert out.split() == ["decorated", "True"]


def test_the_interpreter_runs_the_first_config_that_the_prune_leaves_and_needs_no_driver():
    pytest.importorskip("numpy")
    out = in_a_child(
        """
        import torch, triton
        import triton.runtime.driver as module
        from smart_autotune import smart_autotune
        from support.kernels import scaled_copy

        def refuse():
            raise SystemExit("a driver was asked for")
        module._create_driver = refuse
        called = []
        configs = [triton.Config({"BLOCK": b}, num_warps=w, pre_hook=lambda args: called.append(args["BLOCK"]))
                   for b, w in ((16, 1), (32, 2), (64, 4))]
        prune = {"early_config_prune": lambda configs, named, **kwargs: configs[1:]}
        kernel = smart_autotune(configs=configs, key=["n"], prune_configs_by=prune)(scaled_copy)
        x, y = torch.arange(63, dtype=torch.float32), torch.full((63,), float("nan"))
        for _ in range(2):
            kernel[lambda meta: (triton.cdiv(63, meta["BLOCK"]),)](x, y, 63, 2.0)
        assert torch.equal(y, 2 * x), y
        assert kernel.best_config is configs[1]
        assert called == [32, 32]
        assert kernel.config_for(x, y, 63, 2.0) is configs[1]
        assert kernel.cache == {} and kernel.records == []
        one = smart_autotune(configs=configs[:1], key=["n"])(scaled_copy)
        one[(4,)](x, y, 63, 3.0)
        assert torch.equal(y, 3 * x)
        print("interpreted")
        """,
        TRITON_INTERPRET="1",
    )
    assert out.split() == ["interpreted"]


def test_a_launch_without_a_driver_says_what_stock_says(monkeypatch):
    monkeypatch.setattr(triton_driver, "_active", None)
    monkeypatch.setattr(triton_driver, "_default", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernel = smart_autotune(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
    with pytest.raises(RuntimeError, match="0 active drivers"):
        kernel[(1,)](*copy_arguments())


# ---- configs, keys and other words of the author --------------------------------------------------------------------


def test_configs_may_be_a_generator(sm_120):
    fake = FakeKernel(shape)
    kernel = smart_autotune(
        configs=(config for config in blocks(4, 2)), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"])
    )(fake)
    assert isinstance(kernel.configs, list) and len(kernel.configs) == 2
    kernel[(1,)](None, 100)
    assert kernel.best_config is kernel.configs[1]


def test_a_generator_given_to_a_decorator_used_twice_serves_both_kernels():
    decorate = smart_autotune(configs=(config for config in blocks(4, 2)), key=["n"])
    assert len(decorate(FakeKernel(shape)).configs) == len(decorate(FakeKernel(shape)).configs) == 2


@pytest.mark.parametrize("empty", [[], (), None, iter(())])
def test_no_configs_means_stocks_default_config(sm_120, empty):
    fake = FakeKernel(shape)
    kernel = smart_autotune(configs=empty, key=["n"])(fake)
    kernel[(1,)](None, 100)
    assert (kernel.best_config.num_warps, kernel.best_config.num_stages, kernel.best_config.kwargs) == (4, 3, {})
    assert (fake.launches[-1]["num_warps"], fake.launches[-1]["num_stages"]) == (4, 3)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"configs": [{"BLOCK": 4}]}, TypeError, r"configs\[0\] is dict; allowed: triton.Config"),
        ({"configs": "BLOCK"}, TypeError, "configs is str"),
        ({"configs": triton.Config({})}, TypeError, "configs is Config"),
        ({"key": "n"}, TypeError, r"shape: key='n'; allowed: a list.*\['n'\]"),
        ({"key": [1]}, TypeError, "shape: key holds 1"),
        ({"reset_to_zero": "x"}, TypeError, "shape: reset_to_zero='x'"),
        ({"restore_value": "x"}, TypeError, "shape: restore_value='x'"),
        ({"tune_args": {}}, TypeError, "shape: tune_args is dict"),
        ({"timed_call": 3}, TypeError, "shape: timed_call is int"),
        ({"examples": []}, TypeError, "shape: examples is list"),
        ({"batch": "z"}, ValueError, "shape: batch='z' names no argument"),
        ({"batch_buckets": [4, 2]}, ValueError, r"shape: batch_buckets=\[4, 2\]"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_the_author_got_wrong_is_said_where_it_was_written(options, error, text):
    with pytest.raises(error, match=text):
        smart_autotune(**{"configs": blocks(1, 2), "key": ["n"], **options})(FakeKernel(shape))


def test_decorating_something_that_is_no_kernel_says_so():
    with pytest.raises(TypeError, match=r"shape.*function.*triton\.jit"):
        smart_autotune(configs=blocks(1), key=[])(shape)


# ---- top_k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0.3, 0.5, 1.0, 1, 2, 7])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_valid_top_k_keeps_what_stock_keeps_and_at_least_one(sm_120, top_k, count):
    kept = []
    for decorate in (triton.autotune, smart_autotune):
        model = {"perf_model": lambda **kwargs: abs(kwargs["BLOCK"] - 2.2), "top_k": top_k}
        kernel = decorated(decorate, blocks(*range(1, count + 1)), prune_configs_by=model)
        kernel.nargs = {"x": None}
        kept.append(kernel.prune_configs({"n": 3}))
        kernel.nargs = None
    stock, ours = kept
    if stock:
        assert ours == stock
    else:
        assert [config.kwargs["BLOCK"] for config in ours] == [2]
    assert len(ours) >= 1


def test_a_share_is_of_all_configs_after_an_early_prune_as_with_stock(sm_120):
    kept = []
    for decorate in (triton.autotune, smart_autotune):
        prune = {
            "early_config_prune": lambda configs, named, **kwargs: configs[4:],
            "perf_model": lambda **kwargs: kwargs["BLOCK"],
            "top_k": 0.5,
        }
        kernel = decorated(decorate, blocks(*range(10)), prune_configs_by=prune)
        kernel.nargs = {"x": None}
        kept.append([config.kwargs["BLOCK"] for config in kernel.prune_configs({"n": 3})])
    assert kept[0] == kept[1] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("top_k", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, ValueError), (0.0, ValueError), (-0.5, ValueError),
     (math.nan, ValueError), (math.inf, ValueError), (True, TypeError), ("2", TypeError), (None, TypeError)],
)  # fmt: skip
def test_an_invalid_top_k_is_an_error_at_decoration_that_says_what_is_allowed(top_k, error):
    model = {"perf_model": lambda **kwargs: 1.0, "top_k": top_k}
    with pytest.raises(error, match=r"shape: top_k=.*allowed: a float in \(0, 1\].*int >= 1"):
        decorated(prune_configs_by=model)


def test_a_prune_function_sees_what_stock_shows_it(sm_120):
    seen = []
    for decorate in (triton.autotune, smart_autotune):

        def prune(configs, named, **kwargs):
            seen.append((list(configs), dict(named), sorted(kwargs)))
            return configs

        kernel = decorated(decorate, prune_configs_by={"early_config_prune": prune})
        kernel[(1,)](None, n=100)
    assert seen[1] == seen[0]


# ---- warmup ---------------------------------------------------------------------------------------------------------


def test_warmup_before_any_run_returns_one_result_a_config_and_sets_no_winner(sm_120):
    kernel = smart_autotune(configs=blocks(64, 128, 256), key=["n"])(fresh(scaled_copy))
    results = kernel.warmup(*copy_arguments(), grid=(1,))
    assert [result.metadata.name for result in results] == ["scaled_copy"] * 3
    assert len({result.hash for result in results}) == 3
    assert not hasattr(kernel, "best_config") and kernel.cache == {} and kernel.records == []
    assert sm_120.launches == [] and sm_120.loaded == []


def test_warmup_takes_types_in_place_of_tensors_as_stocks_does(sm_120):
    kernel = smart_autotune(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
    assert len(kernel.warmup(torch.float32, torch.float32, 100, 2.0, grid=(1,))) == 2


def test_warmup_goes_on_past_a_config_that_fails_and_raises_only_when_all_do(sm_120):
    def fails(values):
        if values["BLOCK"] <= values["n"]:
            raise RuntimeError(f"block {values['BLOCK']}")

    kernel = smart_autotune(configs=blocks(4, 2), key=["n"])(FakeKernel(shape, on_compile=fails))
    assert [result.values["BLOCK"] for result in kernel.warmup(None, 3, grid=(1,))] == [4]
    with pytest.raises(RuntimeError, match="block 4"):
        kernel.warmup(None, 63, grid=(1,))


def test_warmup_respects_the_authors_prune(sm_120):
    prune = {"early_config_prune": lambda configs, named, **kwargs: [configs[named["n"]]]}
    kernel = decorated(prune_configs_by=prune)
    assert [result.values["BLOCK"] for result in kernel.warmup(None, 1, grid=(1,))] == [2]
    empty = decorated(prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: []})
    with pytest.raises(AutotunerError, match="early_config_prune"):
        empty.warmup(None, 1, grid=(1,))


# ---- a config's values given at the call ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_a_value_that_the_configs_set_may_not_be_passed(sm_120, count):
    kernel = decorated(configs=blocks(*range(1, count + 1)))
    with pytest.raises(ValueError, match="shape: Conflicting meta-parameters: 'BLOCK'"):
        kernel[(1,)](None, 100, BLOCK=4)
    assert kernel.fn.launches == [] and kernel.cache == {}


def test_an_option_that_the_configs_set_may_not_be_passed(sm_120):
    kernel = decorated()
    with pytest.raises(TypeError, match=r"shape.*'num_warps'.*multiple values"):
        kernel[(1,)](None, 100, num_warps=8)
    assert kernel.fn.launches == []


# ---- config_for -----------------------------------------------------------------------------------------------------


def test_config_for_tunes_with_a_grid_and_returns_what_the_launch_then_uses(sm_120):
    kernel = decorated()
    config = kernel.config_for(None, 100, grid=(1,))
    assert config is kernel.configs[1] and len(kernel.do_bench.timed) == 3
    timed = len(kernel.fn.launches)
    kernel[(1,)](None, 100)
    assert kernel.best_config is config
    assert len(kernel.fn.launches) == timed + 1
    assert kernel.config_for(None, 100) is config, "known: no grid is needed any more"


def test_config_for_without_a_grid_or_a_timed_call_is_the_first_that_fits_and_launches_nothing(sm_120):
    fake = FakeKernel(shape, on_compile=lambda values: 200_000 if values["BLOCK"] == 4 else 64)
    kernel = smart_autotune(configs=blocks(4, 8, 2), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
    assert kernel.config_for(None, 100) is kernel.configs[1]
    assert fake.launches == [] and kernel.records == []
    assert len(kernel.cold_keys()) == 1
    kernel[(1,)](None, 100)
    assert kernel.config_for(None, 100) is kernel.configs[2], "tuned by the launch"
    assert kernel.cold_keys() == []


def test_config_for_with_a_timed_call_tunes_without_a_grid(sm_120):
    timed = []
    kernel = decorated(
        timed_call=lambda named, config: lambda: timed.append(config.kwargs["BLOCK"]),
        do_bench=lambda run, quantiles: run() or float(abs(timed[-1] - 8)),
    )
    assert kernel.config_for(None, 100) is kernel.configs[2]
    assert timed == [4, 2, 8] and kernel.fn.launches == []


def test_config_for_a_kernel_with_one_config_is_that_config(sm_120):
    kernel = decorated(configs=blocks(4))
    assert kernel.config_for(None, 100) is kernel.configs[0]


def test_config_for_a_kernel_with_one_config_that_does_not_fit_is_the_rescued_one_that_a_launch_uses(sm_120):
    fake = FakeKernel(shape, on_compile=lambda values: 60_000 * (values["num_stages"] - 1))
    kernel = smart_autotune(configs=blocks(4), key=["n"])(fake)
    assert kernel.config_for(None, 100, grid=(1,)).num_stages == 2
    kernel[(1,)](None, 100)
    assert fake.launches[-1]["num_stages"] == 2


def test_config_for_fits_the_specialisation_at_hand(sm_120):
    fake = FakeKernel(shape, on_compile=lambda values: 200_000 if values["BLOCK"] == 2 and values["x"] else 64)
    kernel = smart_autotune(configs=blocks(4, 2), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
    kernel[(1,)](None, 100)
    assert kernel.config_for(None, 100) is kernel.configs[1]
    assert kernel.config_for(True, 100) is kernel.configs[0]


# ---- off ------------------------------------------------------------------------------------------------------------


def test_mode_stock_is_tritons_own_tuner(sm_120):
    kernel = decorated()
    with settings.override(mode="stock"):
        kernel[(1,)](None, 100)
    assert list(kernel.cache) == [(100,)]
    assert kernel.fn.compiles == [] and kernel.records == []
