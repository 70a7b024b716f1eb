"""From a row's lists to tiles of values: which tokens a block has, where they lie, their bytes, what these are worth.

A tile is dequantised to fp16 before the dots: one conversion instruction gives two values where bf16 takes five, and
fp16 keeps three bits more. e4m3 times a power of two is exact in it for scale bytes 112 to 134 (2^-15 to 2^7); below,
values round to multiples of 2^-24, and from 65,504 on they overflow. The latents that this cache holds are
RMS-normalised and stay far inside. Scale byte 255 (NaN in the format) gives values that are not finite.
"""

import triton
import triton.language as tl

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


@triton.jit
def _dim_at(place, ROPE: tl.constexpr):
    """Which of its 64 dims a tile of keys has at a place, AHEAD; see ``_fragments``."""
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
    """512 / WIDTH tiles [BLOCK_T, WIDTH] of values, the dims in their order."""
    keys = ()
    for g in tl.static_range(N_GROUPS + 1):
        a, b, c, d = _values(words, scales, g, COMPUTE)
        if g == N_GROUPS:
            low = tl.reshape(tl.join(a, b), (a.shape[0], 4, 8))
            high = tl.reshape(tl.join(c, d), (a.shape[0], 4, 8))
            b_k = tl.permute(tl.join(low, high), (0, 1, 3, 2))
        else:
            b_k = tl.join(tl.join(a, c), tl.join(b, d))
        b_k = tl.reshape(b_k, (a.shape[0], G_DIMS))
        if WIDTH == G_DIMS:
            b_k = _keep_in_shared_memory(b_k)
        keys = keys + (b_k,)
    if WIDTH == G_DIMS:
        return keys
    else:
        tl.static_assert(WIDTH == 2 * G_DIMS)
        pairs = ()
        for g in tl.static_range(OUT_DIMS // WIDTH):
            pairs = pairs + (_side_by_side(keys[2 * g], keys[2 * g + 1]),)
        return pairs


@triton.jit
def _fragments(words, scales, other_words, other_scales, g: tl.constexpr, COMPUTE: tl.constexpr):
    """AHEAD: tile g [BLOCK_T, 64] of the values of both halves of a block.

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
