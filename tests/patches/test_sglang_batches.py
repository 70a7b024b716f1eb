"""SGLang's own kernels whose batch "auto" does not find: which get another rule, and when they do not."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

import smart_autotune
from smart_autotune import settings
from smart_autotune.patches import triton_3_6_0 as patch
from smart_autotune.patches.sglang import batches
from support import fake_sglang
from support.fake_kernel import FakeKernel
from support.patching import on_the_verified_triton

pytestmark = on_the_verified_triton
OLD_PLACE, NEW_PLACE = batches._MINIMAX_DECODE
HEADS, CHUNKS = 4, 256


def _topk_index_partial_kernel(s_ptr, seq_lens, topk, BLOCK_SIZE_K=1):
    """s_ptr: [heads, batch, blocks]. seq_lens: [batch]."""


def _merge_attn_out_kernel(o_ptr, lse_ptr, seq_lens, BLOCK_SIZE_D, BLOCK=1):
    """o_ptr: [chunks, batch, heads, head_dim]. lse_ptr: [chunks, batch, heads]. seq_lens: [batch]."""


def renamed_argument(s_ptr, lengths, topk, BLOCK_SIZE_K=1):
    """As the first of them, had a patch release renamed its argument."""


def tuner(function=_topk_index_partial_kernel, module=NEW_PLACE, name="", **options):
    """A stock tuner of a function that claims to be SGLang's, with two configs."""
    own = type(function)(function.__code__, {}, function.__name__, function.__defaults__)
    own.__module__, own.__qualname__ = module, name or function.__name__
    kernel = FakeKernel(own)
    *_, tuned = inspect.signature(function).parameters
    configs = [triton.Config({tuned: size}) for size in (64, 128)]
    options = {"key": ["topk"], "do_bench": kernel.bench(lambda values: values[tuned]), **options}
    return Autotuner(kernel, kernel.arg_names, configs=configs, reset_to_zero=None, restore_value=None, **options)


def batches_of(kernel):
    """The batch parts of the keys that the patch's engine has tuned."""
    return [record.key.batch for record in kernel.__dict__[patch._SLOT].engine.records]


def scores(batch):
    return torch.zeros(HEADS, batch, 16), torch.ones(batch, dtype=torch.int64), 8


def partials(batch):
    lse = torch.zeros(CHUNKS, batch, HEADS)
    return torch.zeros(CHUNKS, batch, HEADS, 2), lse, torch.ones(batch, dtype=torch.int64), 2


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    """SGLang is loaded, and only our patch of Triton is on, as from the ``.pth`` alone."""
    with fake_sglang.loaded(monkeypatch, tmp_path) as module:
        smart_autotune.enable()
        yield module


@pytest.mark.parametrize("module", [OLD_PLACE, NEW_PLACE])
@pytest.mark.parametrize(
    ("function", "arguments"), [(_topk_index_partial_kernel, scores), (_merge_attn_out_kernel, partials)]
)
def test_each_batch_bucket_of_a_decode_kernel_is_tuned_for_itself(sm_120, sglang, module, function, arguments):
    kernel = tuner(function, module, key=["topk"] if function is _topk_index_partial_kernel else ["BLOCK_SIZE_D"])
    for batch in (64, 5, 6, 1):
        kernel[(1,)](*arguments(batch))
    assert batches_of(kernel) == [("seq_lens", 64), ("seq_lens", 8), ("seq_lens", 1)]


def test_where_the_number_came_from_is_in_the_record(sm_120, sglang):
    kernel = tuner()
    kernel[(1,)](*scores(6))
    record = smart_autotune.records()[-1]
    assert record.kernel == "_topk_index_partial_kernel" and record.batch == "seq_lens -> bucket 8"
    assert "batch(seq_lens)<=8" in record.key.describe()


@pytest.mark.parametrize("version", ["0.5.13", "0.5.14.post1", "0.5.17"])
def test_the_rule_holds_in_every_verified_release(sglang, monkeypatch, version):
    monkeypatch.setattr(sglang, "__version__", version)
    assert batches.batch_of(tuner()) == "seq_lens"


@pytest.mark.parametrize("version", ["0.5.12", "0.5.18", "0.6.0", "unknown", None])
def test_in_any_other_release_auto_decides(sm_120, sglang, monkeypatch, version):
    monkeypatch.setattr(sglang, "__version__", version)
    kernel = tuner()
    kernel[(1,)](*scores(6))
    assert batches.batch_of(kernel) == "auto" and batches_of(kernel) == [("s_ptr", HEADS)]


def test_where_sglang_itself_is_not_loaded_auto_decides():
    assert "sglang" not in sys.modules and batches.batch_of(tuner()) == "auto"


def test_a_kernel_without_the_argument_is_left_to_auto(sm_120, sglang):
    kernel = tuner(renamed_argument, name="_topk_index_partial_kernel")
    kernel[(1,)](*scores(6))
    assert batches_of(kernel) == [("s_ptr", HEADS)]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sglang.kernels.ops.attention.minimax_sparse.prefill.flash_with_topk_idx", "_topk_index_partial_kernel"),
        (NEW_PLACE, "_decode_score_attn_kernel"),
        ("sglang_fork.kernels.ops.attention.minimax_sparse.decode.flash_with_topk_idx", "_topk_index_partial_kernel"),
        ("model", "_topk_index_partial_kernel"),
        (None, "_topk_index_partial_kernel"),
    ],
)
def test_any_other_kernel_is_left_to_auto(sm_120, sglang, module, name):
    kernel = tuner(module=module, name=name)
    kernel[(1,)](*scores(6))
    assert batches_of(kernel) == [("s_ptr", HEADS)]


def test_the_setting_turns_this_batch_off_too(sm_120, sglang):
    with settings.override(batch="off"):
        kernel = tuner()
        for batch in (64, 6):
            kernel[(1,)](*scores(batch))
        assert batches_of(kernel) == [None]


def test_other_kernels_load_nothing_of_the_plug_in(sm_120, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("smart_autotune.patches.sglang")]:
        monkeypatch.delitem(sys.modules, name)
    smart_autotune.enable()
    kernel = tuner(module="model")
    kernel[(1,)](*scores(6))
    assert batches_of(kernel) == [("s_ptr", HEADS)]
    assert not any(name.startswith("smart_autotune.patches.sglang") for name in sys.modules)
