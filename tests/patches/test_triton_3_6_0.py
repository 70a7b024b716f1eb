"""The seam: which calls it routes into the engine, which it leaves alone, and that it goes without a trace."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import threading
import time
import types

import numpy
import pytest
import torch
import triton
import wrapt
from triton.runtime.autotuner import Autotuner

import smart_autotune as package
from smart_autotune import SmartAutotuner, settings, smart_autotune
from smart_autotune.patches import triton_3_6_0 as patch
from support.fake_kernel import FakeKernel
from support.kernels import copy_arguments, fresh, scaled_copy
from support.patching import on_the_verified_triton

pytestmark = on_the_verified_triton
STOCK_RUN = vars(Autotuner)["run"]


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def stock(fake=None, cls=None, configs=None, **options):
    """A stock tuner, each config as slow as its block is big."""
    fake = fake or FakeKernel(shape)
    options.setdefault("do_bench", fake.bench(lambda values: values["BLOCK"]))
    options = {"key": ["n"], "reset_to_zero": None, "restore_value": None, **options}
    return (cls or Autotuner)(fake, fake.arg_names, configs=configs or blocks(4, 2, 8), **options)


def records_of(kernel):
    return list(kernel.__dict__[patch._SLOT].engine.records)


def is_ours(kernel):
    """Whether our engine served the kernel's launches so far."""
    slot = kernel.__dict__.get(patch._SLOT)
    return slot is not None and slot.engine is not None and bool(kernel.cache) and len(records_of(kernel)) > 0


def launched(kernel, *args, **kwargs):
    kernel[(1,)](*(args or (None, 100)), **kwargs)
    return kernel


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


# ---- apply and revert ------------------------------------------------------------------------------------------------


def test_this_triton_passes_the_gate():
    assert patch.conflict() is None


def test_only_the_run_method_is_replaced():
    names = ("Autotuner", "Config", "Heuristics", "autotune", "heuristics")
    before = dict(vars(Autotuner)), {name: getattr(triton.runtime.autotuner, name) for name in names}
    assert patch.apply() is None
    after = dict(vars(Autotuner)), {name: getattr(triton.runtime.autotuner, name) for name in names}
    assert {name for name in before[0] if before[0][name] is not after[0][name]} == {"run"}
    assert before[0].keys() == after[0].keys()
    assert after[1] == before[1]
    assert triton.autotune is triton.runtime.autotuner.autotune


def test_applying_twice_is_applying_once():
    patch.apply()
    first = Autotuner.run
    assert patch.apply() is None
    assert Autotuner.run is first
    patch.revert()
    assert vars(Autotuner)["run"] is STOCK_RUN


def test_revert_puts_the_very_object_back_and_reverting_twice_is_reverting_once():
    for _ in range(3):
        patch.apply()
        assert vars(Autotuner)["run"] is not STOCK_RUN and patch.is_applied() and patch.is_active()
        for _ in range(2):
            assert patch.revert() is None
            assert vars(Autotuner)["run"] is STOCK_RUN and not patch.is_applied() and not patch.is_active()


def test_reverting_what_was_never_applied_does_nothing():
    assert patch.revert() is None
    assert vars(Autotuner)["run"] is STOCK_RUN


def test_signatures_and_names_that_others_read_are_unchanged():
    readers = (
        lambda: inspect.signature(triton.autotune),
        lambda: inspect.signature(Autotuner.__init__),
        lambda: inspect.signature(Autotuner.run),
        lambda: (Autotuner.run.__name__, Autotuner.run.__qualname__, Autotuner.run.__module__, Autotuner.run.__doc__),
        lambda: "cache_results" in inspect.signature(triton.autotune).parameters,
    )
    before = [read() for read in readers]
    patch.apply()
    assert [read() for read in readers] == before


def test_others_can_read_off_the_method_which_patch_it_is():
    patch.apply()
    assert getattr(Autotuner.run, patch.MARK) == "triton-3.6.0"


def test_applying_neither_creates_the_driver_nor_initialises_cuda():
    before = triton.runtime.driver._active, triton.runtime.driver._default
    patch.apply()
    stock()
    assert (triton.runtime.driver._active, triton.runtime.driver._default) == before
    assert not torch.cuda.is_initialized()


# ---- foreign patches -------------------------------------------------------------------------------------------------


def foreign_run(self, *args, **kwargs):
    """Somebody else's: calls what was there before."""
    return foreign_run.before(self, *args, **kwargs)


def put_foreign():
    foreign_run.before = vars(Autotuner)["run"]
    Autotuner.run = foreign_run
    return foreign_run


FOREIGN = {
    "a function of theirs": lambda: foreign_run,
    "a wrapt proxy": lambda: wrapt.FunctionWrapper(STOCK_RUN, lambda wrapped, self, args, kwargs: wrapped(*args)),
    "stock's code in their module": lambda: types.FunctionType(STOCK_RUN.__code__, {"__name__": "theirs"}),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_patch_that_was_there_before_is_refused_named_and_left_in_force(make):
    theirs = make()
    Autotuner.run = theirs
    conflict = patch.apply()
    assert conflict.expected == "Autotuner.run of triton.runtime.autotuner"
    assert conflict.found.startswith("one put there by ")
    assert conflict.found.endswith((__name__, "wrapt.wrappers.FunctionWrapper", "FunctionWrapper", "theirs"))
    assert vars(Autotuner)["run"] is theirs
    assert not patch.is_active()


@pytest.mark.parametrize("name", ["__init__", "prune_configs", "check_disk_cache"])
def test_a_foreign_patch_of_a_method_that_the_engine_relies_on_is_refused_too(monkeypatch, name):
    monkeypatch.setattr(Autotuner, name, foreign_run)
    assert patch.apply().expected == f"Autotuner.{name} of triton.runtime.autotuner"
    assert vars(Autotuner)["run"] is STOCK_RUN


def test_a_class_put_in_the_place_of_autotuner_is_refused(monkeypatch):
    class Theirs(Autotuner):
        pass

    monkeypatch.setattr(triton.runtime.autotuner, "Autotuner", Theirs)
    assert patch.apply().found == "none of that name"
    assert "run" not in vars(Theirs)


def test_after_a_foreign_patch_is_gone_ours_can_be_applied():
    put_foreign()
    assert patch.apply() is not None
    Autotuner.run = STOCK_RUN
    assert patch.apply() is None
    assert patch.is_applied()


def test_a_patch_put_over_ours_is_reported_by_status_and_the_calls_it_passes_on_are_served(sm_120):
    package.enable()
    put_foreign()
    (conflict,) = package.status().conflicts
    assert (conflict.expected, conflict.found) == ("our own Autotuner.run", f"one put there by {__name__}")
    assert is_ours(launched(stock()))


def test_where_a_patch_was_put_over_ours_revert_steps_aside_and_says_so(sm_120):
    patch.apply()
    theirs = put_foreign()
    conflict = patch.revert()
    assert conflict.found == f"one put there by {__name__}"
    assert conflict.consequence == "ours passes its calls to stock"
    assert vars(Autotuner)["run"] is theirs
    assert not is_ours(launched(stock())), "ours is still in the chain, but passes calls through"


def test_once_the_patch_over_ours_is_gone_revert_puts_stock_back():
    patch.apply()
    ours = vars(Autotuner)["run"]
    put_foreign()
    assert patch.revert() is not None
    Autotuner.run = ours
    assert patch.revert() is None
    assert vars(Autotuner)["run"] is STOCK_RUN


def test_a_patch_that_puts_stock_back_over_ours_leaves_ours_to_be_applied_again():
    patch.apply()
    Autotuner.run = STOCK_RUN
    assert not patch.is_applied()
    assert patch.apply() is None
    assert patch.is_applied()
    patch.revert()
    assert vars(Autotuner)["run"] is STOCK_RUN


# ---- which tuners it reaches -----------------------------------------------------------------------------------------


def test_tuners_made_before_and_after_are_routed_and_counted(sm_120):
    gc.collect()
    before = [stock() for _ in range(2)]
    launched(before[0])
    assert not before[0].__dict__.keys() & {patch._SLOT}
    package.enable()
    counted = package.status()
    after = [stock() for _ in range(3)]
    for kernel in (*before, *after):
        launched(kernel, None, 200)
        assert is_ours(kernel)
    now = package.status()
    assert now.tuners_before == counted.tuners_before >= 2
    assert now.tuners_after - counted.tuners_after == 3


def test_what_is_counted_outlives_gc_freeze_and_does_not_keep_a_tuner_alive(sm_120):
    gc.collect()
    before = stock()
    package.enable()
    seen = package.status().tuners_before
    after = launched(stock())
    gc.freeze()  # a server does this before it captures; the collector shows no frozen object
    try:
        assert package.status().tuners_before == seen
        assert package.status().tuners_after >= 1
    finally:
        gc.unfreeze()
    del before, after
    gc.collect()
    assert package.status().tuners_before == seen - 1


def test_a_tuner_that_is_not_hashable_is_counted_like_any_other():
    class Unhashable(Autotuner):
        __hash__ = None

    kernel = stock(cls=Unhashable)
    package.enable()
    assert package.status().tuners_before >= 1
    del kernel


def test_names_bound_to_the_decorator_before_are_reached(sm_120):
    from triton import autotune

    package.enable()
    kernel = autotune(configs=blocks(4, 2), key=["n"])(FakeKernel(shape))
    assert is_ours(launched(kernel))


def test_a_kernel_under_heuristics_is_reached(sm_120):
    package.enable()
    below = stock()
    kernel = triton.heuristics({"n": lambda args: 100})(below)
    kernel[(1,)](None)
    assert is_ours(below)
    assert records_of(below)[0].key.values == (("n", "int", 100),)


class CallsSuper(Autotuner):
    """As flash-linear-attention's: looks up something of its own first."""

    def run(self, *args, **kwargs):
        self.asked = getattr(self, "asked", 0) + 1
        return super().run(*args, **kwargs)


class OwnRun(Autotuner):
    """As FlagGems': replaces the method altogether."""

    def run(self, *args, **kwargs):
        self.served = getattr(self, "served", 0) + 1
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


class Inherits(Autotuner):
    """Adds nothing to ``run``."""


@pytest.mark.parametrize("cls", [CallsSuper, Inherits])
def test_a_subclass_that_goes_through_stocks_method_is_tuned_by_us(sm_120, cls):
    package.enable()
    kernel = launched(stock(cls=cls))
    assert is_ours(kernel)
    assert getattr(kernel, "asked", 1) == 1


def test_a_subclass_with_its_own_run_is_left_alone_and_reported(sm_120):
    package.enable()
    kernel = launched(stock(cls=OwnRun))
    assert kernel.served == 1
    assert patch._SLOT not in kernel.__dict__
    found = package.status().foreign_subclasses
    assert f"{__name__}.OwnRun (left alone)" in found
    assert f"{__name__}.CallsSuper (calls stock's: tuned by us)" in found
    assert not any("Inherits" in name or "SmartAutotuner" in name for name in found)
    assert f"subclass with its own run: {__name__}.OwnRun (left alone)" in str(package.status())


def test_a_subclass_of_a_subclass_that_calls_the_base_by_name_is_reported_as_tuned(sm_120):
    class ByName(Inherits):
        def run(self, *args, **kwargs):
            return Autotuner.run(self, *args, **kwargs)

    package.enable()
    assert is_ours(launched(stock(cls=ByName)))
    assert any("ByName (calls stock's" in name for name in package.status().foreign_subclasses)


def test_our_own_class_is_left_alone(sm_120):
    package.enable()
    fake = FakeKernel(shape)
    kernel = smart_autotune(configs=blocks(4, 2, 8), key=["n"], do_bench=fake.bench(lambda v: v["BLOCK"]))(fake)
    launched(kernel)
    assert isinstance(kernel, SmartAutotuner) and len(kernel.records) == 1
    assert len(kernel.do_bench.timed) == 3
    assert patch._SLOT not in kernel.__dict__


def test_our_own_class_asking_for_stock_gets_stock_under_the_patch_too(sm_120):
    package.enable()
    kernel = smart_autotune(configs=blocks(4, 2, 8), key=["n"])(FakeKernel(shape))
    kernel.stock_run(None, 100, grid=(1,), warmup=False)
    assert list(kernel.cache) == [(100,)], "stock's own key"
    assert kernel.records == [] and patch._SLOT not in kernel.__dict__


# ---- on and off in the middle ----------------------------------------------------------------------------------------


def test_a_tuner_goes_back_to_stock_with_the_patch_and_is_ours_again_with_it(sm_120):
    kernel = stock()
    launched(kernel)
    assert list(kernel.cache) == [(100,)]
    package.enable()
    launched(kernel)
    assert len(records_of(kernel)) == 1
    package.disable()
    timed = len(kernel.do_bench.timed)
    launched(kernel)
    assert len(kernel.do_bench.timed) == timed, "stock's own entry is still there"
    package.enable()
    launched(kernel)
    assert len(kernel.do_bench.timed) == timed and len(records_of(kernel)) == 1


def test_real_kernels_are_compiled_checked_and_launched_by_our_engine(sm_120):
    package.enable()
    kernel = triton.autotune(configs=blocks(64, 128), key=["n"])(fresh(scaled_copy))
    compiled = [kernel[(1,)](*copy_arguments()) for _ in range(3)]
    (record,) = records_of(kernel)
    assert {verdict.need is not None for verdict in record.verdicts} == {True}
    assert all(one is compiled[0] for one in compiled[1:])
    assert kernel.best_config in kernel.configs
    assert [str(record.kernel) for record in package.records()].count("scaled_copy") >= 1


def test_threads_that_launch_while_the_patch_goes_on_and_off_are_all_served(sm_120):
    kernels = [stock(configs=blocks(4, 2)) for _ in range(4)]
    stop, failures = threading.Event(), []

    def launch(seed):
        try:
            for index in range(300):
                launched(kernels[(seed + index) % len(kernels)], None, index % 5)
        except Exception as error:
            failures.append(error)

    def switch():
        while not stop.is_set():
            patch.apply()
            patch.revert()

    switching = threading.Thread(target=switch)
    launching = [threading.Thread(target=launch, args=(seed,)) for seed in range(4)]
    switching.start()
    for thread in launching:
        thread.start()
    for thread in launching:
        thread.join(120)
    stop.set()
    switching.join(20)
    assert failures == []
    patch.revert()
    assert vars(Autotuner)["run"] is STOCK_RUN
    assert sum(len(kernel.fn.launches) for kernel in kernels) >= 4 * 300


def test_threads_that_apply_at_once_wrap_stock_once():
    start = threading.Barrier(8)

    def apply():
        start.wait(10)
        patch.apply()

    threads = [threading.Thread(target=apply) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert Autotuner.run.__wrapped__ is STOCK_RUN


def test_a_tuner_whose_first_runs_come_at_once_gets_one_engine_whose_cache_is_stocks(sm_120, monkeypatch):
    import smart_autotune.engine

    made, real = [], smart_autotune.engine.stock_engine

    def slowly(*args):
        time.sleep(0.05)  # so that all the others are in here too, if they may
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(smart_autotune.engine, "stock_engine", slowly)
    package.enable()
    kernel, start = stock(), threading.Barrier(8)

    def launch():
        start.wait(10)
        launched(kernel)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert len(kernel.do_bench.timed) == 3
    kernel.cache.clear()
    launched(kernel)
    assert len(kernel.do_bench.timed) == 6, "clearing the cache means tuning again"


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy], ids=["deep copy", "shallow copy"])
def test_a_copied_tuner_gets_an_engine_of_its_own(sm_120, copied):
    package.enable()
    kernel = launched(stock(FakeKernel(shape)))
    twin = copied(kernel)
    launched(twin, None, 300)
    mine, its = kernel.__dict__[patch._SLOT], twin.__dict__[patch._SLOT]
    assert its.engine is not mine.engine
    assert its.engine.view.autotuner is twin and mine.engine.view.autotuner is kernel
    assert [record.key.values[0][2] for record in records_of(kernel)] == [100]
    assert [record.key.values[0][2] for record in records_of(twin)] == [300]


def test_what_is_kept_on_a_tuner_does_not_get_in_the_way_of_pickling_it():
    slot = patch.Slot(object(), threading.RLock())
    loaded = pickle.loads(pickle.dumps(slot))
    assert loaded.owner is None and loaded.engine is None, "belongs to nobody: the tuner gets a new one"


# ---- when something is not as expected -------------------------------------------------------------------------------


@pytest.fixture
def no_engine(monkeypatch):
    import smart_autotune.engine

    asked = []

    def fails(tuner, stock_run, batch):
        asked.append(tuner)
        raise AttributeError("'Autotuner' object has no attribute 'arg_names'")

    monkeypatch.setattr(smart_autotune.engine, "stock_engine", fails)
    return asked


def test_an_engine_that_cannot_be_made_leaves_that_tuner_to_stock_with_one_warning(sm_120, no_engine, caplog):
    package.enable()
    kernel = stock()
    with settings.override(strict=False):
        for n in (100, 200, 100):
            launched(kernel, None, n)
    assert list(kernel.cache) == [(100,), (200,)] and kernel.best_config.kwargs == {"BLOCK": 2}
    assert messages(caplog) == [
        "shape is left to stock Triton: AttributeError: 'Autotuner' object has no attribute 'arg_names'"
    ]
    assert no_engine == [kernel], "it is not tried again"


def test_a_copy_of_a_tuner_that_was_left_to_stock_is_tried_anew(sm_120, no_engine, monkeypatch):
    package.enable()
    kernel = stock()
    with settings.override(strict=False):
        launched(kernel)
    monkeypatch.undo()
    assert is_ours(launched(copy.deepcopy(kernel)))


def test_an_engine_that_cannot_be_made_is_an_error_when_strict(sm_120, no_engine):
    package.enable()
    with pytest.raises(AttributeError, match="arg_names"):
        launched(stock())


def test_a_fault_of_our_engine_at_a_launch_falls_back_to_stock_with_one_line(sm_120, monkeypatch, caplog):
    package.enable()
    kernel = launched(stock())
    engine = kernel.__dict__[patch._SLOT].engine
    monkeypatch.setattr(engine, "call", lambda *args: 1 / 0)
    with settings.override(strict=False):
        for _ in range(2):
            launched(kernel)
    assert (100,) in kernel.cache
    assert [line for line in messages(caplog, logging.ERROR) if "stock Triton takes over" in line] == [
        "shape: stock Triton takes over: ZeroDivisionError: division by zero"
    ]


# ---- what stock accepts ----------------------------------------------------------------------------------------------

HASHED_BY_IDENTITY = torch.zeros(3)
ODDITIES = {
    "a tensor in the key": (lambda: stock(key=["x"]), (HASHED_BY_IDENTITY, 100)),
    "a key that is no argument": (lambda: stock(key=["n", "NC"]), (None, 100)),
    "a key given as a tuple": (lambda: stock(key=("n",)), (None, 100)),
    "configs given as a tuple": (lambda: stock(configs=tuple(blocks(4, 2, 8))), (None, 100)),
    "the same config twice": (lambda: stock(configs=blocks(4, 2, 2, 8)), (None, 100)),
    "top_k of 1.0": (
        lambda: stock(prune_configs_by={"perf_model": lambda **kwargs: 1.0, "top_k": 1.0}), (None, 100)
    ),
    "top_k of True": (
        lambda: stock(prune_configs_by={"perf_model": lambda **kwargs: 1.0, "top_k": True}), (None, 100)
    ),
    "a key value of a class of the user's": (lambda: stock(), (None, frozenset({1}))),
    "a numpy integer": (lambda: stock(), (None, numpy.int64(100))),
    "do_bench that returns one number": (
        lambda: stock(do_bench=lambda run, quantiles: 2.0 if run() is None else 1.0), (None, 100)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "arguments"), ODDITIES.values(), ids=ODDITIES)
def test_what_stock_accepts_is_accepted_under_the_patch(sm_120, caplog, make, arguments):
    expected = launched(make(), *arguments).best_config
    package.enable()
    with settings.override(strict=False):
        kernel = make()
        for _ in range(2):
            launched(kernel, *arguments)
    assert kernel.best_config == expected
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1, caplog.text


def test_a_key_that_holds_a_tensor_is_stocks_to_serve_and_one_line_says_so(sm_120, caplog):
    package.enable()
    kernel = stock(key=["x"])
    with settings.override(strict=False):
        for _ in range(3):
            launched(kernel, HASHED_BY_IDENTITY, 100)
    assert [key[0] is HASHED_BY_IDENTITY for key in kernel.cache] == [True], "stock's own entry"
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "key 'x' is a tensor" in line.getMessage() and "stock Triton takes over" in line.getMessage()
