"""Recorded calls compiled for another GPU: real compiles, from lines that a tuner wrote."""

from __future__ import annotations

import json

import pytest
import torch
import triton

from smart_autotune import recorded, recorder, settings, smart_autotune
from smart_autotune.audit import audit as audit_example
from smart_autotune.recorded import audit, read
from smart_autotune.replay import NotReplayable
from smart_autotune.verdict import Outcome
from support import audited_kernels
from support import recorded_kernels as kernels
from support.kernels import copy_arguments, tile, tile_arguments
from support.stub_driver import StubDriver, active, capturing


@pytest.fixture(autouse=True)
def nothing_met():
    recorder.forget()


@pytest.fixture
def device():
    """The GPU that calls are recorded on; the kernels of the module are new to each of them."""
    with active(StubDriver(90)) as driver:
        yield driver
    for kernel in (kernels.tuned, kernels.tight, kernels.below, kernels.above.fn, kernels.described):
        kernel.cache.clear()
        kernel._engine = kernel._new_engine()


def outcomes(found):
    return [verdict.outcome for verdict in found.verdicts]


def needs(found):
    return {(v.config.num_stages, v.config.kwargs.get("BM")): v.need for v in found.verdicts}


def run_product(kernel=kernels.tuned, k=64):
    kernel[(1,)](*tile_arguments(k))


# ---- what fits elsewhere ---------------------------------------------------------------------------------------------


@pytest.mark.blackwell
def test_calls_recorded_on_one_gpu_are_compiled_for_another(device, log):
    run_product()
    (calls,) = read(log).calls
    found = audit(calls, "sm_120")
    fate = {verdict.config: verdict for verdict in found.verdicts}
    assert len(fate) == 5
    assert fate[tile(2)].need == 16_384 and fate[tile(3)].need == 32_768
    assert (fate[tile(9, warps=8)].outcome, fate[tile(9, warps=8)].need) == (Outcome.OVER_SHARED_MEMORY, 131_072)
    assert fate[tile(3, size=7)].outcome is Outcome.COMPILE_FAILED
    assert fate[tile(2)].registers > 0 and fate[tile(2)].spill_bytes == 0
    assert found.limits.shared_bytes == 101_376 and calls.first.arch == "sm_90"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_it_says_what_an_audit_of_the_same_call_says(device, log, arch):
    run_product()
    meta = [torch.empty_like(value, device="meta") if hasattr(value, "dtype") else value for value in tile_arguments()]
    expected = audit_example(kernels.tuned, arch, "x", dict(zip(kernels.product.arg_names, meta)))
    found = audit(read(log).calls[0], arch)
    for name in ("outcome", "need", "registers", "spill_bytes"):
        assert {v.config: getattr(v, name) for v in found.verdicts} == {
            v.config: getattr(v, name) for v in expected.verdicts
        }


def test_heuristics_descriptors_and_wrappers_need_not_run_again(device, log, monkeypatch):
    kernels.below[(1,)](torch.zeros(64), torch.zeros(64), 64)
    x, y, n, _ = copy_arguments()
    kernels.above[(1,)](x, y, n)
    base = torch.zeros(1024, 1024, dtype=torch.float16)
    descriptor = audited_kernels.TensorDescriptor.from_tensor(base, [1, 1])
    kernels.described[(1,)](descriptor, base, 1024)
    monkeypatch.setattr(kernels.below.fn, "values", {"EVEN": lambda args: 1 // 0})
    found = {calls.first.kernel: audit(calls, "sm_90") for calls in read(log).calls}
    assert set(found) == {"with_a_heuristic", "scaled_copy", "described"}
    assert all(set(outcomes(one)) == {Outcome.NOT_TIMED} for one in found.values())
    expected = audit_example(kernels.described, "sm_90", "0", {"a_desc": descriptor, "c_ptr": base, "M": 1024})
    assert sorted(v.need for v in found["described"].verdicts) == sorted(v.need for v in expected.verdicts)


def test_a_cold_key_can_be_compiled_too(device, log):
    with capturing():
        run_product()
    (calls,) = read(log).calls
    assert needs(audit(calls, "sm_120"))[(2, 64)] == 16_384


def test_a_key_that_no_config_fitted_there_may_fit_elsewhere(log):
    with active(StubDriver(120)), settings.override(rescue=False), pytest.raises(Exception, match="none of 2 configs"):
        run_product(smart_autotune(configs=[tile(9, warps=8), tile(10, warps=8)], key=["K"])(kernels.product))
    (calls,) = read(log).calls
    assert audit(calls, "sm_90").fits and not audit(calls, "sm_120").fits


def test_each_compile_is_reported_while_it_goes_on(device, log):
    run_product()
    seen = []
    audit(read(log).calls[0], "sm_90", lambda: seen.append(1))
    assert len(seen) == 5


def test_an_unknown_arch_is_refused(device, log):
    run_product()
    with pytest.raises(ValueError, match="known: sm_70"):
        audit(read(log).calls[0], "sm_95")


# ---- one compile for keys that compile the same ----------------------------------------------------------------------


def test_keys_that_compile_the_same_are_one_call_and_another_specialisation_is_another(device, log):
    for k in (64, 128, 72):  # 72: not divisible by 16
        run_product(k=k)
    calls = sorted(read(log).calls, key=lambda calls: len(calls.keys))
    assert [len(one.keys) for one in calls] == [1, 2]
    assert "and 1 more" in calls[1].title and "more" not in calls[0].title


def test_a_key_that_several_processes_recorded_is_one(device, log):
    run_product()
    log.write_text(log.read_text() * 3)
    (calls,) = read(log).calls
    assert len(calls.keys) == 1


def test_what_was_fastest_there_is_said_with_its_fate_here(device, log):
    run_product()
    notes = audit(read(log).calls[0], "sm_120").notes
    assert any(note.startswith("fastest on sm_90 for 1 of 1 keys: BM=64") for note in notes)


def test_what_the_prune_dropped_is_not_compiled_and_said(device, log):
    prune = {"early_config_prune": lambda configs, named, **kwargs: configs[:1]}
    run_product(smart_autotune(configs=[tile(2), tile(3)], key=["K"], prune_configs_by=prune)(kernels.product))
    found = audit(read(log).calls[0], "sm_120")
    assert outcomes(found) == [Outcome.NOT_TIMED, Outcome.PRUNED_BY_USER]
    assert "the kernel's own prune dropped 1 on sm_90; it is not asked again for sm_120" in found.notes


def test_another_triton_is_said(device, log):
    run_product()
    log.write_text(log.read_text().replace(f'"triton": "{triton.__version__}"', '"triton": "3.5.0"'))
    assert f"recorded with Triton 3.5.0, compiled with {triton.__version__}" in audit(read(log).calls[0], "sm_90").notes


def test_a_kernel_with_other_arguments_today_is_not_compiled(device, log):
    run_product()
    line = log.read_text().replace('"module": "support.recorded_kernels"', '"module": "support.kernels"')
    log.write_text(line.replace('"qualname": "product"', '"qualname": "scaled_copy"'))
    with pytest.raises(NotReplayable, match="other arguments than the recorded one"):
        audit(read(log).calls[0], "sm_90")


# ---- files -----------------------------------------------------------------------------------------------------------


def line(**changed):
    good = {
        "format": 1, "event": "tuning", "kernel": "product", "triton": "3.6.0", "key": {"text": "K=64"},
        "call": None,
        "configs": [{"config": {"kwargs": {"BM": 64}, "num_warps": 4}, "unknown": "the call was not seen"}],
    }  # fmt: skip
    return json.dumps({**good, **changed})


BAD_LINES = {
    '{"format": 1, "ev': "no JSON",
    "[1, 2]": "not written by",
    "{}": "not written by",
    "[" * 200_000: "no JSON",
    line(format=2): "format 2, not 1",
    line(format=True): "format True, not 1",
    line(configs=[]): "no configs",
    line(configs=5): "no configs",
    line(key=5): "no key",
    line(configs=[5]): "a config is not an object",
    line(configs=[{"config": {}}]): "a config without its values",
    line(configs=[{"config": {"kwargs": {}, "num_warps": "4"}}]): "a config whose num_warps is str",
    line(configs=[{"config": {"kwargs": {}, "num_warps": True}}]): "a config whose num_warps is bool",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=BAD_LINES.values())
def test_a_line_that_is_no_record_is_counted_and_the_others_are_used(tmp_path, bad):
    path = tmp_path / "log"
    path.write_text(f"{bad}\n{line()}\n\n{bad}\n")
    found = read(path)
    assert len(found.calls) == 1
    ((reason, count),) = found.bad.items()
    assert BAD_LINES[bad] in reason and count == 2


def test_a_line_without_a_call_says_so_when_it_is_to_be_compiled(tmp_path):
    (tmp_path / "log").write_text(line(module="support.recorded_kernels", qualname="product"))
    with pytest.raises(NotReplayable, match="the call was not seen"):
        audit(read(tmp_path / "log").calls[0], "sm_90")


@pytest.mark.parametrize(
    "configs",
    [
        [{"config": {"kwargs": {}}, "own": 5}],
        [{"config": {"kwargs": {}}, "own": {"signature": 5}}],
        [{"config": {"kwargs": {}}, "own": {}}],
    ],
)
def test_a_call_that_is_damaged_is_a_reason_and_not_a_crash(tmp_path, configs):
    (tmp_path / "log").write_text(line(module="support.recorded_kernels", qualname="product", configs=configs))
    with pytest.raises(NotReplayable):
        audit(read(tmp_path / "log").calls[0], "sm_90")


def test_types_and_constants_that_make_no_sense_are_verdicts(device, log):
    run_product()
    raw = json.loads(log.read_text())
    raw["call"]["signature"]["a"] = "*nonsense"
    log.write_text(json.dumps(raw))
    assert set(outcomes(audit(read(log).calls[0], "sm_90"))) == {Outcome.COMPILE_FAILED}


def test_texts_of_a_log_reach_no_terminal_as_commands(tmp_path):
    (tmp_path / "log").write_text(line(kernel="a\x1b[2Jb\nc", key={"text": "K\x1b]0;x\x07"}))
    (calls,) = read(tmp_path / "log").calls
    assert (calls.first.kernel, calls.title) == ("a [2Jb c", "K ]0;x ")


def test_a_folder_of_logs_is_read_whole(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(line(kernel=name))
    assert [calls.first.kernel for calls in read(tmp_path).calls] == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.write_text(""), "holds no record of a call"),
        (lambda path: path.write_text("x\n"), r"1 lines: no JSON"),
        (lambda path: path.mkdir(), r"holds no \*\.jsonl and no kept tunings. Run the server with SMART_AUTOTUNE_LOG"),
    ],
)
def test_what_holds_no_calls_is_an_error_that_says_so(tmp_path, make, text):
    make(tmp_path / "log")
    with pytest.raises(ValueError, match=text):
        read(tmp_path / "log")


# ---- cache folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    """The folder in which a server of another release left three tunings, one with its call."""
    folder = tmp_path / "kept" / "triton-3.6.0"
    folder.mkdir(parents=True)
    for name in ("decode-0123", "decode-4567", "prefill-89ab"):
        (folder / f"{name}.json").write_text("{}")
    (folder / "decode-0123.call").write_text(line() + "\n")
    return folder


@pytest.mark.blackwell
def test_a_cache_folder_says_what_the_log_of_the_same_run_says(device, log, tmp_path):
    with settings.override(cache=True, cache_dir=str(tmp_path / "kept"), log=str(log)):
        for k in (64, 128, 72):
            run_product(k=k)
    from_log, from_cache = read(log), read(tmp_path / "kept")
    by_call = {calls.first.same_compile(): calls for calls in from_cache.calls}
    assert len(by_call) == len(from_log.calls) == 2 and (from_cache.bad, from_cache.without_call) == ({}, 0)
    seen = set()
    for calls in from_log.calls:
        twin = by_call[calls.first.same_compile()]
        assert twin.keys == calls.keys
        expected, found = audit(calls, "sm_120"), audit(twin, "sm_120")
        for name in ("outcome", "need", "limit", "registers", "spill_bytes", "detail"):
            assert {v.config: getattr(v, name) for v in found.verdicts} == {
                v.config: getattr(v, name) for v in expected.verdicts
            }
        seen.update(outcomes(found))
    assert seen == {Outcome.NOT_TIMED, Outcome.OVER_SHARED_MEMORY, Outcome.COMPILE_FAILED}


def test_a_cache_folder_of_a_run_without_a_log_is_compiled_for_another_gpu(device, tmp_path):
    with settings.override(cache=True, cache_dir=str(tmp_path)):
        run_product()
    (calls,) = read(tmp_path).calls
    found = needs(audit(calls, "sm_80"))
    assert found[(2, 64)] == 16_384 and found[(9, 64)] == 131_072


def test_a_folder_for_one_triton_is_read_like_the_whole(kept):
    assert [calls.first for calls in read(kept).calls] == [calls.first for calls in read(kept.parent).calls]


def test_kept_tunings_without_a_call_are_counted(kept):
    found = read(kept.parent)
    assert len(found.calls) == 1 and found.without_call == 2


def test_a_folder_of_kept_tunings_that_have_no_calls_is_an_error_that_counts_them_and_says_what_to_do(kept):
    (kept / "decode-0123.call").unlink()
    with pytest.raises(ValueError, match=r"3 kept tunings and no recorded call .* Tune again .* SMART_AUTOTUNE_LOG"):
        read(kept.parent)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.write_text(line()[:-10]), "no JSON"),
        (lambda path: path.write_text(""), "no JSON"),
        (lambda path: path.write_text(line(format=2)), "format 2, not 1"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.symlink_to("gone"), "cannot be read"),
    ],
)
def test_a_damaged_call_is_counted_and_the_others_are_used(kept, damage, text):
    damage(kept / "decode-4567.call")
    found = read(kept.parent)
    assert len(found.calls) == 1
    ((reason, count),) = found.bad.items()
    assert text in reason and count == 1


def test_what_a_killed_writer_left_of_a_call_is_not_read(kept):
    (kept / ".decode-4567.call.12-ab.tmp").write_text(line()[:20])
    assert read(kept.parent).bad == {}


def test_logs_and_calls_in_one_folder_are_read_both(kept):
    (kept.parent / "log.jsonl").write_text(line(kernel="logged"))
    assert [calls.first.kernel for calls in read(kept.parent).calls] == ["logged", "product"]


# ---- long lines ------------------------------------------------------------------------------------------------------


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "MOST_BYTES", 1000)
    (tmp_path / "log").write_text("x" * 5000 + "\n" + line() + "\n")
    assert len(read(tmp_path / "log").calls) == 1
