"""Real SGLang wheels: their own ``load_plugins()`` turns us on, and their sparse-decode kernel is tuned by our engine.

No GPU and no server: the modules are SGLang's, the device is the tests' stand-in.
"""

from __future__ import annotations

import json

import pytest

from support.installed import TESTS

# Where the kernel is, by version.
MODULES = {
    "0.5.14": "sglang.srt.layers.attention.flash_mla_sm120_triton",
    "0.5.17": "sglang.kernels.ops.attention.flash_mla_sm120_triton",
}
SCRIPT = f"""
import importlib, json, logging, sys

logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
decode = importlib.import_module(sys.argv[1])  # a scheduler has imported its kernels before it loads plug-ins
kernel = decode._tiled_sparse_decode_kernel
before = "smart_autotune" in sys.modules

from sglang.srt.plugins import load_plugins
load_plugins()
load_plugins()
after_loading = "smart_autotune" in sys.modules

import smart_autotune
import torch
import triton
sys.path.append({str(TESTS)!r})
from support.stub_driver import ScriptedBench, StubDriver, active

def cache(pages, tokens, page_bytes):
    pool = torch.zeros(pages * page_bytes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return pool.as_strided((pages, tokens, 1, 584), (page_bytes, 584, 584, 1))

def call(batch, heads=64):
    decode.flash_mla_sparse_decode_triton(
        torch.zeros(batch, 1, heads, 512, dtype=torch.bfloat16), cache(2, 256, 149760),
        torch.zeros(batch, 1, 128, dtype=torch.int32), torch.full((batch,), 128, dtype=torch.int32),
        torch.zeros(heads), 512, 512**-0.5, cache(2, 64, 37440), torch.zeros(batch, 1, 512, dtype=torch.int32),
        torch.full((batch,), 512, dtype=torch.int32),
    )

entry = importlib.import_module(sys.argv[1].removesuffix("_triton")).flash_mla_with_kvcache_sm120
driver = StubDriver(120)
driver.bench = ScriptedBench(driver, lambda launch: launch.metadata.num_warps)
with active(driver):
    for batch in (2, 2):
        call(batch)
print(json.dumps({{
    "before": before, "after_loading": after_loading, "enabled": smart_autotune.status().enabled,
    "tuners_before": smart_autotune.status().tuners_before, "kernel": type(kernel).__module__,
    "records": [
        {{"kernel": record.kernel, "values": record.key.values, "batch": record.key.batch,
          "outcomes": sorted(str(verdict.outcome) for verdict in record.verdicts),
          "needs": [verdict.need for verdict in record.verdicts], "arch": dict(record.key.device)["arch"]}}
        for record in smart_autotune.records()
    ],
    "launches": len(driver.launches), "timed": len(driver.bench.timed), "best": str(kernel.best_config),
    "decode_is_ours": hasattr(entry, "__wrapped__"),
}}))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "serve.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


ONE_VERSION = pytest.mark.parametrize("server", ["0.5.17"], indirect=True)


def report(server, script, variables):
    done = server.run(script, MODULES[server.version], variables=variables)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_sglangs_own_loader_turns_us_on_and_its_kernel_is_tuned_by_our_engine(server, script):
    found, complaints = report(server, script, {"SMART_AUTOTUNE": "1"})
    assert not found["before"] and found["after_loading"] and found["enabled"]
    assert found["tuners_before"] >= 1, "the kernel's tuner was made before us"
    assert found["kernel"] == "triton.runtime.autotuner"
    swa, c4 = found["records"]
    for record, topk in ((swa, 128), (c4, 512)):
        assert record["kernel"] == "_tiled_sparse_decode_kernel" and record["arch"] == "sm_120"
        assert record["values"] == [["topk_rounded", "int", topk]]
        assert record["outcomes"] == ["SLOWER", "SLOWER", "WON"]
        assert all(0 < need <= 101_376 for need in record["needs"]), "compiled for SM120 and compared with its limit"
        assert record["batch"][1] == 2
    assert found["timed"] == 2 * 3 and found["launches"] == 2 * 3 + 2 * 2
    assert "num_warps: 4" in found["best"]
    assert not found["decode_is_ours"], "nobody asked for it"
    assert "smart_autotune" not in complaints


@ONE_VERSION
@pytest.mark.parametrize(
    "variables",
    [{}, {"SMART_AUTOTUNE": "1", "SMART_AUTOTUNE_SPARSE_DECODE": "force", "SGLANG_PLUGINS": "another"}],
    ids=["unset", "filtered"],
)
def test_unset_or_filtered_out_by_sglang_stock_tunes(server, script, variables):
    found, complaints = report(server, script, variables)
    assert not found["enabled"] and found["records"] == [] and not found["decode_is_ours"]
    assert found["after_loading"] is ("SGLANG_PLUGINS" not in variables), "an entry point is imported; inert when unset"
    assert found["timed"] == 2 * 3 and "num_warps: 4" in found["best"]
    assert "smart_autotune" not in complaints


@ONE_VERSION
def test_strict_sglang_reports_what_stands_against_it_and_serves(server, script):
    """SGLang catches what a plug-in raises, logs it and goes on."""
    variables = {"SMART_AUTOTUNE": "maybe", "SMART_AUTOTUNE_STRICT": "1"}
    found, complaints = report(server, script, variables)
    assert not found["enabled"] and found["records"] == []
    assert "SMART_AUTOTUNE='maybe' is not allowed" in complaints
