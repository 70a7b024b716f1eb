"""How one config is launched: how many splits, the scratch, the split kernel and the combine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from smart_autotune.kernels.sparse_decode.kernel import _combine_kernel, _split_kernel
from smart_autotune.kernels.sparse_decode.layout import HEAD_DIM

INTERPRETED = isinstance(_split_kernel, InterpretedFunction)
MAX_SPLITS = 64


def choose_splits(rows: int, num_heads: int, topk: int, extra_topk: int, sm_count: int, config: triton.Config) -> int:
    """Into how many parts each row's tokens are cut: at most WAVES programs a multiprocessor, a block or more a part.

    A function of shapes alone, so that a captured graph stays valid whatever the live lengths are.
    """
    block_t: int = config.kwargs["BLOCK_T"]
    block_h: int = config.kwargs["BLOCK_H"]
    blocks = -(-topk // block_t) + -(-extra_topk // block_t)
    programs = max(rows * -(-num_heads // block_h), 1)
    waves: int = config.kwargs["WAVES"]
    wanted = waves * sm_count // programs
    return max(1, min(wanted, blocks, MAX_SPLITS))


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch came with compute capability 9.0."""
    if INTERPRETED or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What both kernels are launched with beside their arguments. Another binary, which tuning has to compile too."""
    return {"launch_pdl": True} if arguments["EARLY"] else {}


@functools.cache
def no_parts(device: torch.device) -> torch.Tensor:
    """What stands for the scratch where there is none. It is never read or written."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float32, device=device)


def launch_with(
    arguments: Mapping[str, Any], config: triton.Config, *, splits: int | None = None, through: Any = None
) -> None:
    """Both launches for one config: the scratch, the split kernel (by its tuner, if given) and the combine."""
    q, heads = arguments["q_ptr"], arguments["num_heads"]
    rows = q.shape[0]
    if splits is None:
        sm_count = 1 if INTERPRETED else _sm_count(q.device)
        splits = choose_splits(rows, heads, arguments["topk"], arguments["extra_topk"], sm_count, config)
    arguments = {**arguments, "num_splits": splits}
    if splits > 1:
        part = torch.empty((rows, splits, heads, HEAD_DIM), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((rows, splits, heads), dtype=torch.float32, device=q.device)
        arguments |= {"part_ptr": part, "part_lse_ptr": part_lse}
    options = launch_options(arguments)
    if through is not None:
        through[lambda meta: (rows, triton.cdiv(heads, meta["BLOCK_H"]), splits)](**arguments, **options)
    else:
        grid = (rows, triton.cdiv(heads, config.kwargs["BLOCK_H"]), splits)
        _split_kernel[grid](**arguments, **options, **config.all_kwargs())
    if splits > 1:
        _combine(arguments, config.kwargs["BLOCK_T"])


def _combine(arguments: Mapping[str, Any], block_t: int) -> None:
    part_lse, out, lse, early = (arguments[name] for name in ("part_lse_ptr", "out_ptr", "lse_ptr", "EARLY"))
    rows, splits, heads = part_lse.shape
    block_s = triton.next_power_of_2(splits)
    block_d = max(64, min(HEAD_DIM, 4096 // block_s))
    _combine_kernel[(rows, heads, HEAD_DIM // block_d)](
        arguments["part_ptr"],
        part_lse,
        arguments["length_ptr"],
        arguments["extra_length_ptr"],
        arguments["sink_ptr"],
        out,
        lse,
        arguments["topk"],
        arguments["extra_topk"],
        splits,
        heads,
        out.stride(0),
        out.stride(2),
        0 if lse is None else lse.stride(0),
        BLOCK_T=block_t,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        EARLY=early,
        **launch_options(arguments),
    )


def timed(named_args: Mapping[str, Any], config: triton.Config) -> Callable[[], None]:
    """What a config costs: its split and its combine."""
    chosen = config.all_kwargs()
    arguments = {
        name: named_args[name] for name in _split_kernel.arg_names if name in named_args and name not in chosen
    }
    return functools.partial(launch_with, arguments, config)
