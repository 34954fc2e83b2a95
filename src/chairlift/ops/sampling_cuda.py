"""Sampling in Triton: one pass over the logits in the model's dtype, without a float32 copy and without a sort.

Each row of logits is divided among a few programs, which find the best token of their part; a second, tiny kernel finds
the best of the parts. The filters (top_k, top_p, min_p) are reduced to two numbers per row, found by bisection: the
lowest logit that is kept, and the last kept id among the tokens with exactly this logit, as a stable sort would keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.ops.filters import NO_TOKEN, Filters

_PROGRAMS = 512  # about, per batch: a few per multiprocessor; also the most per row
_TILE = 2048  # logits per iteration of a program
_NO_TOKEN = tl.constexpr(NO_TOKEN)
Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # a table [rows, positions], and where to write each token
_SHIFTS = {
    torch.float32: 0,
    torch.float16: 13,
    torch.bfloat16: 16,
}  # low bits of float32 that are 0 in the narrower dtypes


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of each row's highest logit, the first of equal ones; NO_TOKEN if no logit is above -inf."""
    return _search(logits, None, None, None)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    filters: Filters | None,
    masks: torch.Tensor | None = None,
    into: Into | None = None,
) -> torch.Tensor:
    """Sample a token per row at its temperature, after its filters or its mask; at temperature 0 take the likeliest.

    Tokens are also written to `into`, if given.
    """
    assert filters is None or masks is None, "a filter would see tokens that the mask forbids"
    cut = None if filters is None else cutoffs(logits, temperature, *filters)
    return _search(logits, temperature, keys, cut, masks, into)


def cutoffs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest kept logit of each row as its `_order`, and the last kept id with that logit."""
    rows, vocabulary = logits.shape
    lowest = torch.empty(rows, dtype=torch.int32, device=logits.device)
    last = torch.empty_like(lowest)
    _cut[(rows,)](
        logits, logits.stride(0), vocabulary, temperature, top_k, top_p, min_p, lowest, last,
        SHIFT=_SHIFTS[logits.dtype], TILE=2 * _TILE, num_warps=16,
    )  # fmt: skip
    return lowest, last


def forbid_(logits: torch.Tensor, packed: torch.Tensor) -> None:
    """Set the logits of tokens with a bit of 0 in `packed` [rows, vocabulary / 8] to -inf."""
    rows, vocabulary = logits.shape
    grid = rows, triton.cdiv(vocabulary, _TILE)
    _forbid[grid](logits, logits.stride(0), vocabulary, packed, packed.stride(0), TILE=_TILE, num_warps=4)


@triton.jit
def _forbid(logits_at, stride, vocabulary, packed_at, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_real = ids < vocabulary
    octets = tl.load(packed_at + row * width + ids // 8, mask=is_real, other=0xFF).to(tl.int32)
    is_forbidden = is_real & (((octets >> (ids % 8)) & 1) == 0)
    tl.store(logits_at + row * stride + ids, -float("inf"), mask=is_forbidden)


def _search(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    keys: torch.Tensor | None,
    cut: tuple[torch.Tensor, torch.Tensor] | None,
    masks: torch.Tensor | None = None,
    into: Into | None = None,
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, _TILE)
    parts = min(tiles, triton.cdiv(_PROGRAMS, rows))
    span = triton.cdiv(tiles, parts) * _TILE
    parts = triton.cdiv(vocabulary, span)  # so that no part is empty
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    lowest, last = cut if cut is not None else (ids, ids)
    packed, width = (ids, 0) if masks is None else (masks, masks.stride(0))
    _best_of_part[(rows, parts)](
        logits, logits.stride(0), vocabulary, span, ids if temperature is None else temperature,
        ids if keys is None else keys, lowest, last, packed, width, values, ids, DRAWN=temperature is not None,
        CUT=cut is not None, MASKED=masks is not None, SHIFT=_SHIFTS[logits.dtype], TILE=_TILE, num_warps=8,
    )  # fmt: skip
    if parts == 1 and into is None:
        return ids[:, 0]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    table, own_rows, positions = (tokens, tokens, tokens) if into is None else into
    _best_of_all[(rows,)](
        values, ids, tokens, parts, table, table.stride(0), own_rows, positions, WRITES=into is not None,
        WIDTH=_PROGRAMS, num_warps=4,
    )  # fmt: skip
    return tokens


@triton.jit
def _best_of_part(
    logits_at, stride, vocabulary, span, temperature_at, keys_at, lowest_at, last_at, packed_at, width, values_at,
    ids_at, DRAWN: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the best token of one part of a row; each lane keeps its own best, and the first of equal ones."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * span
    temperature = 0.0
    if DRAWN:
        temperature = tl.load(temperature_at + row)
        key = tl.load(keys_at + 2 * row).to(tl.uint32)
        other_key = tl.load(keys_at + 2 * row + 1).to(tl.uint32)
    if CUT:
        lowest, last = tl.load(lowest_at + row), tl.load(last_at + row)
    best = tl.full([TILE], float("-inf"), tl.float32)
    found = first + tl.arange(0, TILE)
    for start in range(first, tl.minimum(first + span, vocabulary), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits_at + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        if MASKED:
            octets = tl.load(packed_at + row * width + token // 8, mask=token < vocabulary, other=0).to(tl.int32)
            x = tl.where(((octets >> (token % 8)) & 1) == 1, x, float("-inf"))
        value = x
        if DRAWN:  # noqa: SIM102  # DRAWN is a compile-time constant, temperature is not
            if temperature > 0:
                value = tl.div_rn(x, temperature) + _gumbel(token, key, other_key)
                if CUT:
                    order = _order(x, SHIFT)
                    value = tl.where((order > lowest) | ((order == lowest) & (token <= last)), value, float("-inf"))
        is_better = value > best
        best = tl.where(is_better, value, best)
        found = tl.where(is_better, token, found)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(values_at + at, top)
    chosen = tl.min(tl.where(best == top, found, 0x7FFFFFFF), 0).to(tl.int64)
    tl.store(ids_at + at, tl.where(top > float("-inf"), chosen, _NO_TOKEN))


@triton.jit(do_not_specialize=["parts"])
def _best_of_all(
    values_at, ids_at, tokens_at, parts, table_at, stride, rows_at, positions_at, WRITES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the best of a row's parts, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    values = tl.load(values_at + row * parts + part, mask=part < parts, other=float("-inf"))
    ids = tl.load(ids_at + row * parts + part, mask=part < parts, other=_NO_TOKEN)
    token = tl.min(tl.where(values == tl.max(values, 0), ids, _NO_TOKEN), 0)
    tl.store(tokens_at + row, token)
    if WRITES:
        at = tl.load(rows_at + row).to(tl.int64) * stride + tl.load(positions_at + row)
        tl.store(table_at + at, token.to(tl.int32))


@triton.jit
def _gumbel(token, key, other_key):
    """Return the noise of sampling.gumbel: sampling.uniform_reference in 32-bit arithmetic, and two logarithms."""
    x = token.to(tl.uint32) * 0x9E3779B9
    x = x ^ key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x + other_key
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _order(x, SHIFT: tl.constexpr):
    """Map x to an integer with the same order; neighbours in x's original dtype differ by 1."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit(do_not_specialize_on_alignment=["top_p_at", "min_p_at"])
def _cut(
    logits_at, stride, vocabulary, temperature_at, top_k_at, top_p_at, min_p_at, lowest_at, last_at,
    SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply min_p, top_k and top_p to a row: they keep logits above `lowest`, and equal ones up to id `last`."""
    row = tl.program_id(0).to(tl.int64)
    at = logits_at + row * stride
    temperature = tl.load(temperature_at + row)
    if temperature > 0:
        top_k, top_p = tl.load(top_k_at + row).to(tl.int32), tl.load(top_p_at + row)
        top, lowest = _range(at, vocabulary, temperature, tl.load(min_p_at + row), SHIFT, TILE)
        last = vocabulary
        high = _order(top, SHIFT).to(tl.int64)
        if top_k > 0:  # noqa: SIM102  # Triton's `and` computes both sides
            if _count(at, vocabulary, lowest, vocabulary, SHIFT, TILE) > top_k:
                low = lowest.to(tl.int64)
                up = high
                while low < up:  # find the highest logit that at least top_k tokens reach
                    middle = (low + up + 1) >> 1
                    if _count(at, vocabulary, middle.to(tl.int32), vocabulary, SHIFT, TILE) >= top_k:
                        low = middle
                    else:
                        up = middle - 1
                lowest = low.to(tl.int32)
                above = _count(at, vocabulary, lowest, -1, SHIFT, TILE)
                last = _last_equal(at, vocabulary, lowest, top_k - above, vocabulary, SHIFT, TILE)
        if top_p < 1:
            peak = tl.div_rn(top, temperature)
            goal = top_p * _mass(at, vocabulary, lowest, last, temperature, peak, SHIFT, TILE)
            low = lowest.to(tl.int64)
            up = high
            while low < up:  # find the lowest logit with less than the goal above it
                middle = (low + up) >> 1
                # Tokens equal to the bound of top_k count up to `last`, but none of them is above another.
                if _mass(at, vocabulary, middle.to(tl.int32), -1, temperature, peak, SHIFT, TILE) < goal:
                    up = middle
                else:
                    low = middle + 1
            if low > lowest:
                last = vocabulary
            lowest = low.to(tl.int32)
            above = _mass(at, vocabulary, lowest, -1, temperature, peak, SHIFT, TILE)
            count = _count(at, vocabulary, lowest, last, SHIFT, TILE) - _count(at, vocabulary, lowest, -1, SHIFT, TILE)
            each = (_mass(at, vocabulary, lowest, last, temperature, peak, SHIFT, TILE) - above) / count
            taken = tl.maximum(tl.ceil((goal - above) / each), 1.0)
            taken = tl.minimum(taken, count.to(tl.float32)).to(tl.int32)
            last = _last_equal(at, vocabulary, lowest, taken, last, SHIFT, TILE)
        tl.store(lowest_at + row, lowest)
        tl.store(last_at + row, last)


@triton.jit
def _range(at, vocabulary, temperature, min_p, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the highest logit, and the order of the lowest one that min_p keeps."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocabulary, TILE):
        best = tl.maximum(best, _tile(at, start, vocabulary, TILE))
    top = tl.max(best, 0)
    floor = tl.where(min_p > 0, tl.div_rn(top, temperature) + tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
    lowest = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for start in range(0, vocabulary, TILE):
        x = _tile(at, start, vocabulary, TILE)
        stays = (tl.div_rn(x, temperature) >= floor) & (x > float("-inf"))
        lowest = tl.minimum(lowest, tl.where(stays, _order(x, SHIFT), 0x7FFFFFFF))
    return top, tl.min(lowest, 0)


@triton.jit
def _count(at, vocabulary, lowest, last, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Count the tokens above `lowest`, or equal to it with an id up to `last`."""
    found = tl.zeros([TILE], tl.int32)
    for start in range(0, vocabulary, TILE):
        order = _order(_tile(at, start, vocabulary, TILE), SHIFT)
        token = start + tl.arange(0, TILE)
        found += ((order > lowest) | ((order == lowest) & (token <= last))).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _mass(at, vocabulary, lowest, last, temperature, peak, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Sum exp(logit / temperature - peak) over the tokens that _count counts."""
    found = tl.zeros([TILE], tl.float32)
    for start in range(0, vocabulary, TILE):
        x = _tile(at, start, vocabulary, TILE)
        order = _order(x, SHIFT)
        token = start + tl.arange(0, TILE)
        weight = tl.exp(tl.div_rn(x, temperature) - peak)
        found += tl.where((order > lowest) | ((order == lowest) & (token <= last)), weight, 0.0)
    return tl.sum(found, 0)


@triton.jit
def _last_equal(at, vocabulary, lowest, taken, last, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the id of the last of the first `taken` tokens with exactly this logit, or `last` if there are no more."""
    above = _count(at, vocabulary, lowest, -1, SHIFT, TILE)
    up = last
    low = tl.where(_count(at, vocabulary, lowest, last, SHIFT, TILE) - above > taken, 0, last)
    while low < up:
        middle = (low + up) >> 1
        if _count(at, vocabulary, lowest, middle, SHIFT, TILE) - above >= taken:
            up = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _tile(at, start, vocabulary, TILE: tl.constexpr):
    token = start + tl.arange(0, TILE)
    return tl.load(at + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
