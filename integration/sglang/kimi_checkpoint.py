"""Writes a seeded checkpoint of 16 MB beside a tiny Kimi-Linear ``config.json``.

    python integration/sglang/kimi_checkpoint.py FOLDER_WITH_CONFIG

SGLang's dummy loader fails for this model, and dummy weights would make its greedy tokens mean nothing. The order of
the random draws is part of the checkpoint: another order is another model and other tokens.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


class Draw:
    """Named weights from one generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator)

    def linear(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        self.weights[f"{name}.weight"] = (self.normal(rows, columns) * scale / math.sqrt(columns)).bfloat16()

    def norm(self, name: str, size: int) -> None:
        self.weights[f"{name}.weight"] = torch.ones(size).bfloat16()


def weights_of(config: dict[str, Any]) -> Weights:
    draw = Draw(seed=0)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    draw.weights["model.embed_tokens.weight"] = draw.normal(vocabulary, hidden).bfloat16()
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        draw.norm(f"{layer}input_layernorm", hidden)
        draw.norm(f"{layer}post_attention_layernorm", hidden)
        draw.linear(f"{layer}mlp.gate_proj", config["intermediate_size"], hidden)
        draw.linear(f"{layer}mlp.up_proj", config["intermediate_size"], hidden)
        draw.linear(f"{layer}mlp.down_proj", hidden, config["intermediate_size"])
        linear = index + 1 in config["linear_attn_config"]["kda_layers"]
        (_delta_attention if linear else _latent_attention)(draw, f"{layer}self_attn.", config)
    draw.norm("model.norm", hidden)
    draw.linear("lm_head", vocabulary, hidden, 3.0)
    return draw.weights


def _delta_attention(draw: Draw, name: str, config: dict[str, Any]) -> None:
    hidden, options = config["hidden_size"], config["linear_attn_config"]
    heads, head_dim = options["num_heads"], options["head_dim"]
    width = heads * head_dim
    for part in "qkv":
        draw.linear(f"{name}{part}_proj", width, hidden)
        conv = draw.normal(width, 1, options["short_conv_kernel_size"]) * 0.5
        draw.weights[f"{name}{part}_conv1d.weight"] = conv
    draw.linear(f"{name}b_proj", heads, hidden)
    draw.linear(f"{name}f_a_proj", head_dim, hidden)
    draw.linear(f"{name}g_a_proj", head_dim, hidden)
    draw.linear(f"{name}f_b_proj", width, head_dim)
    draw.linear(f"{name}g_b_proj", width, head_dim)
    draw.weights[f"{name}A_log"] = torch.log(draw.uniform(1, 1, heads, 1) * 15 + 1)
    draw.weights[f"{name}dt_bias"] = draw.uniform(width) * 2 - 5
    draw.norm(f"{name}o_norm", head_dim)
    draw.linear(f"{name}o_proj", hidden, width)


def _latent_attention(draw: Draw, name: str, config: dict[str, Any]) -> None:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    draw.linear(f"{name}q_proj", heads * (nope + rope), hidden)
    draw.linear(f"{name}kv_a_proj_with_mqa", rank + rope, hidden)
    draw.norm(f"{name}kv_a_layernorm", rank)
    draw.linear(f"{name}kv_b_proj", heads * (nope + value), rank)
    draw.linear(f"{name}o_proj", hidden, heads * value)


def write(folder: pathlib.Path) -> None:
    weights = weights_of(json.loads((folder / "config.json").read_text()))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
