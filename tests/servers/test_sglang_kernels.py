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
# Where each one's batch is read from, unless that is the first tensor's first dimension: SGLang's own key holds it
# ("never"), or an argument has it. ``BS`` is a config's value, which "auto" skips.
BATCHES = {
    "_topk_index_partial_kernel": ["argument", "seq_lens", 0],
    "_merge_attn_out_kernel": ["argument", "seq_lens", 0],
    "_decode_score_attn_kernel": ["auto", "batch_size"],
    "kda_gate_chunk_cumsum_vector_kernel": ["auto", "BS"],
    "_decode_score_kernel": ["never"],
    "_gqa_share_sparse_decode_kernel": ["never"],
    "chunk_local_cumsum_vector_kernel": ["never"],
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ["never"],
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64_k_loop": ["never"],
    "_fused_gather_attn_dsv4_kernel": ["never"],
    "_fused_gather_attn_dsv4_dual_scope_kernel": ["never"],
    "_fused_gather_attn_dsv4_dual_scope_splitk_kernel": ["never"],
    "_fused_gather_attn_dsv4_splitk_kernel": ["never"],
    "_combine_splitk_kernel_8_optimized": ["never"],
    "topk_softmax_triton_kernel": ["never"],
    "topk_sigmoid_triton_kernel": ["never"],
    "_causal_conv1d_fwd_with_prefix_kernel": ["never"],
}
# In these the first tensor is one row of all tokens, [1, tokens, ...], or scores by head: a constant, so they are tuned
# once. In the others it has a row for each token (or, in the op of SM120, for each request).
CONSTANT = {
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": "k",
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel_low_reg": "k",
    "chunk_kda_fwd_kernel_inter_solve_fused": "q",
    "chunk_kda_fwd_kernel_intra_sub_chunk": "q",
    "chunk_kda_fwd_kernel_intra_token_parallel": "q",
    "chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_inter": "q",
    "chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_intra": "q",
    "chunk_gla_fwd_kernel_o": "q",
    "_recompute_w_u_fwd_kernel": "k",
    "_topk_index_kernel": "s_ptr",
}
ROWS = {
    "_tiled_sparse_decode_kernel": "Q_ptr",
    "_flash_attn_fwd_with_block_score_kernel": "q_ptr",
    "_gqa_share_sparse_fwd_kernel": "q_ptr",
    "softcap_out_kernel": "output_ptr",
    "fused_dual_residual_rmsnorm_kernel": "output_ptr",
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

    def test_where_the_batch_of_each_kernel_is_read_from(self, found):
        read_from = {tuner["name"]: tuner["batch"] for tuner in found["tuners"]}
        assert {name: place for name, place in read_from.items() if place != ["auto"]} == BATCHES
        first = {tuner["name"]: tuner["first_argument"] for tuner in found["tuners"] if tuner["batch"] == ["auto"]}
        assert first == CONSTANT | ROWS

    def test_the_only_warning_is_true(self, found):
        """A key name that is no argument of its kernel never selects anything, with stock neither."""
        unknown = {tuner["name"]: tuner["unknown_keys"] for tuner in found["tuners"] if tuner["unknown_keys"]}
        assert unknown == A_KEY_THAT_IS_NO_ARGUMENT
        ours = [
            line for line in found["complaints"] if line.startswith(("WARNING smart_autotune", "ERROR smart_autotune"))
        ]
        assert len(ours) == 1 and "_gqa_share_sparse_decode_kernel: key name 'block_size' is not an argument" in ours[0]
