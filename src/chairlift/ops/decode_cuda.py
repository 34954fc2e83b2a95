"""Attention of decodes over the paged KV cache in Triton: one token for each sequence, however unlike their contexts.

The contexts of a step are cut into items of about the same size, so many that the device is full and none is waited for
long. A program takes one item and one KV head, for all query heads that share it. Of a sequence with several items the
last program to end joins what all found (flash-decoding). What the items are depends on the contexts alone: it is laid
out on the device once in a step, in a list of fixed length, so that a recorded step holds for any contexts.

Sequences that begin with the same blocks may read them together: shared items hold the queries of many of them against
a part of what they share, and their own items begin behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from chairlift.ops.batch import Batch
from chairlift.ops.early_cuda import early, wait
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.kv_quant import TOPS
from chairlift.ops.scoring import Scoring

_LEAST_ROWS = 16  # of the smallest tile that the matrix units take
_SHARED_ROWS = 64  # queries (sequences x heads) in a shared item
_KEYS = 64  # keys that a program takes at a time
_WARPS, _STAGES = 2, 5  # of 16-bit numbers, while that fits: few threads, and much on its way to each
_FILLS = 1320  # programs of one length that would fill a large GPU a few times: none is longer than these
_LEAST = 512  # tokens of an item, so that joining costs little against reading
_FEW = 384  # of sequences and KV heads: with no more, fewer and shorter programs are faster
_FILLS_OF_FEW, _LEAST_OF_FEW = 264, 64
_COUNTED = 512  # sequences that are counted at a time, however few there are: one kernel for almost every batch


@dataclass(frozen=True, slots=True)
class Work:
    """What the programs of a step's decodes do, and where they leave what must be joined."""

    items: torch.Tensor  # [items, 8]: sequence (-1: nothing), first and last key, and of its results: this one's slot,
    # the first, how many with those of shared items, how many are its own
    firsts: torch.Tensor  # [sequences]: first slot
    arrived: torch.Tensor  # [sequences, kv_heads]: items that are done; zero again after each layer
    sums: torch.Tensor  # [slots, heads, dim]
    peaks: torch.Tensor  # [slots, heads, 2]: the highest score, and the sum of weights


def attend_decodes(
    qkv: torch.Tensor,
    heads: int,
    cache: KvCache,
    layer: int,
    batch: Batch,
    window: int,
    scoring: Scoring,
    out: torch.Tensor,
) -> None:
    """Attention of a batch's first slices, the decodes."""
    work: Work = batch.work.get(window) or lay_out(heads, cache, batch, window)
    batch.work[window] = work
    group, dim = heads // cache.kv_heads, cache.dim
    data = cache.data[layer]
    scales = data if cache.scales is None else cache.scales[layer].view(torch.int16)
    given = (qkv, data, scales, batch.tables, work.sums, work.peaks)
    scale = math.log2(math.e) * scoring.scale
    strides = batch.tables.stride(0), qkv.stride(0), data.stride(0), data.stride(1), data.stride(2)
    fixed: dict[str, Any] = {
        "GROUP": group, "HEADS": heads, "DIM": dim, "WIDTH": triton.next_power_of_2(dim), "BLOCK": cache.block_size,
        "EXACT": qkv.dtype == torch.float32, "CAP": scoring.softcap, "TOP": TOPS.get(cache.dtype, 0), "num_warps": 4,
        "num_stages": 2, **early(),
    }  # fmt: skip
    if batch.shared is not None:
        shared = batch.shared
        keys = _KEYS // 2 if fixed["EXACT"] else _KEYS
        _attend_shared[(shared.items.shape[0], cache.kv_heads)](
            *given, work.firsts, shared.items, shared.members, scale, *strides, ROWS=_SHARED_ROWS, KEYS=keys, **fixed
        )
    if qkv.dtype == cache.dtype != torch.float32 and dim <= 128:
        fixed |= {"num_warps": _WARPS, "num_stages": _STAGES}
    _attend_own[(work.items.shape[0], cache.kv_heads)](
        *given, work.items, work.arrived, qkv if scoring.sinks is None else scoring.sinks, out, scale, *strides,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), KEYS=_KEYS, SINKS=scoring.sinks is not None, **fixed,
    )  # fmt: skip


def lay_out(heads: int, cache: KvCache, batch: Batch, window: int) -> Work:
    """Cut the decodes' contexts into items."""
    count, device = batch.decodes, batch.contexts.device
    is_few = count * cache.kv_heads <= _FEW
    items = count + -(-(_FILLS_OF_FEW if is_few else _FILLS) // cache.kv_heads)
    shared = batch.shared
    slots = items + (0 if shared is None else shared.slots)
    work = Work(
        torch.empty(items, 8, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        torch.zeros(count, cache.kv_heads, dtype=torch.int32, device=device),
        torch.empty(slots, heads, cache.dim, dtype=torch.float32, device=device),
        torch.empty(slots, heads, 2, dtype=torch.float32, device=device),
    )
    prefixes, parts = (batch.contexts, batch.contexts) if shared is None else (shared.prefixes, shared.parts)
    _lay_out[(count,)](
        batch.contexts, prefixes, parts, work.items, work.firsts, count, items, window or 1 << 30,
        _LEAST_OF_FEW if is_few else _LEAST, COUNT=max(_COUNTED, triton.next_power_of_2(count)), KEYS=_KEYS,
        SHARED=shared is not None, num_warps=4, **early(),
    )  # fmt: skip
    return work


def members_of_item(heads: int, kv_heads: int) -> int:
    """How many sequences a shared item holds the queries of, at most."""
    return _SHARED_ROWS // (heads // kv_heads)


@triton.jit(do_not_specialize=["count", "items", "window", "least"])
def _lay_out(
    contexts_at, prefixes_at, parts_at, items_at, firsts_at, count, items, window, least,
    COUNT: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The items of one sequence: the longest of all come first, so that no program is left alone at the end.

    What stands before them every program counts for itself.
    """
    piece = tl.program_id(0)
    wait(EARLY)
    each = tl.arange(0, COUNT)
    inside, before, is_mine = each < count, each < piece, each == piece
    context = tl.load(contexts_at + each, mask=inside, other=0)
    begin = tl.maximum(context - window, 0)
    parts = tl.zeros([COUNT], tl.int32)
    if SHARED:
        begin = tl.maximum(begin, tl.load(prefixes_at + each, mask=inside, other=0))
        parts = tl.load(parts_at + each, mask=inside, other=0)
    length = context - begin
    # No more items than fit: all but the last of a sequence are this long.
    longest = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(length), items - count), KEYS) * KEYS, least)
    own = tl.cdiv(length, longest)
    is_any = own > 0  # a context of no tokens has no item
    more = tl.maximum(own - 1, 0)
    rest = length - more * longest  # of the last
    mine, shared = tl.sum(tl.where(is_mine, own, 0)), tl.sum(tl.where(is_mine, parts, 0))
    low, high = tl.sum(tl.where(is_mine, begin, 0)), tl.sum(tl.where(is_mine, context, 0))
    slot = tl.sum(tl.where(before, own + parts, 0))
    tl.store(firsts_at + piece, slot)
    whole_before, whole = tl.sum(tl.where(before, more, 0)), tl.sum(more)
    my_rest = tl.sum(tl.where(is_mine, rest, 0))
    longer = is_any & ((rest > my_rest) | ((rest == my_rest) & before))
    last_place = whole + tl.sum(tl.where(longer, 1, 0))
    lane = tl.arange(0, 32)
    for start in range(0, mine, 32):
        part = start + lane
        is_part = part < mine
        to = items_at + tl.where(part == mine - 1, last_place, whole_before + part) * 8
        tl.store(to, tl.zeros([32], tl.int32) + piece, mask=is_part)
        tl.store(to + 1, low + part * longest, mask=is_part)
        tl.store(to + 2, tl.minimum(low + (part + 1) * longest, high), mask=is_part)
        tl.store(to + 3, slot + shared + part, mask=is_part)
        tl.store(to + 4, tl.zeros([32], tl.int32) + slot, mask=is_part)
        tl.store(to + 5, tl.zeros([32], tl.int32) + shared + mine, mask=is_part)
        tl.store(to + 6, tl.zeros([32], tl.int32) + mine, mask=is_part)
    if piece == count - 1:
        for start in range(tl.sum(own), items, 32):
            tl.store(items_at + (start + lane) * 8, tl.full([32], -1, tl.int32), mask=start + lane < items)


# The width of the tables differs from step to step: no kernel of its own for some.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_own(
    q_at, data_at, scales_at, tables_at, sums_at, peaks_at, items_at, arrived_at, sinks_at, out_at, scale,
    table_stride, q_stride, block_stride, side_stride, head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr,
    TOP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One item of one sequence, and if it is the last to end, what all of the sequence's items give together."""
    item, head = tl.program_id(0), tl.program_id(1)
    wait(EARLY)
    item_at = items_at + item * 8
    piece, low, high, slot = tl.load(item_at), tl.load(item_at + 1), tl.load(item_at + 2), tl.load(item_at + 3)
    first, slots, own = tl.load(item_at + 4), tl.load(item_at + 5), tl.load(item_at + 6)
    if piece >= 0:
        row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        is_row, is_column = row < GROUP, column < DIM
        query_head = head * GROUP + row
        inside = is_row[:, None] & is_column[None, :]
        q_from = q_at + piece.to(tl.int64) * q_stride + query_head[:, None] * DIM + column[None, :]
        q = tl.load(q_from, mask=inside, other=0.0)
        peak, total, sums = _pass_over(
            q, data_at, scales_at, tables_at + piece.to(tl.int64) * table_stride, low, high, head, scale,
            block_stride, side_stride, head_stride, DIM, WIDTH, BLOCK, ROWS, KEYS, EXACT, CAP, TOP,
        )  # fmt: skip
        to = out_at + piece.to(tl.int64) * (HEADS * DIM) + query_head[:, None] * DIM + column[None, :]
        if slots == 1:
            if SINKS:
                total = with_sink(total, peak, sinks_at + query_head, is_row)
            tl.store(to, (sums / total[:, None]).to(out_at.dtype.element_ty), mask=inside)
        else:
            line = slot * HEADS + query_head
            tl.store(sums_at + line[:, None] * DIM + column[None, :], sums, mask=inside)
            tl.store(peaks_at + line * 2, peak, mask=is_row)
            tl.store(peaks_at + line * 2 + 1, total, mask=is_row)
            tl.debug_barrier()  # all of it is written before this item counts as done
            done = tl.atomic_add(arrived_at + piece * (HEADS // GROUP) + head, 1)
            if done == own - 1:
                tl.store(arrived_at + piece * (HEADS // GROUP) + head, 0)
                _join(sums_at, peaks_at, sinks_at, out_at, piece, head, first, slots, GROUP, HEADS, DIM, WIDTH, SINKS)


# The width of the tables differs from step to step: no kernel of its own for some.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_shared(
    q_at, data_at, scales_at, tables_at, sums_at, peaks_at, firsts_at, items_at, members_at, scale,
    table_stride, q_stride, block_stride, side_stride, head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr, TOP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The queries of several sequences against a part of what they all begin with."""
    item, head = tl.program_id(0), tl.program_id(1)
    wait(EARLY)
    first, members = tl.load(items_at + item * 5), tl.load(items_at + item * 5 + 1)
    if members > 0:
        low, high = tl.load(items_at + item * 5 + 2), tl.load(items_at + item * 5 + 3)
        part = tl.load(items_at + item * 5 + 4)
        row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        is_row, is_column = row < members * GROUP, column < DIM
        piece = tl.load(members_at + first + row // GROUP, mask=is_row, other=0).to(tl.int64)
        anyone = tl.load(members_at + first).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        inside = is_row[:, None] & is_column[None, :]
        q_from = q_at + piece[:, None] * q_stride + query_head[:, None] * DIM + column[None, :]
        q = tl.load(q_from, mask=inside, other=0.0)
        peak, total, sums = _pass_over(
            q, data_at, scales_at, tables_at + anyone * table_stride, low, high, head, scale,
            block_stride, side_stride, head_stride, DIM, WIDTH, BLOCK, ROWS, KEYS, EXACT, CAP, TOP,
        )  # fmt: skip
        slot = tl.load(firsts_at + piece, mask=is_row, other=0) + part
        line = slot * HEADS + query_head
        tl.store(sums_at + line[:, None] * DIM + column[None, :], sums, mask=inside)
        tl.store(peaks_at + line * 2, peak, mask=is_row)
        tl.store(peaks_at + line * 2 + 1, total, mask=is_row)


@triton.jit
def _pass_over(
    q, data_at, scales_at, table_at, low, high, head, scale, block_stride, side_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, CAP: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Queries against the keys low..high of one sequence, all of which they see: highest score, weight, weighed values.

    Scores are in powers of two. TOP is the largest code of an 8-bit cache, 0 where numbers are stored as they are.
    Products are of codes: the scales of the keys are put into the scores, those of the values into the weights.
    """
    column, key = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    is_column = column < DIM
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(low, high, KEYS):
        position = start + key
        is_key = position < high
        block = tl.load(table_at + position // BLOCK, mask=is_key, other=0).to(tl.int64)
        place = block * block_stride + head * head_stride
        at = data_at + place + (position % BLOCK) * DIM
        inside = is_key[:, None] & is_column[None, :]
        k = tl.load(at[:, None] + column[None, :], mask=inside, other=0)
        if TOP:
            k = numbers(k, q.dtype, TOP)
            scale_at = scales_at + place // 2 + position % BLOCK
            key_scale = widened(tl.load(scale_at, mask=is_key, other=0))
            # Times TOP, which is taken out at the end: in float16 small scales would make the smallest weights vanish.
            value_scale = widened(tl.load(scale_at + side_stride // 2, mask=is_key, other=0)) * TOP
        scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
        if TOP:
            scores = scores * key_scale[None, :]
        if CAP > 0:
            scores = capped(scores, CAP)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        fade = tl.exp2(peak - top)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(at[:, None] + side_stride + column[None, :], mask=inside, other=0)
        if TOP:
            v = numbers(v, q.dtype, TOP)
            weights = weights * value_scale[None, :]
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        peak = top
    if TOP:
        sums = sums * (1 / TOP)
    return peak, total, sums


@triton.jit
def _join(
    sums_at, peaks_at, sinks_at, out_at, piece, head, first, slots, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """What the slots of one sequence give together, for all query heads of one KV head at once."""
    SLOTS: tl.constexpr = 4 if GROUP <= 4 else 2 if GROUP <= 8 else 1  # at a time: there are seldom more
    place = tl.arange(0, triton.next_power_of_2(GROUP) * WIDTH)
    query_head, column = head * GROUP + place // WIDTH, place % WIDTH
    is_place = (place // WIDTH < GROUP) & (column < DIM)
    peak = tl.full(place.shape, -float("inf"), tl.float32)
    total, answer = tl.zeros(place.shape, tl.float32), tl.zeros(place.shape, tl.float32)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)[:, None]
        inside = (slot < slots) & is_place[None, :]
        line = (first + slot) * HEADS + query_head[None, :]
        peaks = tl.load(peaks_at + line * 2, mask=inside, other=-float("inf"))
        totals = tl.load(peaks_at + line * 2 + 1, mask=inside, other=0.0)
        sums = tl.load(sums_at + line * DIM + column[None, :], mask=inside, other=0.0)
        top = tl.maximum(tl.maximum(peak, tl.max(peaks, 0)), -1e30)
        weights, fade = tl.exp2(peaks - top[None, :]), tl.exp2(peak - top)
        total = total * fade + tl.sum(totals * weights, 0)
        answer = answer * fade + tl.sum(sums * weights, 0)
        peak = top
    to = out_at + (piece.to(tl.int64) * HEADS + query_head) * DIM + column
    if SINKS:
        total = with_sink(total, peak, sinks_at + query_head, is_place)
    answer = answer / tl.where(is_place, total, 1.0)
    tl.store(to, answer.to(out_at.dtype.element_ty), mask=is_place)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), of scores in powers of two."""
    return (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP)))) * (CAP * 1.4426950408889634)


@triton.jit
def with_sink(total, peak, sinks_at, inside):
    """The sum of weights with that of the sinks, all relative to `peak`."""
    sink = tl.load(sinks_at, mask=inside, other=0.0) * 1.4426950408889634
    return total + tl.exp2(tl.minimum(sink - peak, 80.0))


@triton.jit
def numbers(codes, kind: tl.constexpr, TOP: tl.constexpr):
    """What 8-bit codes stand for, in the type of the queries, which holds every one of them exactly."""
    if TOP == 127:
        found = codes.to(kind)
    else:  # sign, exponent and mantissa moved to where a float32 has them; its exponents begin 120 lower
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        found = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)
    return found


@triton.jit
def widened(bits):
    """Float32 numbers from the bits of bfloat16 ones."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
