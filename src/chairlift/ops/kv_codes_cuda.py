"""Attention over 8-bit keys and values in Triton: the part of decode_cuda's kernels that reads codes (kv_quant.py).

Products are computed on codes: the keys' scales multiply the scores, the values' scales multiply the weights. A code is
one byte, but the transposed loads of tensor cores need elements of 16 bits. So codes are loaded in pairs, and the even
and the odd dimensions of a head are multiplied apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAIR_OF_INT8 = tl.constexpr("""{
    .reg .b32 a, b, t, minus;
    mov.b32 minus, 0xBF80BF80;
    lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, b, minus, a;
    shr.u32 t, $2, 8;
    lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, b, minus, a;
}""")
_PAIR_OF_FP8 = tl.constexpr("""{
    .reg .b32 a, t;
    shl.b32 t, $2, 8;
    shr.u32 a, t, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 $0, t, 0x80008000, a, 0xEA;
    shr.u32 a, $2, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 $1, $2, 0x80008000, a, 0xEA;
}""")


@triton.jit
def pass_over_codes(
    q_row, is_row, data_at, scales_at, table_at, low, high, head, scale, block_stride, side_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, CAP: tl.constexpr, MAX_CODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return highest score, sum of weights and weighted values of queries over the unmasked keys low..high.

    Addresses and strides count pairs of codes, and so do those of the scales, which have 16 bits. Scores are base-2
    exponents.
    """
    HALF: tl.constexpr = WIDTH // 2
    kind: tl.constexpr = q_row.dtype.element_ty
    SHIFTED: tl.constexpr = EARLY and MAX_CODE == 448 and kind == tl.bfloat16
    UP: tl.constexpr = 1.2676506002282294e30 if SHIFTED else 1.0  # 2**100: see pair_numbers
    BACK: tl.constexpr = 1048576.0 if SHIFTED else 1.0  # 2**20
    column, key, pair = tl.arange(0, HALF), tl.arange(0, KEYS), tl.arange(0, KEYS // 2)
    is_column = column < DIM // 2
    q_at = q_row[:, None] + 2 * column[None, :]
    is_query = is_row[:, None] & is_column[None, :]
    even = (tl.load(q_at, mask=is_query, other=0.0) * UP).to(kind)
    odd = (tl.load(q_at + 1, mask=is_query, other=0.0) * UP).to(kind)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    even_sums = tl.zeros([ROWS, HALF], tl.float32)
    odd_sums = tl.zeros([ROWS, HALF], tl.float32)
    pairs_at = scales_at.to(tl.pointer_type(tl.int32), bitcast=True)
    for start in range(low // 2 * 2, high, KEYS):  # scales are loaded in pairs of tokens
        position = start + key
        is_key = (position >= low) & (position < high)
        block = tl.load(table_at + position // BLOCK, mask=position < high, other=0).to(tl.int64)
        at = data_at + block * block_stride + head * head_stride + (position % BLOCK) * (DIM // 2)
        inside = is_key[:, None] & is_column[None, :]
        first = start + 2 * pair
        block = tl.load(table_at + first // BLOCK, mask=first < high, other=0).to(tl.int64)
        scale_at = pairs_at + (block * block_stride + head * head_stride + first % BLOCK) // 2
        key_scale = _scales(scale_at, first < high, KEYS)
        k_even, k_odd = pair_numbers(
            tl.load(at[:, None] + column[None, :], mask=inside, other=0), kind, MAX_CODE, EARLY
        )
        scores = tl.dot(even, tl.trans(k_even), input_precision="ieee" if EXACT else "tf32")
        scores = tl.dot(odd, tl.trans(k_odd), scores, input_precision="ieee" if EXACT else "tf32")
        scores = scores * (key_scale * (scale * BACK))[None, :]
        if CAP > 0:
            scores = capped(scores, CAP)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        rescale = tl.exp2(peak - top)
        total = total * rescale + tl.sum(weights, 1)
        # Times MAX_CODE, which is divided out at the end: in float16 small scales would round small weights to 0.
        value_scale = _scales(scale_at + side_stride // 2, first < high, KEYS) * (MAX_CODE * UP)
        weights = (weights * value_scale[None, :]).to(kind)
        v_even, v_odd = pair_numbers(
            tl.load(at[:, None] + side_stride + column[None, :], mask=inside, other=0), kind, MAX_CODE, EARLY
        )
        even_sums = even_sums * rescale[:, None]
        odd_sums = odd_sums * rescale[:, None]
        even_sums = tl.dot(weights, v_even, even_sums, input_precision="ieee" if EXACT else "tf32")
        odd_sums = tl.dot(weights, v_odd, odd_sums, input_precision="ieee" if EXACT else "tf32")
        peak = top
    sums = tl.reshape(tl.join(even_sums, odd_sums), [ROWS, WIDTH]) * (BACK / MAX_CODE)
    return peak, total, sums


@triton.jit
def _scales(at, inside, KEYS: tl.constexpr):
    """Load the bfloat16 scales of KEYS tokens, two at a time, as float32."""
    both = tl.load(at, mask=inside, other=0)
    low, high = (both << 16).to(tl.float32, bitcast=True), (both & -0x10000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [KEYS])


@triton.jit
def pair_numbers(pairs, kind: tl.constexpr, MAX_CODE: tl.constexpr, EARLY: tl.constexpr):
    """Convert pairs of codes to the numbers of the first and of the second code of each pair.

    In bfloat16 on a GPU, e4m3 codes become numbers times 2**-120: exponent and mantissa are shifted to their bits, and
    the exponent bias differs by 120. The caller multiplies by that power where numbers are few. Seven bits of an int8
    code in the lowest bits of 128.0 are 128 + code; the sign's bit makes another 128.0 a 256.0.
    """
    if EARLY and kind == tl.bfloat16:
        first, second = tl.inline_asm_elementwise(
            _PAIR_OF_INT8 if MAX_CODE == 127 else _PAIR_OF_FP8,
            "=r,=r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = pairs.to(tl.int32)
        first, second = numbers((wide << 24) >> 24, kind, MAX_CODE), numbers(wide >> 8, kind, MAX_CODE)
    return first, second


@triton.jit
def numbers(codes, kind: tl.constexpr, MAX_CODE: tl.constexpr):
    """Convert 8-bit codes, or codes that are sign-extended, to a dtype that represents each of them exactly."""
    if MAX_CODE == 127:
        found = codes.to(kind)
    else:  # shift sign, exponent and mantissa to their float32 bits; the exponent bias differs by 120
        wide = codes if codes.dtype == tl.int32 else codes.to(tl.int8, bitcast=True).to(tl.int32)
        found = (((wide << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)
    return found


@triton.jit
def widened(bits):
    """Convert the bits of bfloat16 numbers to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """Return CAP * tanh(score / CAP), for scores that are base-2 exponents."""
    return (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP)))) * (CAP * 1.4426950408889634)
