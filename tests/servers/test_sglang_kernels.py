"""All stock-autotuned kernels of a real SGLang wheel: our engine takes each decorator's arguments as they are."""

from __future__ import annotations

import json

import pytest

from support.installed import TESTS

SCRIPT = TESTS / "support" / "sglang_kernels.py"
# Their imports need what is not installed here: a server's network stack, or the image models' dependencies.
CANNOT_BE_IMPORTED = {
    "sglang.kernels.ops.attention.dsa.triton_sparse_mla": "zmq",
    "sglang.kernels.ops.diffusion.triton.norm": "einops",
    "sglang.kernels.ops.diffusion.triton.rotary": "einops",
    "sglang.kernels.ops.diffusion.triton.scale_shift": "einops",
    "sglang.kernels.ops.quantization.fp8_kernel": "zmq",
}
# Those whose decorator says more than configs and a key.
RESTORES = {"_merge_attn_out_kernel": ["o_ptr"]}
PRUNES = {"_fused_gather_attn_dsv4_dual_scope_kernel"}
ONE_CONFIG = {
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64_k_loop",
}
A_KEY_THAT_IS_NO_ARGUMENT = {"_gqa_share_sparse_decode_kernel": ["block_size"]}


@pytest.fixture(scope="module")
def found(server):
    done = server.run(str(SCRIPT))
    return json.loads(done.stdout.splitlines()[-1]) | {"complaints": done.stderr.splitlines()}


@pytest.mark.parametrize("server", ["0.5.17"], indirect=True)
class TestKernels:
    def test_every_module_is_collected_or_names_what_is_missing(self, found):
        missing = {name: error.removeprefix("ModuleNotFoundError: ") for name, error in found["failed"].items()}
        assert missing == {name: f"No module named '{needed}'" for name, needed in CANNOT_BE_IMPORTED.items()}
        assert found["enabled"] and found["subclasses"] == []
        assert len(found["tuners"]) == 32

    def test_every_tuner_has_an_engine_with_stocks_own_configs(self, found):
        for tuner in found["tuners"]:
            assert tuner["same_configs"] and tuner["identity"] and tuner["keys"], tuner
            assert (tuner["configs"] == 1) is (tuner["name"] in ONE_CONFIG), tuner
        assert max(tuner["configs"] for tuner in found["tuners"]) == 81
        assert sum(tuner["cache_results"] for tuner in found["tuners"]) == 8

    def test_restores_and_prunes_are_those_of_the_decorators(self, found):
        tuners = found["tuners"]
        assert {tuner["name"]: tuner["restores"] for tuner in tuners if tuner["restores"]} == RESTORES
        assert {tuner["name"] for tuner in tuners if tuner["prunes"]} == PRUNES
        assert not any(tuner["resets"] for tuner in tuners)

    def test_the_only_warning_is_true(self, found):
        """A key name that is no argument of its kernel never selects anything, with stock neither."""
        unknown = {tuner["name"]: tuner["unknown_keys"] for tuner in found["tuners"] if tuner["unknown_keys"]}
        assert unknown == A_KEY_THAT_IS_NO_ARGUMENT
        ours = [
            line for line in found["complaints"] if line.startswith(("WARNING smart_autotune", "ERROR smart_autotune"))
        ]
        assert len(ours) == 1 and "_gqa_share_sparse_decode_kernel: key name 'block_size' is not an argument" in ours[0]
