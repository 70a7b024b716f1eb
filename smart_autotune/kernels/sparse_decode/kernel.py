"""The two kernels: a split over the tokens of a row, and the combine of its parts.

Two orders of the same products, chosen by the config:

- tokens first: scores are tokens x heads and the output is dims x heads, so tokens and dims fill the wide side of
  the tensor-core instruction and the heads sit on the narrow one, where 8 and 16 need no padding;
- heads first: scores are heads x tokens and the output is heads x dims, for 64 heads a block, where no side is
  narrow, the softmax stays inside a warp and the keys are the operand that Hopper reads from shared memory.

A tile is dequantised to fp16 before the dots: one conversion instruction gives two values where bf16 takes five, and
fp16 keeps three bits more. e4m3 times a power of two is exact in it for scale bytes 112 to 134 (2^-15 to 2^7); below,
values round to multiples of 2^-24, and from 65,504 on they overflow. The latents that this cache holds are
RMS-normalised and stay far inside. Scale byte 255 (NaN in the format) gives values that are not finite.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smart_autotune.kernels.sparse_decode.layout import (
    GROUP_DIMS,
    HEAD_DIM,
    NOPE_DIMS,
    SCALE_GROUPS,
    TOKEN_DATA_BYTES,
    TOKEN_SCALE_BYTES,
)

G_DIMS = tl.constexpr(GROUP_DIMS)
N_GROUPS = tl.constexpr(SCALE_GROUPS)
ROPE_OFFSET = tl.constexpr(NOPE_DIMS)
DATA_BYTES = tl.constexpr(TOKEN_DATA_BYTES)
SCALE_BYTES = tl.constexpr(TOKEN_SCALE_BYTES)
OUT_DIMS = tl.constexpr(HEAD_DIM)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_queries(
    q_ptr, stride_q_head, o_head, m_head, HEADS_FIRST: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """512 / WIDTH tiles [WIDTH dims, BLOCK_H], or transposed. Heads outside the mask are not read: no NaN comes in."""
    o_dim = tl.arange(0, WIDTH)
    queries = ()
    for g in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            p_q = q_ptr + o_head[:, None] * stride_q_head + (o_dim + g * WIDTH)[None, :]
            b_q = tl.load(p_q, mask=m_head[:, None], other=0.0)
        else:
            p_q = q_ptr + o_head[None, :] * stride_q_head + (o_dim + g * WIDTH)[:, None]
            b_q = tl.load(p_q, mask=m_head[None, :], other=0.0)
        queries = queries + (b_q.to(COMPUTE),)
    return queries


@triton.jit
def _zeros(HEADS_FIRST: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """512 / WIDTH tiles in the shape of the output."""
    tiles = ()
    for _ in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            tiles = tiles + (tl.zeros([BLOCK_H, WIDTH], DTYPE),)
        else:
            tiles = tiles + (tl.zeros([WIDTH, BLOCK_H], DTYPE),)
    return tiles


@triton.jit
def _group_scale(word, g: tl.constexpr):
    """Scale g of each token: the byte is the exponent field of an fp32."""
    return (((word >> (8 * g)) & 0xFF).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _same(value):
    return value


@triton.jit
def _keep_in_shared_memory(b_k):
    """The tile itself, behind an op that layout changes are not moved across.

    Without it Triton (3.6.0) moves the dequantisation behind the layout change of each dot: it runs twice, both
    results stay in registers, and the tile's load is not pipelined. The interpreter does not have the op.
    """
    if b_k.dtype.is_fp32():
        return b_k
    else:
        return tl.map_elementwise(_same, b_k)


@triton.jit
def _side_by_side(a, b):
    """[T, D] and [T, D] to [T, 2 D]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


def _converts_e4m3(_semantic=None):
    """Whether the GPU that is compiled for has instructions for e4m3 (sm_89 and later). The interpreter has its own."""
    return tl.constexpr(_semantic is None or "fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


_converts_e4m3.__triton_builtin__ = True  # called while the kernel compiles, with what it compiles for


@triton.jit
def _e4m3_value(byte):
    """The value of an e4m3 byte (fp16, exact), by its bits: put where fp16 has them they are the value times 2^-8.

    Subnormals too. The two bytes for NaN give 480 and -480.
    """
    wide = byte.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _load_keys(p_token, scales, m_token, HEADS_FIRST: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """512 / WIDTH tiles [BLOCK_T, WIDTH] of dequantised values.

    Masked, not clamped to some token: 0 * NaN of a slot nobody wrote would reach the output.
    """
    o_dim = tl.arange(0, G_DIMS)
    p_nope = p_token[:, None] + o_dim[None, :]
    loaded = ()
    for g in tl.static_range(N_GROUPS):
        loaded = loaded + (tl.load(p_nope + g * G_DIMS, mask=m_token[:, None], other=0),)
    p_rope = (p_token + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16))
    b_rope = tl.load(p_rope[:, None] + o_dim[None, :], mask=m_token[:, None], other=0.0).to(tl.float32).to(COMPUTE)
    keys = ()
    for g in tl.static_range(N_GROUPS):
        if _converts_e4m3():
            b_k = loaded[g].to(tl.float8e4nv, bitcast=True).to(COMPUTE)
        else:
            b_k = _e4m3_value(loaded[g]).to(COMPUTE)
        b_k = b_k * _group_scale(scales, g).to(COMPUTE)[:, None]
        if not HEADS_FIRST:
            b_k = _keep_in_shared_memory(b_k)
        keys = keys + (b_k,)
    if not HEADS_FIRST:
        b_rope = _keep_in_shared_memory(b_rope)
    keys = keys + (b_rope,)
    if WIDTH == 2 * G_DIMS:
        pairs = ()
        for g in tl.static_range(OUT_DIMS // WIDTH):
            pairs = pairs + (_side_by_side(keys[2 * g], keys[2 * g + 1]),)
        return pairs
    else:
        tl.static_assert(WIDTH == G_DIMS)
        return keys


@triton.jit
def _attend(queries, state, keys, m_token, scale_log2, HEADS_FIRST: tl.constexpr, COMPUTE: tl.constexpr):
    """Carry the running softmax over one block of tokens.

    state: (peak [H] in units of log2, total [H], accumulators [dims, H] or [H, dims]).
    """
    TILES: tl.constexpr = len(keys)
    TOKENS: tl.constexpr = 1 if HEADS_FIRST else 0  # the tokens' axis of the scores
    HEADS: tl.constexpr = 1 - TOKENS
    if HEADS_FIRST:
        scores = tl.dot(queries[0], tl.trans(keys[0]))  # [H, T]
        for g in tl.static_range(1, TILES):
            scores = tl.dot(queries[g], tl.trans(keys[g]), scores)
    else:
        scores = tl.dot(keys[0], queries[0])  # [T, H]
        for g in tl.static_range(1, TILES):
            scores = tl.dot(keys[g], queries[g], scores)
    scores = tl.where(tl.expand_dims(m_token, HEADS), scores * scale_log2, float("-inf"))

    peak = tl.maximum(state[0], tl.max(scores, axis=TOKENS))
    # A block without one valid token leaves the peak at -inf, and -inf - -inf is NaN.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    shrink = tl.exp2(state[0] - base)
    b_p = tl.exp2(scores - tl.expand_dims(base, TOKENS))
    carried = (peak, state[1] * shrink + tl.sum(b_p, axis=TOKENS))
    b_p = b_p.to(COMPUTE)
    shrink = tl.expand_dims(shrink, TOKENS)
    for g in tl.static_range(TILES):
        if HEADS_FIRST:
            carried = carried + (tl.dot(b_p, keys[g], state[2 + g] * shrink),)
        else:
            carried = carried + (tl.dot(tl.trans(keys[g]), b_p, state[2 + g] * shrink),)
    return carried


@triton.jit
def _live_length(length_ptr, row, width):
    if length_ptr is None:
        return width
    else:
        return tl.maximum(tl.minimum(tl.load(length_ptr + row), width), 0)


@triton.jit
def _store_tiles(
    p_out,
    tiles,
    inverse,
    stride_head,
    o_head,
    m_head,
    DTYPE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    o_dim = tl.arange(0, WIDTH)
    for g in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            p_tile = p_out + o_head[:, None] * stride_head + (o_dim + g * WIDTH)[None, :]
            tl.store(p_tile, (tiles[2 + g] * inverse[:, None]).to(DTYPE), mask=m_head[:, None])
        else:
            p_tile = p_out + o_head[None, :] * stride_head + (o_dim + g * WIDTH)[:, None]
            tl.store(p_tile, (tiles[2 + g] * inverse[None, :]).to(DTYPE), mask=m_head[None, :])


# One binary serves one split and many: their number is not a constant of it.
@triton.jit(do_not_specialize=["num_splits", "once"])
def _split_kernel(
    q_ptr,
    cache_ptr,
    indices_ptr,
    length_ptr,
    extra_cache_ptr,
    extra_indices_ptr,
    extra_length_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    topk,
    extra_topk,
    num_heads,
    num_splits,
    once,
    page_bytes,
    extra_page_bytes,
    stride_q_row,
    stride_q_head,
    stride_indices_row,
    stride_extra_indices_row,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    softmax_scale,
    topk_rounded,
    extra_topk_rounded,
    PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    WAVES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: a row, BLOCK_H heads, one split of the row's tokens. Grid (rows, head tiles, splits).

    q [T, H, 512] bf16 · cache uint8 pages · indices [T, topk] int32, -1 is no token · length [T] int32 or
    None: positions from there on do not count · the same three again for the extra list, or None · sink
    [H] fp32 or None · out [T, H, 512] bf16 or fp32 and lse [T, H] fp32 or None, strides given ·
    part [T, splits, num_heads, 512] and part_lse [T, splits, num_heads], fp32, contiguous.

    With one split, out is the result, divided by the denominator with the sink, and lse (natural) is without it.
    With more, part is each split's own softmax (no sink); a split without blocks leaves its own unwritten. COMPUTE:
    the dtype of the dots' operands. BLOCK_T cuts tokens, BLOCK_H heads.
    HEADS_FIRST: see the module. WAVES: how many programs a multiprocessor get; the launcher reads it. The
    `_rounded` widths are only for the tuning key. once: 1, see below. EARLY: the combine may start before this grid
    has ended (programmatic dependent launch, sm_90 and later); it waits for the results itself.
    """
    HAS_EXTRA: tl.constexpr = extra_cache_ptr is not None
    WIDTH: tl.constexpr = 2 * G_DIMS if HEADS_FIRST else G_DIMS
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    o_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < num_heads
    part = (row * num_splits + split) * num_heads

    length = _live_length(length_ptr, row, topk)
    blocks = tl.cdiv(length, BLOCK_T)
    all_blocks = blocks
    p_indices = indices_ptr + row * stride_indices_row
    if HAS_EXTRA:
        extra_length = _live_length(extra_length_ptr, row, extra_topk)
        all_blocks += tl.cdiv(extra_length, BLOCK_T)
        p_extra_indices = extra_indices_ptr + row * stride_extra_indices_row
    # Both lists, one after the other, are one range of blocks that the splits share evenly.
    share = tl.cdiv(all_blocks, num_splits)
    first_block = split * share
    last_block = tl.minimum(first_block + share, all_blocks)
    if num_splits > 1:
        if first_block >= all_blocks:
            return  # the combine knows it by the lengths

    queries = _load_queries(q_ptr + row * stride_q_row, stride_q_head, o_head, m_head, HEADS_FIRST, WIDTH, COMPUTE)
    state = (tl.full([BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_H], tl.float32))
    state = state + _zeros(HEADS_FIRST, BLOCK_H, WIDTH, tl.float32)

    scale_log2 = softmax_scale * LOG2E
    # A loop of one turn. Triton (3.6.0) reads the first operand of a Hopper dot from shared memory only if it comes
    # from a load or is carried by a loop; converted queries are neither, and 64 heads of them would fill the registers.
    for _ in range(0, once if HEADS_FIRST else 1):
        for block in range(first_block, last_block):
            o_pos = block * BLOCK_T + tl.arange(0, BLOCK_T)
            if HAS_EXTRA:
                in_extra = block >= blocks
                o_pos -= tl.where(in_extra, blocks, 0) * BLOCK_T
                p_list = tl.where(in_extra, p_extra_indices, p_indices)
                index = tl.load(p_list + o_pos, mask=o_pos < tl.where(in_extra, extra_length, length), other=-1)
            else:
                index = tl.load(p_indices + o_pos, mask=o_pos < length, other=-1)
            m_token = index >= 0
            index = tl.where(m_token, index, 0)
            page = index // PAGE_SIZE
            slot = index % PAGE_SIZE
            if HAS_EXTRA:
                page = tl.where(in_extra, index // EXTRA_PAGE_SIZE, page).to(tl.int64)
                slot = tl.where(in_extra, index % EXTRA_PAGE_SIZE, slot)
                p_page = tl.where(in_extra, extra_cache_ptr, cache_ptr)
                p_page += page * tl.where(in_extra, extra_page_bytes, page_bytes)
                footer = tl.where(in_extra, EXTRA_PAGE_SIZE * DATA_BYTES, PAGE_SIZE * DATA_BYTES)
            else:
                p_page = cache_ptr + page.to(tl.int64) * page_bytes
                footer = PAGE_SIZE * DATA_BYTES
            p_scales = (p_page + footer + slot * SCALE_BYTES).to(tl.pointer_type(tl.int64))
            scales = tl.load(p_scales, mask=m_token, other=0)
            keys = _load_keys(p_page + slot * DATA_BYTES, scales, m_token, HEADS_FIRST, WIDTH, COMPUTE)
            state = _attend(queries, state, keys, m_token, scale_log2, HEADS_FIRST, COMPUTE)
        if HEADS_FIRST:
            queries = _zeros(HEADS_FIRST, BLOCK_H, WIDTH, COMPUTE)

    if EARLY:  # only now: programs of the combine that wait beside the gathers slow them down
        gdc_launch_dependents()
    total = state[1]
    lse = tl.where(total > 0, (state[0] + tl.log2(total)) * LN2, float("-inf"))
    if num_splits > 1:
        tl.store(part_lse_ptr + part + o_head, lse, mask=m_head)
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        p_part = part_ptr + part * OUT_DIMS
        _store_tiles(p_part, state, inverse, OUT_DIMS, o_head, m_head, tl.float32, HEADS_FIRST, WIDTH)
    else:
        if lse_ptr is not None:
            tl.store(lse_ptr + row * stride_lse_row + o_head, lse, mask=m_head)
        shrink = tl.full([BLOCK_H], 1.0, tl.float32)
        if sink_ptr is not None:
            # The sink may lie far above the peak: shift both to the larger one.
            sink = tl.load(sink_ptr + o_head, mask=m_head, other=float("-inf")) * LOG2E
            ceiling = tl.maximum(state[0], sink)
            ceiling = tl.where(ceiling == float("-inf"), 0.0, ceiling)
            shrink = tl.exp2(state[0] - ceiling)
            total = total * shrink + tl.exp2(sink - ceiling)
        inverse = tl.where(total > 0, shrink / total, 0.0)
        p_out = out_ptr + row * stride_out_row
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        _store_tiles(p_out, state, inverse, stride_out_head, o_head, m_head, dtype, HEADS_FIRST, WIDTH)


@triton.jit
def _combine_kernel(
    parts_ptr,
    part_lse_ptr,
    length_ptr,
    extra_length_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    topk,
    extra_topk,
    num_splits,
    num_heads,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: one row, one head, BLOCK_D dims of it. Grid (rows, heads, 512 / BLOCK_D).

    parts [T, splits, H, 512] and part_lse [T, splits, H] fp32, contiguous, as the split kernel leaves them · sink [H]
    fp32 or None · out [T, H, 512] · lse [T, H] fp32 or None. BLOCK_S covers all splits. EARLY: started before the split
    kernel has ended. What does not come from it (lengths, which tell the splits that have a part, and the sink) is read
    before the wait for it, and the parts need not wait for part_lse. BLOCK_T: the split kernel's.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    o_split = tl.arange(0, BLOCK_S)
    o_dim = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)

    o_part = (row * num_splits + o_split) * num_heads + head
    all_blocks = tl.cdiv(_live_length(length_ptr, row, topk), BLOCK_T)
    all_blocks += tl.cdiv(_live_length(extra_length_ptr, row, extra_topk), BLOCK_T)
    m_split = (o_split < num_splits) & (o_split * tl.cdiv(all_blocks, num_splits) < all_blocks)
    sink = float("-inf")
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head)
    if EARLY:
        gdc_wait()
    part_lse = tl.load(part_lse_ptr + o_part, mask=m_split, other=float("-inf"))  # [S]
    p_part = parts_ptr + o_part[:, None] * OUT_DIMS + o_dim[None, :]
    parts = tl.load(p_part, mask=m_split[:, None], other=0.0)  # [S, BLOCK_D]
    peak = tl.max(part_lse, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(part_lse - base), axis=0)
    lse = tl.where(total > 0, base + tl.log(total), float("-inf"))

    ceiling = base
    if sink_ptr is not None:
        ceiling = tl.maximum(peak, sink)
        ceiling = tl.where(ceiling == float("-inf"), 0.0, ceiling)
        total = total * tl.exp(peak - ceiling) + tl.exp(sink - ceiling)
    weight = tl.exp(part_lse - ceiling) * tl.where(total > 0, 1.0 / total, 0.0)

    out = tl.sum(parts * weight[:, None], axis=0)
    p_out = out_ptr + row * stride_out_row + head * stride_out_head + o_dim
    tl.store(p_out, out.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + row * stride_lse_row + head, lse)
