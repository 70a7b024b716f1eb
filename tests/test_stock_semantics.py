"""What a tuned kernel's author may rely on: each scene is played on stock Triton first, then compared.

Played three times: by stock again (a scene must repeat itself), by our decorator, and by stock's decorator under our
patch. Times are scripted, launches are noted; what is compared is who was launched, which hooks ran with which
arguments, and who won.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from smart_autotune import smart_autotune
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy
from support.patching import on_the_verified_triton, patched
from support.stub_driver import ScriptedBench, StubDriver, active

STOCK = (triton.autotune, nullcontext)
WAYS = {"stock": STOCK, "decorated": (smart_autotune, nullcontext), "patched": (triton.autotune, patched)}


@pytest.fixture(
    params=[
        pytest.param(way, id=name, marks=on_the_verified_triton if name == "patched" else ())
        for name, way in WAYS.items()
    ]
)
def same(request, sm_120):
    """``same(scene)``: what the scene tells on stock, which this way must tell too. ``scene(decorate)`` returns it."""

    def played(way, scene):
        decorate, surroundings = way
        with surroundings():
            return scene(decorate)

    def compare(scene):
        expected = played(STOCK, scene)
        assert played(request.param, scene) == expected
        return expected

    return compare


class Scene:
    """A kernel and a diary of all that happens to it, in order."""

    def __init__(self, function=None, on_launch=None, **options):
        self.diary = []
        self._change = on_launch or (lambda values: None)
        self.fake = FakeKernel(function or shape, on_launch=self._launched, **options)

    def _launched(self, values):
        tensors = {name: v.tolist() for name, v in values.items() if isinstance(v, torch.Tensor)}
        self.note("launch", values["BLOCK"], values["num_warps"], tensors)
        self._change(values)

    def note(self, *what):
        self.diary.append(what)

    def hook(self, name):
        """A hook that notes what it is told: tensors as lists, everything by name."""

        def hook(arguments, **options):
            values = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in sorted(arguments.items())}
            self.note(name, values, {k: _plain(v) for k, v in options.items()})

        return hook

    def bench(self, time_ms=lambda values: values["BLOCK"]):
        fake_bench = self.fake.bench(time_ms)

        def bench(run, quantiles):
            self.note("bench", quantiles)
            return fake_bench(run, quantiles)

        return bench

    def tuner(self, decorate, configs=None, key=("n",), time_ms=lambda values: values["BLOCK"], **options):
        options.setdefault("do_bench", self.bench(time_ms))
        return decorate(configs=configs or blocks(4, 2, 8), key=list(key), **options)(self.fake)

    def launches(self):
        return [entry[1] for entry in self.diary if entry[0] == "launch"]


def _plain(value):
    return type(value).__name__ if isinstance(value, BaseException) else value


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def two(x, y, n, BLOCK=1):
    """x, y: tensors. n: an int."""


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def outcome(kernel):
    """What others read off a tuner after a run. Keys of the cache are its own business, their number is not."""
    return {
        "best": str(kernel.best_config),
        "winners": [str(config) for config in kernel.cache.values()],
        "timings": {str(config): list(ms) for config, ms in getattr(kernel, "configs_timings", {}).items()},
        "timed": hasattr(kernel, "bench_time"),
    }


# ---- tuning and serving ----------------------------------------------------------------------------------------------


def test_each_config_is_launched_once_to_be_timed_and_the_winner_serves(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate)
        for _ in range(3):
            kernel[(1,)](None, 100)
        return it.diary, outcome(kernel)

    diary, found = same(scene)
    assert [entry[1] for entry in diary if entry[0] == "launch"] == [4, 2, 8, 2, 2, 2]
    assert "BLOCK: 2," in found["best"]


@pytest.mark.parametrize("times", [(3, 1, 2), (1, 2, 3), (3, 2, 1), (1, 3, 1.5)], ids=str)
def test_the_winner_is_the_fastest_of_the_scripted_times(same, times):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, time_ms=lambda values: dict(zip((4, 2, 8), times))[values["BLOCK"]])
        kernel[(1,)](None, 100)
        return it.diary, outcome(kernel)

    _, found = same(scene)
    assert f"BLOCK: {(4, 2, 8)[times.index(min(times))]}," in found["best"]


def test_configs_that_differ_in_launch_options_are_launched_with_them(same):
    configs = [triton.Config({"BLOCK": 4}, num_warps=warps) for warps in (1, 2, 8)]

    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, configs, time_ms=lambda values: abs(values["num_warps"] - 2))
        kernel[(1,)](None, 100)
        return it.diary, outcome(kernel)

    diary, _ = same(scene)
    assert [entry[2] for entry in diary if entry[0] == "launch"] == [1, 2, 8, 2]


def test_only_what_the_key_names_and_dtypes_make_it_tune_again(same):
    def scene(decorate):
        it = Scene(two)
        kernel = it.tuner(decorate)
        half, full = torch.zeros(3, dtype=torch.float16), torch.zeros(3)
        counts = []
        for x, y, n in (
            (full, full, 1),
            (full, full, 1),
            (full, full, 2),
            (half, full, 2),
            (full, half, 2),
            (full, full, 1),
        ):
            kernel[(1,)](x, y, n)
            counts.append(len(it.launches()))
        return counts, len(kernel.cache)

    assert same(scene) == ([4, 5, 9, 13, 17, 18], 4)


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_without_a_key_one_tuning_serves_all_values(same, by_name):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, key=())
        for n in (1, 2, 3):
            kernel[(1,)](None, **{"n": n}) if by_name else kernel[(1,)](None, n)
        return it.diary, outcome(kernel)

    diary, _ = same(scene)
    assert sum(entry[0] == "bench" for entry in diary) == 3


def test_a_value_given_by_keyword_selects_like_one_given_by_position(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate)
        kernel[(1,)](None, 7)
        kernel[(1,)](x=None, n=7)
        kernel[(1,)](n=7, x=None)
        return it.launches(), len(kernel.cache)

    assert same(scene) == ([4, 2, 8, 2, 2, 2], 1)


def test_clearing_the_cache_means_tuning_again(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate)
        kernel[(1,)](None, 7)
        kernel.cache.clear()
        kernel[(1,)](None, 7)
        return it.launches()

    assert same(scene) == [4, 2, 8, 2] * 2


def test_one_config_is_launched_without_timing_it_and_without_hooks_of_the_tuner(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, blocks(4), pre_hook=it.hook("pre"), post_hook=it.hook("post"))
        for _ in range(2):
            kernel[(1,)](torch.ones(2), 7)
        return it.diary, outcome(kernel)

    diary, found = same(scene)
    assert [entry[0] for entry in diary] == ["launch", "launch"]
    assert found["winners"] == [] and not found["timed"]


def test_one_configs_own_hook_runs_before_each_launch(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, blocks(4, pre_hook=it.hook("config")))
        for _ in range(2):
            kernel[(1,)](torch.ones(2), 7)
        return it.diary

    assert [entry[0] for entry in same(scene)] == ["config", "launch"] * 2


def test_no_configs_at_all_mean_tritons_default_one(same):
    def scene(decorate):
        it = Scene()
        kernel = decorate(configs=[], key=["n"])(it.fake)
        kernel[(1,)](None, 7)
        return it.diary, str(kernel.best_config)

    assert len(same(scene)[0]) == 1


def test_a_run_that_only_compiles_launches_nothing(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, blocks(4))
        kernel.run(None, 7, grid=(1,), warmup=True)
        return it.diary

    assert same(scene) == []


def test_run_called_as_jit_code_calls_it_is_the_same_as_a_launch(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate)
        kernel.run(None, 7, grid=(1,), warmup=False)
        kernel.run(None, n=7, grid=(1,), warmup=False)
        return it.diary, outcome(kernel)

    same(scene)


# ---- reset and restore -----------------------------------------------------------------------------------------------


def add_one(values):
    values["x"] += 1


def named(values, by_name):
    return ((), values) if by_name else (tuple(values.values()), {})


BY_NAME = pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])


@BY_NAME
def test_restore_value_shows_every_timed_launch_and_the_callers_the_same_values(same, by_name):
    def scene(decorate):
        it, x = Scene(on_launch=add_one), torch.tensor([5.0, 7.0])
        kernel = it.tuner(decorate, restore_value=["x"])
        args, kwargs = named({"x": x, "n": 7}, by_name)
        kernel[(1,)](*args, **kwargs)
        kernel[(1,)](*args, **kwargs)
        return it.diary, x.tolist()

    diary, x = same(scene)
    assert [entry[3]["x"] for entry in diary if entry[0] == "launch"] == [[5, 7]] * 4 + [[6, 8]]
    assert x == [7, 9], "one for each launch that the caller asked for"


@BY_NAME
def test_reset_to_zero_zeroes_before_every_timed_launch_and_before_the_first_of_the_winner(same, by_name):
    def scene(decorate):
        it, x = Scene(on_launch=add_one), torch.tensor([5.0, 7.0])
        kernel = it.tuner(decorate, reset_to_zero=["x"])
        args, kwargs = named({"x": x, "n": 7}, by_name)
        kernel[(1,)](*args, **kwargs)
        kernel[(1,)](*args, **kwargs)
        return it.diary, x.tolist()

    diary, x = same(scene)
    assert [entry[3]["x"] for entry in diary if entry[0] == "launch"] == [[0, 0]] * 4 + [[1, 1]]
    assert x == [2, 2]


def test_both_lists_together_work_on_their_own_tensors(same):
    def change(values):
        values["x"] += 1
        values["y"] += 1

    def scene(decorate):
        it, x, y = Scene(two, on_launch=change), torch.ones(2), torch.ones(2)
        kernel = it.tuner(decorate, reset_to_zero=["x"], restore_value=["y"])
        for _ in range(2):
            kernel[(1,)](x, y, 7)
        return it.diary, x.tolist(), y.tolist()

    _, x, y = same(scene)
    assert (x, y) == ([2, 2], [3, 3])


def test_a_view_is_restored_in_place(same):
    def scene(decorate):
        it, base = Scene(on_launch=add_one), torch.arange(6.0)
        kernel = it.tuner(decorate, restore_value=["x"])
        kernel[(1,)](base[::2], 7)
        return it.diary, base.tolist()

    assert same(scene)[1] == [1, 1, 3, 3, 5, 5]


# ---- hooks -----------------------------------------------------------------------------------------------------------


@BY_NAME
def test_the_tuners_hooks_run_around_every_timed_launch_with_every_argument_and_the_configs_values(same, by_name):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, pre_hook=it.hook("pre"), post_hook=it.hook("post"))
        args, kwargs = named({"x": torch.ones(2), "n": 7}, by_name)
        for _ in range(2):
            kernel[(1,)](*args, **kwargs)
        return it.diary

    diary = same(scene)
    assert [entry[0] for entry in diary] == ["bench", "pre", "launch", "post"] * 3 + ["pre", "launch", "launch"]
    assert diary[1][1] == {
        "BLOCK": 4, "grid": (1,), "ir_override": None, "maxnreg": None, "n": 7, "num_ctas": 1, "num_stages": 3,
        "num_warps": 4, "warmup": False, "x": [1.0, 1.0],
    } or diary[1][1].items() >= {"BLOCK": 4, "grid": (1,), "n": 7, "num_warps": 4, "x": [1.0, 1.0]}.items()  # fmt: skip
    assert diary[1][2] == {} and diary[3][2] == {"exception": None}
    assert diary[-3][2] == {"reset_only": True}, "once more, for the winner's own launch"


def test_a_hook_of_the_authors_replaces_the_one_that_resets(same):
    def scene(decorate):
        it, x = Scene(on_launch=add_one), torch.ones(2)
        kernel = it.tuner(decorate, reset_to_zero=["x"], pre_hook=it.hook("pre"))
        kernel[(1,)](x, 7)
        return it.diary, x.tolist()

    assert same(scene)[1] == [5, 5], "never zeroed"


def test_a_post_hook_is_told_which_exception_a_timed_launch_ended_with(same):
    def refuses(values):
        if values["BLOCK"] == 2:
            raise OutOfResources(200_000, 101_376, "shared memory")

    def scene(decorate):
        it = Scene(on_launch=refuses)
        kernel = it.tuner(decorate, post_hook=it.hook("post"))
        kernel[(1,)](None, 7)
        return it.diary, outcome(kernel)

    diary, found = same(scene)
    assert [entry[2]["exception"] for entry in diary if entry[0] == "post"] == [None, "OutOfResources", None]
    assert "BLOCK: 4," in found["best"]


def test_a_configs_own_hook_sees_its_values_before_the_tuners_hook_and_before_every_launch(same):
    def scene(decorate):
        it = Scene()
        configs = [triton.Config({"BLOCK": size}, pre_hook=it.hook(f"config {size}")) for size in (4, 2)]
        kernel = it.tuner(decorate, configs, pre_hook=it.hook("pre"))
        for _ in range(2):
            kernel[(1,)](torch.ones(2), 7)
        return it.diary

    diary = same(scene)
    names = [entry[0] for entry in diary]
    assert names == [
        "bench", "config 4", "pre", "launch", "bench", "config 2", "pre", "launch",
        "pre", "config 2", "launch", "config 2", "launch",
    ]  # fmt: skip
    assert {entry[0]: entry[1]["BLOCK"] for entry in diary if entry[0].startswith("config")} == {
        "config 4": 4, "config 2": 2,
    }  # fmt: skip


def test_what_a_configs_hook_writes_to_an_argument_is_what_the_launch_sees(same):
    def scene(decorate):
        def fill(arguments):
            arguments["x"].fill_(arguments["BLOCK"])

        it = Scene()
        kernel = it.tuner(decorate, [triton.Config({"BLOCK": size}, pre_hook=fill) for size in (4, 2)])
        kernel[(1,)](torch.ones(2), 7)
        return it.diary

    assert [entry[3]["x"] for entry in same(scene) if entry[0] == "launch"] == [[4, 4], [2, 2], [2, 2]]


# ---- pruning ---------------------------------------------------------------------------------------------------------


@BY_NAME
def test_the_authors_prune_is_asked_once_a_key_with_all_arguments_and_only_what_it_keeps_is_timed(same, by_name):
    def scene(decorate):
        def prune(configs, nargs, **kwargs):
            it.note(
                "prune", len(configs), {k: str(v) for k, v in nargs.items()}, {k: str(v) for k, v in kwargs.items()}
            )
            return [config for config in configs if config.kwargs["BLOCK"] != 2]

        it = Scene()
        kernel = it.tuner(decorate, prune_configs_by={"early_config_prune": prune})
        args, kwargs = named({"x": None, "n": 7}, by_name)
        for _ in range(2):
            kernel[(1,)](*args, **kwargs)
        return it.diary, outcome(kernel)

    diary, found = same(scene)
    assert [entry[0] for entry in diary].count("prune") == 1
    assert diary[0][2].keys() | diary[0][3].keys() == {"x", "n", "grid", "warmup"}
    assert "BLOCK: 4," in found["best"] and len(found["timings"]) == 2


@pytest.mark.parametrize("top_k", [2, 0.67, 1.0, 10], ids=str)
def test_the_performance_model_keeps_the_top_k_in_its_own_order(same, top_k):
    def scene(decorate):
        def model(**values):
            it.note("model", {name: str(value) for name, value in sorted(values.items())})
            return -values["BLOCK"]  # believes that big is fast

        it = Scene()
        kernel = it.tuner(decorate, blocks(4, 2, 8), prune_configs_by={"perf_model": model, "top_k": top_k})
        kernel[(1,)](None, 7)
        return it.diary, outcome(kernel)

    diary, found = same(scene)
    asked = [entry for entry in diary if entry[0] == "model"]
    assert len(asked) == (3 if top_k in (2, 0.67) else 0)
    assert list(dict.fromkeys(entry[1] for entry in diary if entry[0] == "launch")) == (
        [8, 4] if top_k in (2, 0.67) else [4, 2, 8]
    )
    assert ("BLOCK: 4," in found["best"]) is (top_k in (2, 0.67))


def test_prune_and_model_together_prune_first(same):
    def scene(decorate):
        def prune(configs, nargs, **kwargs):
            it.note("prune")
            return configs[1:]

        def model(**values):
            it.note("model", values["BLOCK"])
            return values["BLOCK"]

        it = Scene()
        how = {"early_config_prune": prune, "perf_model": model, "top_k": 2}
        kernel = it.tuner(decorate, blocks(1, 4, 2, 8), prune_configs_by=how)
        kernel[(1,)](None, 7)
        return it.diary, outcome(kernel)

    diary, _ = same(scene)
    assert diary[:4] == [("prune",), ("model", 4), ("model", 2), ("model", 8)]


def test_a_prune_that_keeps_nothing_is_stocks_error_and_nothing_is_cached(same):
    def scene(decorate):
        it = Scene()
        kernel = it.tuner(decorate, prune_configs_by={"early_config_prune": lambda configs, nargs, **kwargs: []})
        with pytest.raises(triton.runtime.errors.AutotunerError, match="No valid autotuner configs after pruning"):
            kernel[(1,)](None, 7)
        return it.diary, len(kernel.cache)

    assert same(scene) == ([], 0)


# ---- warmup, do_bench ------------------------------------------------------------------------------------------------


def test_warmup_compiles_what_the_prune_keeps_launches_nothing_and_sets_no_winner(same):
    def scene(decorate):
        kernel = decorate(
            configs=blocks(64, 128, 256),
            key=["n"],
            prune_configs_by={"early_config_prune": lambda configs, nargs, **kwargs: configs[1:]},
        )(fresh(scaled_copy))
        with active(StubDriver(120)) as driver:
            compiled = kernel.warmup(*copy_arguments(), grid=(1,))
        names = [one.metadata.name for one in compiled]
        return names, len(driver.launches), hasattr(kernel, "best_config"), len(kernel.cache)

    assert same(scene) == (["scaled_copy"] * 2, 0, False, 0)


def test_the_drivers_benchmark_is_used_when_none_is_given(same):
    def scene(decorate):
        driver = StubDriver(120)
        driver.bench = bench = ScriptedBench(driver, lambda launch: launch.metadata.num_warps)
        configs = [triton.Config({"BLOCK": 64}, num_warps=warps) for warps in (4, 1, 2)]
        kernel = decorate(configs=configs, key=["n"])(fresh(scaled_copy))
        with active(driver):
            for _ in range(2):
                kernel[(1,)](*copy_arguments())
        launches = [(launch.metadata.num_warps, launch.grid) for launch in driver.launches]
        return launches, len(bench.timed), str(kernel.best_config)

    launches, timed, _ = same(scene)
    assert [warps for warps, _ in launches] == [4, 1, 2, 1, 1] and timed == 3


def test_an_exception_of_the_benchmark_reaches_the_caller_or_loses_and_nothing_wrong_is_cached(same):
    def scene(decorate):
        def bench(run, quantiles):
            run()
            raise OutOfResources(200_000, 101_376, "shared memory") if len(it.launches()) == 1 else StopIteration

        it = Scene()
        kernel = it.tuner(decorate, blocks(4), do_bench=bench)
        kernel[(1,)](None, 7)  # one config: never timed
        return it.launches()

    assert same(scene) == [4]


# ---- the grid, the arguments -----------------------------------------------------------------------------------------


def test_a_grid_function_is_called_with_each_configs_values(same):
    def scene(decorate):
        driver, seen = StubDriver(120), []

        def grid(meta):
            seen.append((meta["BLOCK"], meta["n"]))
            return (triton.cdiv(meta["n"], meta["BLOCK"]),)

        kernel = decorate(configs=blocks(64, 512), key=["n"], do_bench=timed_by_grid(driver))(fresh(scaled_copy))
        with active(driver):
            for _ in range(2):
                kernel[grid](*copy_arguments(1000))
        return [launch.grid[0] for launch in driver.launches], set(seen), str(kernel.best_config)

    grids, seen, _ = same(scene)
    assert grids == [16, 2, 2, 2] and seen == {(64, 1000), (512, 1000)}


def timed_by_grid(driver):
    return ScriptedBench(driver, lambda launch: launch.grid[0])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((None, 7), {"BLOCK": 4}), ((None,), {}), ((None, 7), {"unknown": 1}), ((None, 7, 4), {}),
        ((None, 7), {"num_warps": 8}),
    ],
    ids=["a config's value", "one missing", "one unknown", "a config's value by position", "a launch option"],
)  # fmt: skip
def test_a_call_that_stock_refuses_is_refused_by_the_same_kind_of_error_and_nothing_is_cached(same, args, kwargs):
    def scene(decorate):
        kernel = decorate(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
        with pytest.raises((TypeError, ValueError, KeyError)) as caught:
            kernel[(1,)](*args, **kwargs)
        kinds = (TypeError, ValueError, KeyError)
        return [kind for kind in kinds if isinstance(caught.value, kind)]

    same(scene)


# ---- heuristics ------------------------------------------------------------------------------------------------------


def with_even(x, n, EVEN, BLOCK=1):
    """EVEN: set by a heuristic."""


def is_even(arguments):
    return arguments["n"] % 2 == 0


def test_heuristics_above_set_their_values_before_tuning_and_may_be_in_the_key(same):
    def scene(decorate):
        it = Scene(with_even)
        tuner = it.tuner(decorate, key=("EVEN",))
        kernel = triton.heuristics({"EVEN": is_even})(tuner)
        for n in (2, 4, 3, 6):
            kernel[(1,)](None, n)
        return it.launches(), outcome(tuner), [launch["EVEN"] for launch in it.fake.launches]

    launches, _, even = same(scene)
    assert launches == [4, 2, 8, 2, 2, 4, 2, 8, 2, 2]
    assert even == [True] * 5 + [False] * 4 + [True]


def test_heuristics_below_see_each_configs_values(same):
    def scene(decorate):
        it = Scene(with_even)
        below = triton.heuristics({"EVEN": lambda arguments: (arguments["n"], arguments["BLOCK"])})(it.fake)
        kernel = decorate(configs=blocks(4, 2, 8), key=["n"], do_bench=it.bench())(below)
        for _ in range(2):
            kernel[(1,)](None, 6)
        return it.launches(), outcome(kernel), [launch["EVEN"] for launch in it.fake.launches]

    assert same(scene)[2] == [(6, 4), (6, 2), (6, 8), (6, 2), (6, 2)]


# ---- results on disk -------------------------------------------------------------------------------------------------


@contextmanager
def own_cache(monkeypatch, folder):
    with monkeypatch.context() as scope:
        scope.setenv("TRITON_CACHE_DIR", str(folder))
        yield


@pytest.mark.parametrize("asked_by", ["cache_results", "TRITON_CACHE_AUTOTUNING"])
def test_results_that_are_kept_on_disk_spare_the_next_process_the_timing(same, monkeypatch, tmp_path_factory, asked_by):
    if asked_by == "TRITON_CACHE_AUTOTUNING":
        monkeypatch.setenv(asked_by, "1")
    options = {"cache_results": True} if asked_by == "cache_results" else {}

    def scene(decorate):
        found = []
        with own_cache(monkeypatch, tmp_path_factory.mktemp("results")):
            for _ in range(2):  # a process each, as far as this kernel's memory goes
                driver = StubDriver(120)
                bench = ScriptedBench(driver, lambda launch: 3 - launch.metadata.num_warps)
                configs = [triton.Config({"BLOCK": 64}, num_warps=warps) for warps in (1, 2)]
                kernel = decorate(configs=configs, key=["n"], do_bench=bench, **options)(fresh(scaled_copy))
                with active(driver):
                    kernel[(1,)](*copy_arguments())
                found.append(
                    (len(bench.timed), [it.metadata.num_warps for it in driver.launches], outcome(kernel)["best"])
                )
        return found

    (first, launched, _), (second, served, _) = same(scene)
    assert (first, launched) == (2, [1, 2, 2])
    assert (second, served) == (0, [2])


def test_configs_with_hooks_are_timed_in_every_process_since_hooks_cannot_be_stored(
    same, monkeypatch, tmp_path_factory
):
    def scene(decorate):
        counts = []
        with own_cache(monkeypatch, tmp_path_factory.mktemp("results")):
            for _ in range(2):
                driver = StubDriver(120)
                bench = ScriptedBench(driver, lambda launch: launch.metadata.num_warps)
                configs = [
                    triton.Config({"BLOCK": 64}, num_warps=warps, pre_hook=lambda arguments: None) for warps in (1, 2)
                ]
                kernel = decorate(configs=configs, key=["n"], do_bench=bench, cache_results=True)(fresh(scaled_copy))
                with active(driver):
                    kernel[(1,)](*copy_arguments())
                counts.append(len(bench.timed))
        return counts

    assert same(scene) == [2, 2]
