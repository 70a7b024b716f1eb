"""Small smart-autotuned kernels to audit: each shows one way in which a config can fare."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from smart_autotune import smart_autotune


def tile(m: int, n: int, k: int, warps: int = 4, stages: int = 2, **options: object) -> triton.Config:
    return triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages, **options)


FITS = tile(64, 64, 32)
OVER_ON_SM120 = tile(128, 256, 64, warps=8, stages=5)
TOO_FEW_REGISTERS = tile(64, 64, 32, maxnreg=8)
NOT_A_POWER_OF_TWO = tile(64, 64, 7)
UNWANTED = tile(16, 16, 16)


def square(size: int = 1024, dtype: torch.dtype = torch.float16) -> dict[str, object]:
    a = torch.empty(size, size, dtype=dtype, device="meta")
    return {"a_ptr": a, "b_ptr": a, "c_ptr": a, "M": size, "N": size, "K": size}


def examples() -> dict[str, dict[str, object]]:
    return {"square": square()}


def without_unwanted(configs, named_args, **kwargs):
    assert named_args["M"] == kwargs["M"]  # by position or by keyword: a prune may read either
    return [config for config in configs if config.kwargs != UNWANTED.kwargs]


@triton.jit
def plain(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """c = a @ b; row-major, sizes divisible by the blocks."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    b_c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        b_a = tl.load(a_ptr + o_m[:, None] * K + (k + o_k)[None, :])
        b_b = tl.load(b_ptr + (k + o_k)[:, None] * N + o_n[None, :])
        b_c = tl.dot(b_a, b_b, b_c)
    tl.store(c_ptr + o_m[:, None] * N + o_n[None, :], b_c.to(c_ptr.dtype.element_ty))


@triton.jit
def described(a_desc, c_ptr, M, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """One tile of a host-side descriptor, copied."""
    b_a = a_desc.load([0, 0])
    o_m, o_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    tl.store(c_ptr + o_m[:, None] * BLOCK_K + o_k[None, :], b_a)


def autotuned(*configs: triton.Config, **options: object):
    options = {"key": ["M"], "examples": examples, **options}
    return smart_autotune(configs=configs, **options)(plain)


matmul = autotuned(
    FITS,
    OVER_ON_SM120,
    TOO_FEW_REGISTERS,
    NOT_A_POWER_OF_TWO,
    UNWANTED,
    prune_configs_by={"early_config_prune": without_unwanted},
)


def set_block_shape(named: dict[str, object]) -> None:
    named["a_desc"].block_shape = [named["BLOCK_M"], named["BLOCK_K"]]


def descriptor_example() -> list[dict[str, object]]:
    a = torch.empty(1024, 1024, dtype=torch.float16, device="meta")
    return [{"a_desc": TensorDescriptor.from_tensor(a, [1, 1]), "c_ptr": a, "M": 1024}]


with_descriptor = smart_autotune(
    configs=[triton.Config({"BLOCK_M": m, "BLOCK_K": 64}, pre_hook=set_block_shape) for m in (64, 128)],
    key=["M"],
    examples=descriptor_example,
)(described)
