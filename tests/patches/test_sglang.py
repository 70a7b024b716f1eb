"""SGLang's patch without SGLang: which release it takes, what it wraps and when, what becomes of calls and failures."""

from __future__ import annotations

import importlib
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

import smart_autotune
import smart_autotune.kernels.sparse_decode as op
from smart_autotune import batch, metrics, serving, settings
from smart_autotune.patches import sglang as plugin
from smart_autotune.patches import startup
from smart_autotune.patches.sglang import sparse_decode, verified, warm_up
from smart_autotune.patches.switch import PatchRefused
from support import fake_sglang
from support.fake_sglang import BACKEND_MODULE, ENTRY_MODULE, RUNNER_MODULE, SCHEDULER_MODULE


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    with fake_sglang.loaded(monkeypatch, tmp_path) as module:
        yield module


@pytest.fixture
def forced():
    with settings.override(sparse_decode="force"):
        yield


def load(name):
    return importlib.import_module(name)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- which release ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.13", "0.5.13"), ("0.5.13.post1", "0.5.13"), ("0.5.14", "0.5.14"), ("0.5.14+cu130", "0.5.14"),
        ("0.5.15.post1", "0.5.15"), ("0.5.16", "0.5.16"), ("0.5.17", "0.5.17"), ("0.5.17.post1", "0.5.17"),
    ],
)  # fmt: skip
def test_a_verified_release_and_its_post_releases_are_known(version, release):
    assert verified.find(version) is verified.RELEASES[release]


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.18", "0.5.18rc1", "0.5.23", "0.6.0", "1.0", None, "unknown"])
def test_any_other_is_refused_with_what_was_expected_and_found(version):
    conflict = verified.find(version)
    text = str(conflict)
    assert text.startswith("sglang: expected sglang>=0.5.13,<0.5.18, found ") and "SGLang itself is left" in text
    assert str(version or "not installed") in text


def test_every_verified_release_names_the_replaced_file_its_caller_and_the_models_that_lay_out_heads():
    for name, release in verified.RELEASES.items():
        assert release.decode.removeprefix("sglang.").replace(".", "/") + ".py" in release.files
        assert {verified.BACKEND, verified.MODEL} <= release.files.keys()
        assert (verified.DRAFT_MODEL in release.files) is (name in ("0.5.16", "0.5.17"))
        assert all(len(digest) == 16 and int(digest, 16) for digest in release.files.values())


@pytest.mark.parametrize("strict", [False, True])
def test_a_newer_sglang_is_left_alone_with_one_line(monkeypatch, tmp_path, caplog, strict):
    with fake_sglang.loaded(monkeypatch, tmp_path, "0.5.18"), settings.override(sparse_decode="1", strict=strict):
        if strict:
            with pytest.raises(PatchRefused, match=r"expected sglang>=0.5.13,<0.5.18, found sglang 0.5.18"):
                plugin.apply()
        else:
            plugin.apply()
            plugin.apply()
            (line,) = warnings_in(caplog)
            assert "found sglang 0.5.18" in line
        assert load(ENTRY_MODULE).flash_mla_with_kvcache_sm120()[0] == "theirs"
        assert not plugin.status().sparse_decode and len(plugin.status().conflicts) == 1


@pytest.mark.parametrize("name", ["flash_mla_sm120.py", "deepseek_v4_backend.py", "deepseek_v4.py"])
@pytest.mark.parametrize("change", ["edited", "gone"])
def test_a_changed_file_is_refused_by_name_and_the_decode_stays(sglang, tmp_path, caplog, forced, name, change):
    (path,) = tmp_path.rglob(name)
    if change == "edited":
        path.write_text(path.read_text() + "# a comment\n")
    else:
        path.unlink()
    with settings.override(strict=False):
        plugin.apply()
    (line,) = warnings_in(caplog)
    assert name in line and "expected" in line and "SGLang's own sparse decode stays" in line
    if change == "edited" and name == "flash_mla_sm120.py":
        assert load(ENTRY_MODULE).flash_mla_with_kvcache_sm120()[0] == "theirs"
    assert not plugin.status().sparse_decode
    assert any(READY in name for name in plugin.status().waiting), "what is not about the decode goes on"


READY = warm_up.READY


def test_without_sglang_nothing_happens(caplog, forced):
    assert "sglang" not in sys.modules
    assert plugin.apply().replaced == () and warnings_in(caplog) == []


# ---- when it is wrapped ----------------------------------------------------------------------------------------------


def test_nothing_of_sglang_is_imported_and_the_late_import_gets_ours(sglang, forced):
    plugin.apply()
    assert [name for name in sys.modules if name.startswith("sglang.")] == []
    assert len(plugin.status().waiting) == 4 and not plugin.status().sparse_decode
    entry = load(ENTRY_MODULE).flash_mla_with_kvcache_sm120
    assert entry.__name__ == sparse_decode.ENTRY and hasattr(entry, "_smart_autotune_seam")
    assert plugin.status().sparse_decode and "sparse decode is ours" in str(plugin.status())


def test_what_is_imported_already_is_wrapped_at_once(sglang, forced):
    module = load(ENTRY_MODULE)
    theirs = module.flash_mla_with_kvcache_sm120
    plugin.apply()
    assert module.flash_mla_with_kvcache_sm120.__wrapped__ is theirs
    plugin.apply()
    assert module.flash_mla_with_kvcache_sm120.__wrapped__ is theirs, "twice is once"


def test_unless_asked_for_nothing_of_the_decode_is_touched(sglang):
    plugin.apply()
    assert not hasattr(load(ENTRY_MODULE).flash_mla_with_kvcache_sm120, "__wrapped__")
    assert not hasattr(load(BACKEND_MODULE).DeepseekV4AttnBackend.forward, "__wrapped__")
    assert hasattr(load(SCHEDULER_MODULE).Scheduler.get_init_info, "__wrapped__")


def test_revert_puts_the_very_functions_back_and_apply_wraps_them_again(sglang, forced):
    modules = [load(name) for name in (ENTRY_MODULE, BACKEND_MODULE, RUNNER_MODULE, SCHEDULER_MODULE)]
    before = functions(modules)
    plugin.apply()
    wrapped = functions(modules)
    assert all(now is not then for now, then in zip(wrapped, before))
    plugin.revert()
    assert all(now is then for now, then in zip(functions(modules), before))
    assert plugin.status().replaced == () and plugin.revert() == plugin.status()
    plugin.apply()
    assert all(now.__wrapped__ is then for now, then in zip(functions(modules), before))


def functions(modules):
    entry, backend, runner, scheduler = modules
    return [
        entry.flash_mla_with_kvcache_sm120, backend.DeepseekV4AttnBackend.forward,
        runner.DecodeCudaGraphRunner.capture, scheduler.Scheduler.get_init_info,
    ]  # fmt: skip


def test_a_module_imported_after_revert_is_left_alone(sglang, forced):
    plugin.apply()
    plugin.revert()
    assert not hasattr(load(ENTRY_MODULE).flash_mla_with_kvcache_sm120, "__wrapped__")


def test_where_somebody_wrapped_ours_since_revert_passes_calls_on(sglang, forced):
    plugin.apply()
    module = load(ENTRY_MODULE)
    ours = module.flash_mla_with_kvcache_sm120
    module.flash_mla_with_kvcache_sm120 = lambda **call: ours(**call)
    plugin.revert()
    assert module.flash_mla_with_kvcache_sm120(q=1) == ("theirs", {"q": 1})


def test_the_packages_own_switch_shows_it_and_turns_it_off_and_on_again(sglang, forced):
    modules = [load(name) for name in (ENTRY_MODULE, BACKEND_MODULE, RUNNER_MODULE, SCHEDULER_MODULE)]
    before = functions(modules)
    assert smart_autotune.status().servers == ()
    plugin.apply()
    assert smart_autotune.status().servers == (plugin.status(),)
    assert f"  wrapped: {ENTRY_MODULE}.{sparse_decode.ENTRY}" in str(smart_autotune.status()).splitlines()
    off = smart_autotune.disable()
    assert off.servers == (plugin.status(),) and plugin.status().replaced == plugin.status().waiting == ()
    assert all(now is then for now, then in zip(functions(modules), before))
    smart_autotune.enable()
    assert all(now.__wrapped__ is then for now, then in zip(functions(modules), before))


def test_why_it_refuses_is_in_the_packages_own_status(monkeypatch, tmp_path):
    with fake_sglang.loaded(monkeypatch, tmp_path, "0.5.18"), settings.override(strict=False):
        plugin.apply()
        assert "found sglang 0.5.18" in str(smart_autotune.status())


def test_an_entry_that_somebody_else_has_replaced_stays_theirs(sglang, forced, caplog):
    module = load(ENTRY_MODULE)
    module.flash_mla_with_kvcache_sm120 = other = lambda **call: "another plug-in's"
    plugin.apply()
    assert module.flash_mla_with_kvcache_sm120 is other and not plugin.status().sparse_decode
    (line,) = warnings_in(caplog)
    assert "flash_mla_with_kvcache_sm120" in line and "one put there by" in line


def test_a_place_that_is_not_there_is_one_line(sglang, caplog):
    del load(SCHEDULER_MODULE).Scheduler.get_init_info
    plugin.apply()
    (line,) = warnings_in(caplog)
    assert "Scheduler.get_init_info, found none of that name" in line


def test_a_fault_of_ours_never_reaches_sglangs_import(sglang, forced, caplog, monkeypatch):
    plugin.apply()
    monkeypatch.setattr(plugin._decode.entry, "_wrap_in", lambda module: 1 / 0)
    with settings.override(strict=False):
        assert load(ENTRY_MODULE).flash_mla_with_kvcache_sm120()[0] == "theirs"
    (line,) = warnings_in(caplog)
    assert "flash_mla_with_kvcache_sm120 is left as it is: ZeroDivisionError" in line


# ---- what becomes of a call ------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """Calls that reach our op; it fails where ``fails`` is set."""
    calls = SimpleNamespace(seen=[], fails=None)

    def sparse_decode(*args, **options):
        calls.seen.append((args, options))
        if calls.fails is not None:
            raise calls.fails
        return "ours"

    monkeypatch.setattr(op, "sparse_decode", sparse_decode)
    return calls


def call(heads=64, **changes):
    q = torch.zeros(2, 1, heads, 512, dtype=torch.bfloat16)
    return {
        "q": q, "k_cache": "cache", "head_dim_v": 512, "softmax_scale": 0.5, "indices": "indices",
        "topk_length": "lengths", "attn_sink": "sink", "extra_k_cache": "extra cache",
        "extra_indices_in_kvcache": "extra indices", "extra_topk_length": "extra lengths", **changes,
    }  # fmt: skip


def in_layer(heads, **changes):
    """The result of the layer's call, as the model makes it."""
    arguments = call(**changes)
    backend = load(BACKEND_MODULE).DeepseekV4AttnBackend()
    layer = SimpleNamespace(tp_q_head_num=heads)
    return backend.forward(q=arguments.pop("q"), k=None, v=None, layer=layer, **arguments)


def test_a_call_reaches_the_op_with_every_argument_in_its_place(sglang, forced, served):
    plugin.apply()
    arguments = call()
    assert load(ENTRY_MODULE).flash_mla_with_kvcache_sm120(**arguments) == ("ours", None)
    ((given, options),) = served.seen
    assert given[0] is arguments["q"]
    assert given[1:] == ("cache", "indices", "lengths", "sink", "extra cache", "extra indices", "extra lengths")
    assert options == {"softmax_scale": 0.5, "num_heads": 64}


def test_without_a_scale_it_is_that_of_the_head_dimension(sglang, forced, served):
    plugin.apply()
    load(ENTRY_MODULE).flash_mla_with_kvcache_sm120(**call(softmax_scale=None))
    assert served.seen[0][1]["softmax_scale"] == 512**-0.5


@pytest.mark.parametrize(("known", "used"), [(16, 16), (64, 64), (None, 64), (0, 64), (65, 64), ("16", 64)])
def test_the_layer_says_how_many_heads_are_real(sglang, forced, served, known, used):
    plugin.apply()
    assert in_layer(known) == "ours"
    assert served.seen[0][1]["num_heads"] == used


def test_a_layer_passed_by_position_is_seen_too_and_forgotten_after_its_call(sglang, forced, served):
    plugin.apply()
    arguments = call()
    q = arguments.pop("q")
    load(BACKEND_MODULE).DeepseekV4AttnBackend().forward(q, None, None, SimpleNamespace(tp_q_head_num=8), **arguments)
    load(ENTRY_MODULE).flash_mla_with_kvcache_sm120(q=q, **arguments)
    assert [options["num_heads"] for _, options in served.seen] == [8, 64]


def test_where_the_ranks_heads_do_not_come_first_all_are_computed(sglang, forced, served, monkeypatch):
    release = verified.RELEASES["0.5.14"]
    slices = verified.Release(release.decode, release.files, heads_lead=False)
    with monkeypatch.context() as scope:  # undone before the fake release is
        scope.setitem(verified.RELEASES, "0.5.14", slices)
        plugin.apply()
        in_layer(16)
    assert served.seen[0][1]["num_heads"] == 64
    assert not verified.RELEASES["0.5.13"].heads_lead


@pytest.mark.parametrize(
    ("fault", "changes"),
    [(ValueError("q: expected bf16"), {}), (None, {"head_dim_v": 256}), (None, {"another": 1})],
    ids=["the op refuses", "another head dimension", "an argument that we do not know"],
)
def test_after_a_failure_of_ours_sglangs_own_serves_for_good(sglang, forced, served, caplog, fault, changes):
    served.fails = fault
    plugin.apply()
    entry = load(ENTRY_MODULE).flash_mla_with_kvcache_sm120
    with settings.override(strict=False, sparse_decode="force"):
        for _ in range(2):
            assert entry(**call(**changes))[0] == "theirs"
        served.fails = None
        assert entry(**call())[0] == "theirs"
    (line,) = warnings_in(caplog)
    assert "takes over for good" in line and len(served.seen) <= 1
    assert not plugin.status().sparse_decode and plugin.status().gave_up


def test_a_failure_of_ours_is_raised_when_strict(sglang, forced, served):
    served.fails = ValueError("q: expected bf16")
    plugin.apply()
    with pytest.raises(ValueError, match="q: expected bf16"):
        load(ENTRY_MODULE).flash_mla_with_kvcache_sm120(**call())


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("no memory"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_a_gpu_out_of_memory_or_out_of_order_is_not_a_failure_of_ours(sglang, forced, served, error):
    served.fails = error
    plugin.apply()
    with settings.override(strict=False, sparse_decode="force"), pytest.raises(type(error)):
        load(ENTRY_MODULE).flash_mla_with_kvcache_sm120(**call())
    assert plugin.status().sparse_decode


# ---- on which GPU ----------------------------------------------------------------------------------------------------


def test_on_another_gpu_the_call_is_sglangs_and_one_line_says_so(sglang, served, caplog):
    with settings.override(sparse_decode="1"):
        plugin.apply()
        for _ in range(2):
            assert load(ENTRY_MODULE).flash_mla_with_kvcache_sm120(**call())[0] == "theirs"
    (line,) = warnings_in(caplog)
    assert "does not apply here" in line and served.seen == []


def test_where_sglang_knows_that_the_gpu_is_another_its_backend_is_not_touched(sglang, tmp_path, caplog):
    (path,) = tmp_path.rglob("deepseek_v4_backend.py")
    with settings.override(sparse_decode="1"):
        plugin.apply()
        path.write_text(path.read_text().replace("_is_sm120 = True", "_is_sm120 = False"))
        assert not hasattr(load(BACKEND_MODULE).DeepseekV4AttnBackend.forward, "__wrapped__")
        assert not any("forward" in name for name in plugin.status().waiting)
    (line,) = warnings_in(caplog)
    assert "does not apply here" in line


@pytest.mark.parametrize(("capability", "ours"), [((12, 0), True), ((12, 1), True), ((10, 0), False), ((9, 0), False)])
def test_sm120_is_compute_capability_12(monkeypatch, capability, ours):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert sparse_decode._is_sm120.__wrapped__(torch.device("cuda", 0)) is ours


# ---- when the graphs are captured ------------------------------------------------------------------------------------


def scheduler(**options):
    return load(SCHEDULER_MODULE).Scheduler(**options)


def test_a_rank_that_is_ready_says_what_is_covered_once(sglang, caplog):
    caplog.set_level(logging.INFO, logger="smart_autotune")
    plugin.apply()
    rank = scheduler()
    assert rank.get_init_info() == rank.get_init_info() == {"status": "ready"}
    lines = [record for record in caplog.records if record.getMessage().startswith("SGLang is ready: ")]
    assert len(lines) == 1 and lines[0].levelno == logging.INFO and "keys tuned" in lines[0].getMessage()
    assert not serving.is_frozen(), "a server tunes what it first meets at its requests, unless told otherwise"


def test_asked_for_it_freezes_and_says_so(sglang, caplog, monkeypatch):
    monkeypatch.setattr("smart_autotune.history.coverage", lambda: SimpleNamespace(tuned=2))
    plugin.apply()
    with settings.override(freeze_after_capture=True):
        scheduler().get_init_info()
    assert serving.is_frozen() and warnings_in(caplog) == []


def test_it_warns_of_freezing_before_anything_is_tuned(sglang, caplog, monkeypatch):
    monkeypatch.setattr("smart_autotune.history.coverage", lambda: SimpleNamespace(tuned=0))
    plugin.apply()
    with settings.override(freeze_after_capture=True):
        scheduler().get_init_info()
    (line,) = warnings_in(caplog)
    assert serving.is_frozen() and "although no key is tuned" in line


@pytest.mark.parametrize("strict", [False, True])
def test_a_fault_of_ours_does_not_keep_a_rank_from_being_ready(sglang, caplog, monkeypatch, strict):
    monkeypatch.setattr("smart_autotune.history.coverage", lambda: 1 / 0)
    plugin.apply()
    with settings.override(strict=strict):
        if strict:
            with pytest.raises(ZeroDivisionError):
                scheduler().get_init_info()
            return
        assert scheduler().get_init_info() == {"status": "ready"}
    (line,) = warnings_in(caplog)
    assert "ZeroDivisionError" in line


@pytest.mark.parametrize(
    ("draft", "width", "expected"), [(False, 1, 160), (True, 1, 256), (False, 4, 256), (False, None, 256)]
)
def test_buckets_end_at_the_sizes_that_are_captured(sglang, draft, width, expected):
    plugin.apply()
    model_runner = SimpleNamespace(is_draft_worker=draft)
    runner = load(RUNNER_MODULE).DecodeCudaGraphRunner([1, 2, 4, 8, 12, 16, 96, 160], model_runner, width)
    runner.capture()
    assert runner.captured[0] == 160
    rule = batch.BatchRule("kernel", ["x", "n"], [], "auto", "pow2")
    assert rule.bucket_of(150) == expected


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    calls = []
    monkeypatch.setattr(metrics, "start", lambda labels, patches: calls.append((labels, patches())))
    return calls


@pytest.mark.parametrize("enabled", [False, True])
def test_metrics_start_with_sglangs_and_carry_the_rank(sglang, started, monkeypatch, tmp_path, enabled):
    monkeypatch.setenv(warm_up.MULTIPROCESS, str(tmp_path))
    plugin.apply()
    rank = scheduler(tp_rank=3)
    rank.server_args.enable_metrics = enabled
    rank.get_init_info()
    labels = {"tp_rank": "3", "pp_rank": "0", "dp_rank": "0"}
    assert started == ([(labels, {"triton-3.6.0": False, "sglang-sparse-decode": False})] if enabled else [])


def test_metrics_that_no_process_would_collect_are_not_started(sglang, started, monkeypatch, caplog):
    monkeypatch.delenv(warm_up.MULTIPROCESS, raising=False)
    plugin.apply()
    rank = scheduler()
    rank.server_args.enable_metrics = True
    rank.get_init_info()
    (line,) = warnings_in(caplog)
    assert started == [] and warm_up.MULTIPROCESS in line


# ---- the entry point -------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """A process that nobody has asked yet, and that is not strict."""
    monkeypatch.setattr(startup, "_registered", False)
    monkeypatch.setattr(startup, "_said", set())
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.delenv("SMART_AUTOTUNE_STRICT", raising=False)
    monkeypatch.setenv("SMART_AUTOTUNE_SPARSE_DECODE", "force")
    return monkeypatch


def test_the_entry_point_turns_both_on(sglang, asked):
    asked.setenv("SMART_AUTOTUNE", "1")
    startup.activate_in_sglang()
    load(ENTRY_MODULE)
    assert plugin.status().sparse_decode


def test_without_the_main_variable_nothing_is_touched_and_one_line_says_so(sglang, asked, caplog):
    asked.delenv("SMART_AUTOTUNE", raising=False)
    startup.activate_in_sglang()
    assert plugin.status().waiting == ()
    assert warnings_in(caplog) == ["SMART_AUTOTUNE_SPARSE_DECODE has no effect unless SMART_AUTOTUNE=1"]


def test_what_apply_does_not_expect_leaves_sglang_as_it_is(sglang, asked, caplog):
    asked.setenv("SMART_AUTOTUNE", "1")
    asked.setattr(plugin, "find", lambda version: 1 / 0)
    startup.activate_in_sglang()
    assert warnings_in(caplog) == ["SGLang is left as it is: ZeroDivisionError: division by zero"]
    asked.setenv("SMART_AUTOTUNE_STRICT", "1")
    with pytest.raises(ZeroDivisionError):
        startup.activate_in_sglang()
