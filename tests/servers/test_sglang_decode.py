"""Real SGLang wheels: their late import of the SM120 decode gets our op, which agrees with their own torch oracle."""

from __future__ import annotations

import ast
import json
import os
import shutil

import pytest

from smart_autotune.patches.sglang import sparse_decode, verified, warm_up
from support.installed import TESTS

SCRIPT = TESTS / "support" / "sglang_decode.py"
ON = {"SMART_AUTOTUNE": "1", "SMART_AUTOTUNE_SPARSE_DECODE": "force", "TRITON_INTERPRET": "1"}


def release(server):
    found = verified.find(server.version)
    assert isinstance(found, verified.Release)
    return found


def test_the_files_of_the_wheel_are_the_verified_ones(server):
    assert verified.changed_file(release(server), server.sglang) is None


def test_what_the_warm_up_waits_for_is_in_the_wheel(server):
    places = [release(server).capture, (warm_up.SCHEDULER_MODULE, warm_up.READY)]
    for module, path in places:
        cls, method = methods(server, module, path)
        assert method.args.args[0].arg == "self" and len(method.args.args) == 1
        read = {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute)}
        if module == warm_up.SCHEDULER_MODULE:
            assert {"server_args", "ps"} <= read
        else:
            assert {"capture_bs", "model_runner", "is_draft_worker"} <= read
            assert read & {"captured_req_width", "num_tokens_per_bs"}


def test_the_layer_is_where_the_head_count_is_read(server):
    _, method = methods(server, sparse_decode.BACKEND_MODULE, sparse_decode.LAYER_CALL)
    assert method.args.args[1 + sparse_decode.LAYER_POSITION].arg == "layer"


def methods(server, module, path):
    """The class and the method that ``module`` defines at ``path``."""
    tree = ast.parse((server.sglang.parent / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    cls, method = path.split(".")
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls]
    (function,) = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method]
    return found, function


def test_their_backend_calls_our_op_and_gets_what_their_oracle_says(server):
    """Pages of 256, 64 and 2, one list and two, a sink, holes, 4 real heads of 64 with NaN behind them, and all 64."""
    done = server.run(str(SCRIPT), variables=ON)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] and found["gave_up"] == "", done.stderr
    for case in found["cases"]:
        assert case["shape"] and case["finite"] and case["fresh"], case
        assert case["over"] <= 1, "within a unit in the last place of bf16"
    assert "sparse decode is served by smart_autotune: 4 heads of 64" in done.stderr
    assert "WARNING smart_autotune" not in done.stderr and "ERROR smart_autotune" not in done.stderr


LATE_IMPORT = """
import importlib, json, sys
import sglang
from sglang.srt.plugins import load_plugins
load_plugins()
print(json.dumps(hasattr(importlib.import_module(sys.argv[1]).flash_mla_with_kvcache_sm120, "_smart_autotune_seam")))
"""


@pytest.mark.parametrize("server", ["0.5.17"], indirect=True)
def test_an_edited_file_is_refused_and_their_own_decode_stays(server, tmp_path):
    edited = tmp_path / "sglang"
    shutil.copytree(server.sglang, edited, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    name = next(name for name in release(server).files if name.endswith("flash_mla_sm120.py"))
    text = (edited / name).read_text()
    (edited / name).unlink()
    (edited / name).write_text(text + "# a change\n")
    variables = {**ON, "SMART_AUTOTUNE_STRICT": "0"}
    done = server.run("-c", LATE_IMPORT, release(server).decode, variables=variables, first=[tmp_path])
    assert json.loads(done.stdout.splitlines()[-1]) is False
    (line,) = [line for line in done.stderr.splitlines() if "sglang: expected" in line]
    assert name in line and "SGLang's own sparse decode stays" in line
