"""Real SGLang wheels: the decode kernels whose batch "auto" does not find are tuned once for each batch bucket."""

from __future__ import annotations

import json

import pytest

from support.installed import TESTS

SCRIPT = TESTS / "support" / "sglang_batches.py"


def tuned(server, **variables):
    """What was tuned, by kernel, where SGLang's own function was called at these batch sizes."""
    done = server.run(str(SCRIPT), "48", "33", "3", variables={"SMART_AUTOTUNE": "1", **variables})
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["enabled"] and "smart_autotune" not in done.stderr, done.stderr
    kernels = {record["kernel"]: [] for record in found["records"]}
    for record in found["records"]:
        kernels[record["kernel"]].append(record["batch"])
    return kernels


def test_each_bucket_of_the_batch_is_a_tuning_wherever_the_batch_sits(server):
    buckets = ["seq_lens -> bucket 64", "seq_lens -> bucket 4"]
    assert tuned(server) == {"_topk_index_partial_kernel": buckets, "_merge_attn_out_kernel": buckets}


@pytest.mark.parametrize("server", ["0.5.17"], indirect=True)
def test_without_sglangs_plug_ins_the_same_is_tuned(server):
    """As in a process that only the ``.pth`` reaches: here it is imitated by turning us on before."""
    done = server.run("-c", ENABLED_BEFORE.format(script=str(SCRIPT)), variables={"SGLANG_PLUGINS": "another"})
    records = json.loads(done.stdout.splitlines()[-1])["records"]
    assert {record["batch"] for record in records} == {"seq_lens -> bucket 2"} and len(records) == 2


ENABLED_BEFORE = """
import runpy, sys
import smart_autotune
smart_autotune.enable()
sys.argv = [{script!r}, "2"]
runpy.run_path({script!r}, run_name="__main__")
"""
