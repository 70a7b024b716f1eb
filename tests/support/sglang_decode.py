"""A process of its own: SGLang's sparse-decode entry, called as its backend calls it, beside its torch oracle.

The backend's module takes a GPU library to import; its ``forward`` is cut out of the file and runs as it is.
Prints one line of JSON.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

import sglang
import torch

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
NEW_PLACE = sglang.__version__ >= "0.5.16"
ENTRY = f"sglang.{'kernels.ops' if NEW_PLACE else 'srt.layers'}.attention.flash_mla_sm120"
PAGE_SIZES = {0: None, 4: 64, 128: 2}  # of the extra cache, by the layer's compression
WIDTHS = {0: 0, 4: 512, 128: 128}
PADDED = 64


def backend_module() -> ModuleType:
    """``DeepseekV4AttnBackend.forward`` of the installed SGLang in a module of its name."""
    path = Path(sglang.__path__[0]) / "srt/layers/attention/deepseek_v4_backend.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DeepseekV4AttnBackend"]
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    found.bases, found.decorator_list = [], []
    annotations = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ModuleType(BACKEND)
    from sglang.srt.environ import envs

    vars(module).update(
        torch=torch, envs=envs, DeepSeekV4TokenToKVPool=SimpleNamespace, DSV4AttnMetadata=SimpleNamespace,
        _is_sm120=True, _is_xpu=False, _LARGE_INDEXER_QUERY_THRESHOLD=11673,
    )  # fmt: skip
    tree = ast.fix_missing_locations(ast.Module([annotations, found], []))
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


sys.modules[BACKEND] = backend_module()

from sglang.srt.plugins import load_plugins

load_plugins()

from smart_autotune.kernels.sparse_decode.layout import page_bytes, random_cache
from smart_autotune.patches import sglang as plugin

theirs = importlib.import_module(ENTRY)


def pool(page_size: int, seed: int) -> torch.Tensor:
    """The pool's pages [P, bytes], as SGLang keeps them."""
    size = page_bytes(page_size)
    pages = 4 if page_size > 2 else 200
    return random_cache(pages, page_size, seed=seed).as_strided((pages, size), (size, 1)).view(torch.float8_e4m3fn)


def tokens(rows: int, width: int, lengths: list[int], limit: int, seed: int) -> torch.Tensor:
    """int32 [rows, width] with one -1 inside the length; after it -1 in the first row, tokens in the others."""
    found = torch.randint(0, limit, (rows, width), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    for row, length in enumerate(lengths):
        if row == 0:
            found[row, length:] = -1
        if length > 2:
            found[row, 1] = -1
    return found


def compare(ratio: int, heads: int, rows: int, padded: int) -> dict[str, float | bool]:
    """One layer's call through the real backend with ours inside, and the oracle on the same bytes."""
    lengths = [100, 1, 37][:rows]
    extra = PAGE_SIZES[ratio]
    extra_width, extra_lengths = WIDTHS[ratio], [min(WIDTHS[ratio], n) for n in (70, 1, 300)][:rows]
    caches = {256: pool(256, 1), **({extra: pool(extra, 2)} if extra else {})}
    metadata = SimpleNamespace(
        swa_page_indices=tokens(rows, 128, lengths, 4 * 256, 3),
        swa_topk_lengths=torch.tensor(lengths, dtype=torch.int32),
        get_flashmla_metadata=lambda ratio: None,
    )
    if extra:
        indices = tokens(rows, extra_width, extra_lengths, caches[extra].shape[0] * extra, 4)
        lens = torch.tensor(extra_lengths, dtype=torch.int32)
        metadata.c4_sparse_page_indices = metadata.c128_page_indices = indices
        metadata.c4_sparse_topk_lengths = metadata.c128_topk_lengths_clamp1 = lens
    backend = sys.modules[BACKEND].DeepseekV4AttnBackend()
    backend.mtp_enabled, backend.head_dim_v, backend.softmax_scale = False, 512, 512**-0.5
    backend.forward_metadata = SimpleNamespace(core_attn_metadata=metadata)
    backend.token_to_kv_pool = SimpleNamespace(
        get_swa_key_buffer_radix=lambda layer: caches[256], get_extra_key_buffer=lambda layer: caches[extra],
        swa_window_size=256, page_size=256, swa_kv_pool=SimpleNamespace(kv_cache_total_dim=584),
    )  # fmt: skip
    backend.get_swa_out_cache_loc = lambda batch: None
    q = torch.full((rows, padded, 512), float("nan"), dtype=torch.bfloat16)
    q[:, :heads] = torch.randn(rows, heads, 512, generator=torch.Generator().manual_seed(5))
    sink = torch.linspace(-2, 2, padded)
    call = {
        "q": q, "k": q, "v": q, "layer": SimpleNamespace(layer_id=0, tp_q_head_num=heads, v_head_dim=512),
        "forward_batch": SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_extend_without_speculative=lambda: False)
        ),
        "compress_ratio": ratio, "save_kv_cache": False, "attn_sink": sink,
    }  # fmt: skip
    out, again = backend.forward(**call), backend.forward(**call)

    def view(cache: torch.Tensor, page_size: int) -> torch.Tensor:
        return cache[:, : page_size * 584].view(cache.shape[0], page_size, 1, 584)

    expected, _ = theirs._sm120_sparse_decode_fwd(
        q[:, None, :heads], view(caches[256], 256), metadata.swa_page_indices[:, None], metadata.swa_topk_lengths,
        sink[:heads], 512, 512**-0.5,
        *((view(caches[extra], extra), indices[:, None], lens) if extra else (None, None, None)),
    )  # fmt: skip
    mine = out[:, :heads]
    difference = (mine.float() - expected[:, 0].float()).abs()
    mine[..., -64:] += 1  # what the model does with the rope part
    return {
        "shape": list(out.shape) == [rows, padded, 512] and out.dtype == torch.bfloat16,
        "finite": bool(mine.isfinite().all()),
        "over": float((difference / (expected[:, 0].float().abs() * 2**-7 + 2e-4)).max()),
        "fresh": again.data_ptr() != out.data_ptr() and bool((again[:, :heads] != mine).any()),
    }


print(
    json.dumps(
        {
            "ours": hasattr(theirs.flash_mla_with_kvcache_sm120, "_smart_autotune_seam"),
            "cases": [
                compare(0, 4, 3, PADDED),
                compare(4, 4, 3, PADDED),
                compare(128, 4, 3, PADDED),
                compare(4, 64, 1, 64),
            ],
            "status": str(plugin.status()),
            "gave_up": plugin.status().gave_up,
        }
    )
)
