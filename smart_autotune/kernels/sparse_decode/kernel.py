"""The two kernels: a split over the tokens of a row, and the combine of its parts.

Two orders of the same products, chosen by the config:

- tokens first: scores are tokens x heads and the output is dims x heads, so tokens and dims fill the wide side of
  the tensor-core instruction and the heads sit on the narrow one, where 8 and 16 need no padding; the next block of
  tokens is read into registers while the dots of one run;
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
    SCALE_GROUPS,
    TOKEN_DATA_BYTES,
    TOKEN_SCALE_BYTES,
)

G_DIMS = tl.constexpr(GROUP_DIMS)
N_GROUPS = tl.constexpr(SCALE_GROUPS)
DATA_BYTES = tl.constexpr(TOKEN_DATA_BYTES)
SCALE_BYTES = tl.constexpr(TOKEN_SCALE_BYTES)
OUT_DIMS = tl.constexpr(HEAD_DIM)
TILE_WORDS = tl.constexpr(GROUP_DIMS // 4)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dim_at(place, ROPE: tl.constexpr):
    """Which of its 64 dims a tile of keys has at a place, tokens first; see ``_fragments``."""
    thread = (place >> 1) & 3
    step = place >> 4
    half = (place >> 3) & 1
    if ROPE:
        return thread * 16 + half * 8 + step * 2 + (place & 1)
    else:
        return thread * 16 + step * 4 + half * 2 + (place & 1)


@triton.jit
def _dims_in_order(tile, ROPE: tl.constexpr):
    """[64, H] in the order of ``_dim_at`` back to that of the dims."""
    heads: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, (4, 2, 4, 2, heads))  # step, half, thread, pair
    tile = tl.permute(tile, (2, 1, 0, 3, 4) if ROPE else (2, 0, 1, 3, 4))
    return tl.reshape(tile, (G_DIMS, heads))


@triton.jit
def _load_queries(
    q_ptr, stride_q_head, o_head, m_head, HEADS_FIRST: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """512 / WIDTH tiles [BLOCK_H, WIDTH], or [WIDTH, BLOCK_H] with the dims in the order of ``_dim_at``.

    Heads outside the mask are not read: no NaN comes in.
    """
    o_dim = tl.arange(0, WIDTH)
    queries = ()
    for g in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            p_q = q_ptr + o_head[:, None] * stride_q_head + (o_dim + g * WIDTH)[None, :]
            b_q = tl.load(p_q, mask=m_head[:, None], other=0.0)
        else:
            o_place = _dim_at(o_dim, g == N_GROUPS) + g * WIDTH
            b_q = tl.load(q_ptr + o_head[None, :] * stride_q_head + o_place[:, None], mask=m_head[None, :], other=0.0)
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
    """Whether what is compiled for has an instruction for e4m3 to fp16: sm_89 and later, and the interpreter."""
    if _semantic is None:
        return tl.constexpr(True)
    options = _semantic.builder.options
    return tl.constexpr(options.backend_name == "cuda" and "fp8e4nv" in options.supported_fp8_dtypes)


_converts_e4m3.__triton_builtin__ = True  # called while the kernel compiles, with what it compiles for


@triton.jit
def _e4m3_value(byte):
    """The value of an e4m3 byte (fp16, exact), by its bits: put where fp16 has them they are the value times 2^-8.

    Subnormals too. The two bytes for NaN give 480 and -480.
    """
    wide = byte.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _e4m3_values(word, scale, COMPUTE: tl.constexpr):
    """[R, D] words of four e4m3 bytes to the four values of each, times scale [R]."""
    if _converts_e4m3() and not COMPUTE.is_fp32():
        # From bytes Triton has the same instruction, but puts the bytes together for it one by one.
        twice = scale.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mul.rn.f16x2 first, first, $5;
            mul.rn.f16x2 second, second, $5;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }""",
            "=h,=h,=h,=h,r,r",
            [word, twice[:, None]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return a.to(COMPUTE), b.to(COMPUTE), c.to(COMPUTE), d.to(COMPUTE)
    else:
        values = ()
        for place in tl.static_range(4):
            byte = ((word >> (8 * place)) & 0xFF).to(tl.uint8)
            if _converts_e4m3():
                value = byte.to(tl.float8e4nv, bitcast=True).to(COMPUTE)
            else:
                value = _e4m3_value(byte).to(COMPUTE)
            values = values + (value * scale.to(COMPUTE)[:, None],)
        return values


@triton.jit
def _bf16_values(word, COMPUTE: tl.constexpr):
    """Words of two bf16 to the two values of each."""
    first = (word << 16).to(tl.float32, bitcast=True)
    second = ((word >> 16) << 16).to(tl.float32, bitcast=True)
    return first.to(COMPUTE), second.to(COMPUTE)


@triton.jit
def _load_token_words(p_token, p_scales, m_token):
    """The 584 bytes of each of R tokens as they lie: nine tiles [R, 16] of 32-bit words, and the scale bytes [R].

    Words: what is carried from one block to the next stays as large as it is; a byte takes a register of its own.
    Masked, not clamped to some token: 0 * NaN of a slot nobody wrote would reach the output.
    """
    scales = tl.load(p_scales, mask=m_token, other=0)
    o_word = tl.arange(0, TILE_WORDS)
    p_words = p_token.to(tl.pointer_type(tl.int32))[:, None]
    words = ()
    for g in tl.static_range(N_GROUPS):
        words = words + (tl.load(p_words + (o_word + g * TILE_WORDS)[None, :], mask=m_token[:, None], other=0),)
    # Four words to one tile, four to the other: then a thread gets the same 16 dims of the rope as of a group.
    o_turn = o_word // 4 * 8 + o_word % 4 + N_GROUPS * TILE_WORDS
    for i in tl.static_range(2):
        words = words + (tl.load(p_words + (o_turn + 4 * i)[None, :], mask=m_token[:, None], other=0),)
    return words, scales


@triton.jit
def _no_words(R: tl.constexpr):
    """What ``_load_token_words`` gives where there is no token."""
    words = ()
    for _ in tl.static_range(N_GROUPS + 2):
        words = words + (tl.zeros([R, TILE_WORDS], tl.int32),)
    return words, tl.zeros([R], tl.int64)


@triton.jit
def _values(words, scales, g: tl.constexpr, COMPUTE: tl.constexpr):
    """Four tensors [R, 16]: the dequantised values of tile g. Eight are the tiles, the last the rope."""
    if g == N_GROUPS:
        a, b = _bf16_values(words[g], COMPUTE)
        c, d = _bf16_values(words[g + 1], COMPUTE)
        return a, b, c, d
    else:
        return _e4m3_values(words[g], _group_scale(scales, g), COMPUTE)


@triton.jit
def _rows(words, scales, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """Heads first: 512 / WIDTH tiles [BLOCK_T, WIDTH] of values."""
    keys = ()
    for g in tl.static_range(N_GROUPS + 1):
        a, b, c, d = _values(words, scales, g, COMPUTE)
        if g == N_GROUPS:
            low = tl.reshape(tl.join(a, b), (a.shape[0], 4, 8))
            high = tl.reshape(tl.join(c, d), (a.shape[0], 4, 8))
            b_k = tl.permute(tl.join(low, high), (0, 1, 3, 2))
        else:
            b_k = tl.join(tl.join(a, c), tl.join(b, d))
        keys = keys + (tl.reshape(b_k, (a.shape[0], G_DIMS)),)
    tl.static_assert(WIDTH == 2 * G_DIMS)
    pairs = ()
    for g in tl.static_range(OUT_DIMS // WIDTH):
        pairs = pairs + (_side_by_side(keys[2 * g], keys[2 * g + 1]),)
    return pairs


@triton.jit
def _fragments(words, scales, other_words, other_scales, g: tl.constexpr, COMPUTE: tl.constexpr):
    """Tokens first: tile g [BLOCK_T, 64] of the values of both halves of a block.

    A thread has 16 neighbouring dims of a token; the first dot's instruction wants from it two dims, two dims eight
    places on and the same of the token eight rows on. To a dot it is all one in which order dims and tokens come, so
    they come as the threads have them (with num_warps * 16 tokens in a block): four threads in turn give two dims each
    for eight places, and a warp's 16 tokens are eight of one half and eight of the other. So the first dot takes the
    keys from the registers they were converted in, and the same registers, four together, go to shared memory for the
    second. Queries are read in that order (``_dim_at``), the output is put back (``_dims_in_order``), and block
    position p is row p.
    """
    a, b, c, d = _values(words, scales, g, COMPUTE)
    e, f, h, i = _values(other_words, other_scales, g, COMPUTE)
    first = tl.join(tl.join(a, c), tl.join(e, h))
    second = tl.join(tl.join(b, d), tl.join(f, i))
    tile = tl.join(first, second)  # [R, 16, half, which half of the block, pair]
    tile = tl.reshape(tile, (a.shape[0] // 8, 8, 4, 4, 2, 2, 2))  # warp, row, thread, step, half, which, pair
    tile = tl.permute(tile, (0, 5, 1, 3, 4, 2, 6))
    return _keep_in_shared_memory(tl.reshape(tile, (2 * a.shape[0], G_DIMS)))


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
    WIDTH: tl.constexpr,
):
    o_dim = tl.arange(0, WIDTH)
    for g in tl.static_range(OUT_DIMS // WIDTH):
        if HEADS_FIRST:
            p_tile = p_out + o_head[:, None] * stride_head + (o_dim + g * WIDTH)[None, :]
            tl.store(p_tile, (tiles[2 + g] * inverse[:, None]).to(DTYPE), mask=m_head[:, None])
        else:
            p_tile = p_out + o_head[None, :] * stride_head + (o_dim + g * WIDTH)[:, None]
            tile = _dims_in_order((tiles[2 + g] * inverse[None, :]).to(DTYPE), g == N_GROUPS)
            tl.store(p_tile, tile, mask=m_head[None, :])


@triton.jit
def _listed(block, blocks, main, extra, o_place, last_block, HAS_EXTRA: tl.constexpr, BLOCK_T: tl.constexpr):
    """The indices at these places of a block (0 or more), from blocks on the extra list's. -1: no token.

    There is none from last_block on. main and extra: (its row of indices, its live length, cache, bytes of a page).
    """
    p_indices, length, _, _ = main
    length = tl.where(block < last_block, length, 0)
    o_pos = block * BLOCK_T + o_place
    if HAS_EXTRA:
        in_extra = block >= blocks
        o_pos -= tl.where(in_extra, blocks, 0) * BLOCK_T
        p_extra_indices, extra_length, _, _ = extra
        extra_length = tl.where(block < last_block, extra_length, 0)
        p_list = tl.where(in_extra, p_extra_indices, p_indices)
        return tl.load(p_list + o_pos, mask=o_pos < tl.where(in_extra, extra_length, length), other=-1)
    else:
        return tl.load(p_indices + o_pos, mask=o_pos < length, other=-1)


@triton.jit
def _located(
    index,
    in_extra,
    main,
    extra,
    HAS_EXTRA: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
):
    """Where the tokens lie: pointers to their data and to their scale bytes, and which are tokens at all."""
    _, _, cache_ptr, page_bytes = main
    m_token = index >= 0
    index = tl.where(m_token, index, 0)
    page = index // PAGE_SIZE
    slot = index % PAGE_SIZE
    if HAS_EXTRA:
        _, _, extra_cache_ptr, extra_page_bytes = extra
        page = tl.where(in_extra, index // EXTRA_PAGE_SIZE, page).to(tl.int64)
        slot = tl.where(in_extra, index % EXTRA_PAGE_SIZE, slot)
        p_page = tl.where(in_extra, extra_cache_ptr, cache_ptr)
        p_page += page * tl.where(in_extra, extra_page_bytes, page_bytes)
        footer = tl.where(in_extra, EXTRA_PAGE_SIZE * DATA_BYTES, PAGE_SIZE * DATA_BYTES)
    else:
        p_page = cache_ptr + page.to(tl.int64) * page_bytes
        footer = PAGE_SIZE * DATA_BYTES
    p_scales = (p_page + footer + slot * SCALE_BYTES).to(tl.pointer_type(tl.int64))
    return p_page + slot * DATA_BYTES, p_scales, m_token


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
    HEADS_FIRST: see the module. WAVES: how many programs a multiprocessor get; the launcher reads it. The `_rounded`
    widths are only for the tuning key. once: 1, see below. EARLY: programmatic dependent launch (sm_90 and later): this
    grid may start before the one ahead of it has ended, and the combine before this one; each waits for the other's
    results itself.
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

    queries = _load_queries(q_ptr + row * stride_q_row, stride_q_head, o_head, m_head, HEADS_FIRST, WIDTH, COMPUTE)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    scale_log2 = softmax_scale * LOG2E
    if HEADS_FIRST:
        state = (peak, tl.zeros([BLOCK_H], tl.float32)) + _zeros(HEADS_FIRST, BLOCK_H, WIDTH, tl.float32)
        # A loop of one turn. Triton (3.6.0) reads the first operand of a Hopper dot from shared memory only if it comes
        # from a load or is carried by a loop; converted queries are neither, and 64 heads of them would fill the
        # registers.
        for _ in range(0, once):
            for block in range(first_block, last_block):
                index = _listed(block, blocks, main, extra, tl.arange(0, BLOCK_T), last_block, HAS_EXTRA, BLOCK_T)
                p_token, p_scales, m_token = _located(
                    index, block >= blocks, main, extra, HAS_EXTRA, PAGE_SIZE, EXTRA_PAGE_SIZE
                )
                words, scales = _load_token_words(p_token, p_scales, m_token)
                keys = _rows(words, scales, WIDTH, COMPUTE)
                scores = tl.dot(queries[0], tl.trans(keys[0]))  # [H, T]
                for g in tl.static_range(1, OUT_DIMS // WIDTH):
                    scores = tl.dot(queries[g], tl.trans(keys[g]), scores)
                state = _attend(state, keys, scores, m_token, scale_log2, HEADS_FIRST, COMPUTE)
            queries = _zeros(HEADS_FIRST, BLOCK_H, WIDTH, COMPUTE)
        total = state[1]
    else:
        state = (peak, tl.zeros([BLOCK_T, BLOCK_H], tl.float32)) + _zeros(HEADS_FIRST, BLOCK_H, WIDTH, tl.float32)
        # At once: the dots of one block, the words of the next one on their way into the registers that this one's
        # leave, the indices of the one after it. Two turns come ahead of the first block, with loads alone: as code
        # ahead of the loop those loads cost two seconds a config in Triton's coalescing pass (3.6.0). The halves of a
        # block: see _fragments.
        o_row = tl.arange(0, BLOCK_T // 2)
        o_one = o_row // 8 * 16 + o_row % 8
        o_all = tl.arange(0, BLOCK_T)
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
            else:
                words, scales = _load_token_words(p_one, p_one_scales, m_one)
                other_words, other_scales = _load_token_words(p_other, p_other_scales, m_other)
            index = next_index
        total = tl.sum(state[1], axis=0)

    if EARLY:  # only now: programs of the combine that wait beside the gathers slow them down
        gdc_launch_dependents()
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
