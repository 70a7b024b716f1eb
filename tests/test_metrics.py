"""The numbers for Prometheus: what they say, when the client is imported, and that they never get in the way."""

from __future__ import annotations

import builtins
import json
import sys

import pytest
import torch
import triton

from smart_autotune import history, metrics, settings, smart_autotune
from smart_autotune.patches import triton_3_6_0
from support.fake_kernel import FakeKernel
from support.installed import TESTS, run_child
from support.patching import on_the_verified_triton, patched
from support.stub_driver import capturing

prometheus_client = pytest.importorskip("prometheus_client")


def shape(x, n, BLOCK=1):
    """x: a tensor or None. n: an int."""


def tuned():
    fake = FakeKernel(shape, on_compile=lambda values: 200_704 if values["BLOCK"] == 16 else 1024)
    configs = [triton.Config({"BLOCK": size}) for size in (4, 2, 8, 16)]
    return smart_autotune(configs=configs, key=["n"], do_bench=fake.bench(lambda values: values["BLOCK"]))(fake)


@pytest.fixture
def started():
    assert metrics.start({"tp_rank": "3"}, lambda: {"one": True, "other": False})
    yield
    metrics.stop()


def value(name, **labels):
    return prometheus_client.REGISTRY.get_sample_value(f"smart_autotune_{name}", {"tp_rank": "3", **labels})


def test_counters_grow_with_what_happens_from_the_start_of_the_process_on(sm_120, started):
    before = history.totals()
    assert value("tunings_total") == before.tunings
    kernel = tuned()
    kernel[(1,)](torch.zeros(3), 63)
    with capturing():
        kernel[(1,)](torch.zeros(3), 100)
    now = history.totals()
    assert value("tunings_total") == before.tunings + 1
    assert value("cold_serves_total") == before.cold + 1
    for outcome, count in (("WON", 1), ("SLOWER", 2), ("OVER_SHARED_MEMORY", 1)):
        assert value("verdicts_total", outcome=outcome) == before.verdicts[outcome] + count
    assert value("tuning_seconds_total", phase="compile") == pytest.approx(now.compile_secs)
    assert value("tuning_seconds_total", phase="timing") == pytest.approx(now.timing_secs)
    kernel[(1,)](torch.zeros(3), 100)  # nothing is left cold for other tests


def test_gauges_say_how_keys_are_served_now_and_which_patch_is_in_force(sm_120, started):
    kernel = tuned()
    with capturing():
        kernel[(1,)](torch.zeros(3), 63)
    covered = history.coverage()
    assert [value("keys", served=name) for name in ("tuned", "near", "cold")] == [
        covered.tuned, covered.served_near, covered.served_cold,
    ]  # fmt: skip
    assert covered.served_cold >= 1
    kernel[(1,)](torch.zeros(3), 63)
    assert value("keys", served="cold") == covered.served_cold - 1
    assert (value("patch_state", patch="one"), value("patch_state", patch="other")) == (1, 0)


def test_starting_twice_is_starting_once(started):
    assert metrics.start() and metrics.start({"another": "label"})
    assert value("tunings_total") is not None


def test_after_stop_nothing_is_exported_and_it_can_start_again(sm_120):
    assert metrics.start({"tp_rank": "3"})
    metrics.stop()
    metrics.stop()
    assert value("tunings_total") is None
    tuned()[(1,)](None, 63)
    assert metrics.start({"tp_rank": "3"})
    assert value("tunings_total") == history.totals().tunings
    metrics.stop()


@on_the_verified_triton
def test_by_itself_it_names_the_patch_of_triton():
    assert metrics._triton_patch() == {triton_3_6_0.GATE.patch: False}
    with patched():
        assert metrics._triton_patch() == {triton_3_6_0.GATE.patch: True}


def test_without_the_client_one_line_says_so(monkeypatch, caplog):
    imported = builtins.__import__

    def without(name, *rest):
        if name == "prometheus_client":
            raise ImportError("no prometheus_client here")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert metrics.start() is False
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no prometheus_client here" in line and "smart-autotune[metrics]" in line


@pytest.mark.parametrize("strict", [False, True])
def test_a_fault_of_the_export_never_reaches_who_is_served(sm_120, started, monkeypatch, caplog, strict):
    monkeypatch.setattr(metrics._exported, "_count", lambda: 1 / 0)
    kernel = tuned()
    with settings.override(strict=strict):
        if strict:
            with pytest.raises(ZeroDivisionError):
                metrics._exported.update()
            return
        for n in (63, 100):
            kernel[(1,)](None, n)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1 and "ZeroDivisionError" in lines[0]
    assert len(kernel.records) == 2


CHILD = f"""
import json, os, sys
sys.path.append({str(TESTS)!r})
import smart_autotune
from smart_autotune import metrics
early = "prometheus_client" in sys.modules
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
metrics.start({{"tp_rank": sys.argv[2]}}, lambda: {{"one": True}})
print(json.dumps({{"early": early, "files": sorted(os.listdir(sys.argv[1]))}}))
"""


def test_each_process_of_a_server_writes_where_the_one_that_answers_collects(tmp_path, monkeypatch):
    for rank in ("0", "1"):
        done = run_child([sys.executable, "-c", CHILD, str(tmp_path), rank], first=[TESTS.parent])
        assert not json.loads(done.stdout)["early"] and json.loads(done.stdout)["files"], done.stdout
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    text = generate_latest(registry).decode()
    for rank in ("0", "1"):
        assert f'smart_autotune_tunings_total{{tp_rank="{rank}"}} 0.0' in text
        assert f'smart_autotune_patch_state{{patch="one",tp_rank="{rank}"}} 1.0' in text
