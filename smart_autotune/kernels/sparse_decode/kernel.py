"""The two kernels: a split over the tokens of a row, and the combine of its parts.

Two orders of the same products, chosen by the config:

- tokens first: scores are tokens x heads and the output is dims x heads, so tokens and dims fill the wide side of
  the tensor-core instruction and the heads sit on the narrow one, where 8 and 16 need no padding; a block's tokens
  are read in its own turn, or (AHEAD) into registers while the dots of the block before run;
- heads first: scores are heads x tokens and the output is heads x dims, for 64 heads a block, where no side is
  narrow, the softmax stays inside a warp and the keys are the operand that Hopper reads from shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smart_autotune.kernels.sparse_decode.tokens import (
    G_DIMS,
    N_GROUPS,
    OUT_DIMS,
    _dim_at,
    _dims_in_order,
    _fragments,
    _listed,
    _load_token_words,
    _located,
    _no_words,
    _rows,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_queries(
    q_ptr,
    stride_q_head,
    o_head,
    m_head,
    HEADS_FIRST: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """512 / WIDTH tiles [BLOCK_H, WIDTH] or [WIDTH, BLOCK_H]; AHEAD: with the dims in the order of ``_dim_at``.

    Heads outside the mask are not read: no NaN comes in.
    """
    o_dim = tl.arange(0, WIDTH)
    queries = ()
    for g in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            p_q = q_ptr + o_head[:, None] * stride_q_head + (o_dim + g * WIDTH)[None, :]
            b_q = tl.load(p_q, mask=m_head[:, None], other=0.0)
        else:
            o_place = _dim_at(o_dim, g == N_GROUPS) if AHEAD else o_dim
            p_q = q_ptr + o_head[None, :] * stride_q_head + (o_place + g * WIDTH)[:, None]
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
def _attend(state, keys, scores, m_token, scale_log2, HEADS_FIRST: tl.constexpr, COMPUTE: tl.constexpr):
    """Carry the running softmax over one block of tokens.

    state: (peak [H] in units of log2, total, accumulators [dims, H] or [H, dims]). Tokens first, the total is [T, H],
    a sum for each place in a block: adding them up over the warps in every block would take two barriers more.
    """
    TOKENS: tl.constexpr = 1 if HEADS_FIRST else 0  # the tokens' axis of the scores
    HEADS: tl.constexpr = 1 - TOKENS
    scores = tl.where(tl.expand_dims(m_token, HEADS), scores * scale_log2, float("-inf"))
    peak = tl.maximum(state[0], tl.max(scores, axis=TOKENS))
    # A block without one valid token leaves the peak at -inf, and -inf - -inf is NaN.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    shrink = tl.exp2(state[0] - base)
    b_p = tl.exp2(scores - tl.expand_dims(base, TOKENS))
    if HEADS_FIRST:
        total = state[1] * shrink + tl.sum(b_p, axis=TOKENS)
    else:
        total = state[1] * shrink[None, :] + b_p
    carried = (peak, total)
    b_p = b_p.to(COMPUTE)
    shrink = tl.expand_dims(shrink, TOKENS)
    for g in tl.static_range(len(keys)):
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
    AHEAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    o_dim = tl.arange(0, WIDTH)
    for g in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            p_tile = p_out + o_head[:, None] * stride_head + (o_dim + g * WIDTH)[None, :]
            tl.store(p_tile, (tiles[2 + g] * inverse[:, None]).to(DTYPE), mask=m_head[:, None])
        else:
            p_tile = p_out + o_head[None, :] * stride_head + (o_dim + g * WIDTH)[:, None]
            tile = (tiles[2 + g] * inverse[None, :]).to(DTYPE)
            if AHEAD:
                tile = _dims_in_order(tile, g == N_GROUPS)
            tl.store(p_tile, tile, mask=m_head[None, :])


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
    AHEAD: tl.constexpr,
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
    HEADS_FIRST, AHEAD (tokens first only): see the module. WAVES: how many programs a multiprocessor get; the launcher
    reads it. The `_rounded` widths are only for the tuning key. once: 1, see below. EARLY: programmatic dependent
    launch (sm_90 and later): this grid may start before the one ahead of it has ended, and the combine before this one;
    each waits for the other's results itself.
    """
    if EARLY:
        gdc_wait()
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
    main = (indices_ptr + row * stride_indices_row, length, cache_ptr, page_bytes)
    extra = main
    if HAS_EXTRA:
        extra_length = _live_length(extra_length_ptr, row, extra_topk)
        all_blocks += tl.cdiv(extra_length, BLOCK_T)
        extra = (
            extra_indices_ptr + row * stride_extra_indices_row,
            extra_length,
            extra_cache_ptr,
            extra_page_bytes,
        )
    # Both lists, one after the other, are one range of blocks that the splits share evenly, the first ones a block
    # more: the programs that a multiprocessor gets lie a whole wave apart.
    share = all_blocks // num_splits
    more = all_blocks - share * num_splits
    first_block = split * share + tl.minimum(split, more)
    last_block = first_block + share + tl.where(split < more, 1, 0)
    if num_splits > 1:
        if first_block >= last_block:
            return  # the combine knows it by the lengths

    p_q = q_ptr + row * stride_q_row
    queries = _load_queries(p_q, stride_q_head, o_head, m_head, HEADS_FIRST, AHEAD, WIDTH, COMPUTE)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    scale_log2 = softmax_scale * LOG2E
    o_all = tl.arange(0, BLOCK_T)
    if HEADS_FIRST:
        state = (peak, tl.zeros([BLOCK_H], tl.float32)) + _zeros(HEADS_FIRST, BLOCK_H, WIDTH, tl.float32)
    else:
        state = (peak, tl.zeros([BLOCK_T, BLOCK_H], tl.float32)) + _zeros(HEADS_FIRST, BLOCK_H, WIDTH, tl.float32)
    if AHEAD:
        tl.static_assert(not HEADS_FIRST)
        # At once: the dots of one block, the words of the next one on their way into the registers that this one's
        # leave, the indices of the one after it. Two turns come ahead of the first block, with loads alone: as code
        # ahead of the loop those loads cost two seconds a config in Triton's coalescing pass (3.6.0). The halves of a
        # block: see _fragments.
        o_row = tl.arange(0, BLOCK_T // 2)
        o_one = o_row // 8 * 16 + o_row % 8
        one = tl.full([BLOCK_T // 2], -1, tl.int32)
        other = one
        index = tl.full([BLOCK_T], -1, tl.int32)
        words, scales = _no_words(BLOCK_T // 2)
        other_words, other_scales = words, scales
        for block in range(first_block - 2, last_block):
            in_extra = block + 1 >= blocks
            p_one, p_one_scales, m_one = _located(one, in_extra, main, extra, HAS_EXTRA, PAGE_SIZE, EXTRA_PAGE_SIZE)
            p_other, p_other_scales, m_other = _located(
                other, in_extra, main, extra, HAS_EXTRA, PAGE_SIZE, EXTRA_PAGE_SIZE
            )
            one = _listed(block + 2, blocks, main, extra, o_one, last_block, HAS_EXTRA, BLOCK_T)
            other = _listed(block + 2, blocks, main, extra, o_one + 8, last_block, HAS_EXTRA, BLOCK_T)
            next_block = tl.maximum(block + 1, 0)  # nothing lies ahead of a list
            next_index = _listed(next_block, blocks, main, extra, o_all, last_block, HAS_EXTRA, BLOCK_T)
            if block >= first_block:
                keys = (_fragments(words, scales, other_words, other_scales, 0, COMPUTE),)
                scores = tl.dot(keys[0], queries[0])  # [T, H]
                for g in tl.static_range(1, OUT_DIMS // WIDTH):
                    keys = keys + (_fragments(words, scales, other_words, other_scales, g, COMPUTE),)
                    scores = tl.dot(keys[g], queries[g], scores)
                words, scales = _load_token_words(p_one, p_one_scales, m_one)
                other_words, other_scales = _load_token_words(p_other, p_other_scales, m_other)
                state = _attend(state, keys, scores, index >= 0, scale_log2, HEADS_FIRST, COMPUTE)
            else:  # not once behind the branch: then old and new words are both alive, and moved every block
                words, scales = _load_token_words(p_one, p_one_scales, m_one)
                other_words, other_scales = _load_token_words(p_other, p_other_scales, m_other)
            index = next_index
    else:
        # Heads first, a loop of one turn. Triton (3.6.0) reads the first operand of a Hopper dot from shared memory
        # only if it comes from a load or is carried by a loop; converted queries are neither, and 64 heads of them
        # would fill the registers.
        for _ in range(0, once if HEADS_FIRST else 1):
            for block in range(first_block, last_block):
                index = _listed(block, blocks, main, extra, o_all, last_block, HAS_EXTRA, BLOCK_T)
                p_token, p_scales, m_token = _located(
                    index, block >= blocks, main, extra, HAS_EXTRA, PAGE_SIZE, EXTRA_PAGE_SIZE
                )
                words, scales = _load_token_words(p_token, p_scales, m_token)
                keys = _rows(words, scales, WIDTH, COMPUTE)
                if HEADS_FIRST:
                    scores = tl.dot(queries[0], tl.trans(keys[0]))  # [H, T]
                else:
                    scores = tl.dot(keys[0], queries[0])  # [T, H]
                for g in tl.static_range(1, OUT_DIMS // WIDTH):
                    if HEADS_FIRST:
                        scores = tl.dot(queries[g], tl.trans(keys[g]), scores)
                    else:
                        scores = tl.dot(keys[g], queries[g], scores)
                state = _attend(state, keys, scores, m_token, scale_log2, HEADS_FIRST, COMPUTE)
            if HEADS_FIRST:
                queries = _zeros(HEADS_FIRST, BLOCK_H, WIDTH, COMPUTE)
    total = state[1]
    if not HEADS_FIRST:
        total = tl.sum(total, axis=0)

    if EARLY:  # only now: programs of the combine that wait beside the gathers slow them down
        gdc_launch_dependents()
    lse = tl.where(total > 0, (state[0] + tl.log2(total)) * LN2, float("-inf"))
    if num_splits > 1:
        tl.store(part_lse_ptr + part + o_head, lse, mask=m_head)
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        p_part = part_ptr + part * OUT_DIMS
        _store_tiles(p_part, state, inverse, OUT_DIMS, o_head, m_head, tl.float32, HEADS_FIRST, AHEAD, WIDTH)
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
        _store_tiles(p_out, state, inverse, stride_out_head, o_head, m_head, dtype, HEADS_FIRST, AHEAD, WIDTH)


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
    m_split = o_split < tl.minimum(num_splits, all_blocks)
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
