"""Where SGLang's own kernels have their batch size, for those in which ``batch="auto"`` takes another number for it.

Only kernels of the decode graphs: each captured size is a batch of its own there. A prefill kernel in which "auto" sees
a constant is left at that. It is tuned once, as by stock, and not for each token count that a request brings along.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from smart_autotune.batch import BatchSpec

from ..gate import Conflict
from .verified import find

log = logging.getLogger("smart_autotune")

_MINIMAX_DECODE = (
    "sglang.srt.layers.attention.minimax_sparse_ops.decode.flash_with_topk_idx",  # 0.5.14 and 0.5.15
    "sglang.kernels.ops.attention.minimax_sparse.decode.flash_with_topk_idx",  # 0.5.16 and 0.5.17
)
# By module and name: an argument, or an argument and its dimension.
BATCHES: Mapping[tuple[str, str], str | tuple[str, int]] = {
    # Their first tensors are [heads, batch, blocks] and [KV chunks, batch, heads, head_dim]; ``seq_lens`` is [batch].
    (module, kernel): "seq_lens"
    for module in _MINIMAX_DECODE
    for kernel in ("_topk_index_partial_kernel", "_merge_attn_out_kernel")
}


def batch_of(tuner: Any) -> BatchSpec:
    """What ``batch=`` a stock tuner of SGLang's gets: "auto", unless this very release is known to need another."""
    kernel = tuner.base_fn
    batch = BATCHES.get((kernel.__module__, kernel.__qualname__))
    if batch is None:
        return "auto"
    release = find(getattr(sys.modules.get("sglang"), "__version__", None))
    if isinstance(release, Conflict):
        log.debug("%s: batch=%r is not used: %s", kernel.__qualname__, batch, release)
        return "auto"
    argument = batch if isinstance(batch, str) else batch[0]
    if argument not in tuner.arg_names:
        log.debug("%s: batch=%r is not used: it has no such argument", kernel.__qualname__, batch)
        return "auto"
    return batch
