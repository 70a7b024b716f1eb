"""SGLang's sparse-decode entry served by our op, with the head count that the rank really has.

SGLang hands its kernels 64 heads (128 for the large model) although a rank owns fewer; the rest of ``q`` is whatever
the memory held. The attention layer knows the true number, so its call is looked at too.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from smart_autotune import settings
from smart_autotune.errors import one_line, raise_if_sticky
from smart_autotune.once import warn_once

from .seams import Seam
from .verified import Release

log = logging.getLogger("smart_autotune")

ENTRY = "flash_mla_with_kvcache_sm120"
BACKEND_MODULE = "sglang.srt.layers.attention.deepseek_v4_backend"
LAYER_CALL = "DeepseekV4AttnBackend.forward"
LAYER_POSITION = 3  # of ``layer`` in forward(q, k, v, layer, ...)
HEAD_DIM = 512

_here = threading.local()  # .heads: those of the layer that this thread is inside of


class SparseDecode:
    """The two seams of one release, and what becomes of the calls that reach them."""

    def __init__(self, release: Release) -> None:
        self.gave_up = ""  # why SGLang's own serves, after a failure of ours
        self._heads_lead = release.heads_lead
        self._served = False
        self.entry = Seam(release.decode, ENTRY, self.decode, sole=True)
        self.layer = Seam(BACKEND_MODULE, LAYER_CALL, in_layer, unless=_why_not_on_this_gpu)
        self.seams = (self.entry, self.layer)

    @property
    def serves(self) -> bool:
        """Whether calls of the entry are ours to serve."""
        return self.entry.is_in_place and not self.gave_up

    def decode(self, original: Callable[..., Any], **call: Any) -> Any:
        """Around the entry: ``(out, None)``. No caller uses the second one, which is SGLang's LSE."""
        if self.gave_up or not _is_for_us(call["q"].device):
            return original(**call)
        heads = self._real_heads(call["q"])
        try:
            out = _decode(heads, **call)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            raise_if_sticky(error)
            if settings.current().strict:
                raise
            self.gave_up = one_line(error)
            log.error("SGLang's own sparse decode takes over for good: %s", self.gave_up, exc_info=error)
            return original(**call)
        if not self._served:
            self._served = True
            log.info("sparse decode is served by smart_autotune: %d heads of %d", heads, call["q"].shape[2])
        return out, None

    def _real_heads(self, q: torch.Tensor) -> int:
        """The heads at the front of ``q`` that the rank owns; all, where that is not known."""
        heads = getattr(_here, "heads", None)
        known = self._heads_lead and isinstance(heads, int) and 1 <= heads <= q.shape[2]
        return heads if known and heads is not None else q.shape[2]


def in_layer(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the attention layer's call: its head count is known to the decode inside."""
    layer = kwargs.get("layer", args[LAYER_POSITION] if len(args) > LAYER_POSITION else None)
    outer = getattr(_here, "heads", None)
    _here.heads = getattr(layer, "tp_q_head_num", None)
    try:
        return original(backend, *args, **kwargs)
    finally:
        _here.heads = outer


def _decode(
    heads: int,
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> Any:
    """SGLang's call as a call of our op. Rows of heads from ``heads`` on hold anything, as its callers expect."""
    from smart_autotune.kernels.sparse_decode import sparse_decode

    if head_dim_v != HEAD_DIM:
        raise ValueError(f"head_dim_v: expected {HEAD_DIM}, got {head_dim_v}")
    return sparse_decode(
        q,
        k_cache,
        indices,
        topk_length,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        extra_topk_length,
        softmax_scale=HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale,
        num_heads=heads,
    )


def _is_for_us(device: torch.device) -> bool:
    if settings.current().sparse_decode == "force" or _is_sm120(device):
        return True
    _does_not_apply()
    return False


@functools.cache
def _is_sm120(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12


def _why_not_on_this_gpu(backend: ModuleType) -> str:
    """SGLang has asked the GPU by the time its backend is imported, so that we need not."""
    if settings.current().sparse_decode == "force" or getattr(backend, "_is_sm120", True):
        return ""
    _does_not_apply()
    return "not an SM120 GPU"


def _does_not_apply() -> None:
    warn_once(
        "sparse decode on another GPU",
        "SMART_AUTOTUNE_SPARSE_DECODE does not apply here: it is for SM120 GPUs (compute capability 12.x); "
        "SGLang's own attention serves",
    )
