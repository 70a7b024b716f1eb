"""How the tiny models are served: one set of options, as keywords of ``sglang.Engine`` and as a command line."""

from __future__ import annotations

import pathlib
from typing import Any

RELEASES = {"kimi": "0.5.14", "minimax": "0.5.17"}  # of SGLang, by server
BATCH = 64
# Captured, by server. Unset, each size of minimax costs half a minute of tuning and the first one two minutes.
DECODE_BATCHES = {"kimi": [1, 2, 4, 8, 16, 32, 64], "minimax": [8, 64]}

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 65536,
    "max_running_requests": BATCH,
    "chunked_prefill_size": 4096,
    "disable_radix_cache": True,
    "disable_custom_all_reduce": True,
    "random_seed": 1,
}


def options(model_path: str, prefill_graphs: bool) -> dict[str, Any]:
    """``prefill_graphs``: SGLang's default. Without them prefill is eager, as the stall is measured."""
    has_weights = (pathlib.Path(model_path) / "model.safetensors").exists()
    chosen = {"model_path": model_path, "load_format": "auto" if has_weights else "dummy", **OPTIONS}
    chosen["cuda_graph_bs_decode"] = DECODE_BATCHES[pathlib.Path(model_path).name]
    return chosen if prefill_graphs else {**chosen, "disable_prefill_cuda_graph": True}


def command_line(chosen: dict[str, Any], port: int) -> list[str]:
    words = []
    for name, value in {**chosen, "host": "127.0.0.1", "port": port}.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


# ---- the requests, the same over the Engine and over HTTP ------------------------------------------------------------

SAMPLING = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
ONE = [(i * 37 + 11) % 1000 + 3 for i in range(32)]
MANY = [[(i * 37 + row * 101 + 11) % 1000 + 3 for i in range(32)] for row in range(BATCH)]
# Kimi-Linear's greedy tokens under stock, the same in every process.
FIRST_TOKENS = [621, 420, 757, 39, 249, 1012, 564, 355]
DIGEST = "99d82eef0cf8"  # of all of MANY
