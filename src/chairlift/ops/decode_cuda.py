"""Attention of decodes over the paged KV cache in Triton, balanced for sequences with very different contexts.

The contexts of a step are cut into items of about equal length, enough to fill the device. A program computes one item
for one KV head and all query heads that share it. If a sequence has several items, the last program to finish combines
their results (flash-decoding). The items depend on the contexts alone: they are computed on the device once per step,
into a list of fixed length, so that a captured step works for any contexts.

Sequences with a common prefix of blocks may read it once: a shared item has the queries of several sequences and a part
of their prefix; each sequence's own items begin after the prefix.
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
from chairlift.ops.kv_codes_cuda import capped, pass_over_codes
from chairlift.ops.kv_quant import MAX_CODES
from chairlift.ops.scoring import Scoring

_LEAST_ROWS = 16  # of the smallest tile that tensor cores take
_SHARED_ROWS = 64  # queries (sequences x heads) in a shared item
_KEYS = 64  # keys per iteration
_WARPS, _STAGES = 2, 5  # for 16-bit dtypes, if that fits: few threads with many loads in flight each
_FILLS = 1320  # equal programs that fill a large GPU a few times; the length of an item follows from it
_LEAST = 512  # tokens of an item, so that combining results costs little compared with reading KV
_FEW = 384  # sequences times KV heads: up to this, fewer and shorter programs are faster
_FILLS_OF_FEW, _LEAST_OF_FEW = 264, 64
_COUNTED = 512  # least COUNT of _divide_decodes: one compiled kernel for almost every batch


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The items of a step's decodes, and buffers for partial results (slots)."""

    # [items, 8]: sequence (-1: padding), first and last key, this item's slot, and the sequence's first slot, number of
    # slots with those of shared items, and number of own items
    items: torch.Tensor
    firsts: torch.Tensor  # [sequences]: first slot
    finished: torch.Tensor  # [sequences, kv_heads]: number of finished items; zero again after each layer
    sums: torch.Tensor  # [slots, heads, dim]
    peaks: torch.Tensor  # [slots, heads, 2]: highest score, sum of weights


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
    """Compute the attention of a batch's decodes, its first slices."""
    work: DecodeWork = batch.decode_work.get(window) or divide_decodes(heads, cache, batch, window)
    batch.decode_work[window] = work
    group, dim = heads // cache.kv_heads, cache.dim
    data, scales = cache.data[layer], cache.data
    if cache.scales is not None:  # codes are loaded in pairs
        data, scales = data.view(torch.int16), cache.scales[layer].view(torch.int16)
    given = (qkv, data, scales, batch.tables, work.sums, work.peaks)
    scale, least = math.log2(math.e) * scoring.scale, 1 if cache.scales is None else 2 * _LEAST_ROWS
    width = max(least, triton.next_power_of_2(dim))
    strides = batch.tables.stride(0), qkv.stride(0), data.stride(0), data.stride(1), data.stride(2)
    fixed: dict[str, Any] = {
        "GROUP": group, "HEADS": heads, "DIM": dim, "WIDTH": width, "BLOCK": cache.block_size,
        "EXACT": qkv.dtype == torch.float32, "CAP": scoring.softcap, "MAX_CODE": MAX_CODES.get(cache.dtype, 0),
        "num_warps": 4, "num_stages": 2, **early(),
    }  # fmt: skip
    if batch.shared is not None:
        shared = batch.shared
        keys = _KEYS // 2 if fixed["EXACT"] else _KEYS
        _attend_shared[(shared.items.shape[0], cache.kv_heads)](
            *given, work.firsts, shared.items, shared.members, scale, *strides, ROWS=_SHARED_ROWS, KEYS=keys, **fixed
        )
    if not fixed["EXACT"] and dim <= 128:
        fixed |= {"num_warps": _WARPS, "num_stages": _STAGES}
    _attend_own[(work.items.shape[0], cache.kv_heads)](
        *given, work.items, work.finished, qkv if scoring.sinks is None else scoring.sinks, out, scale, *strides,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), KEYS=_KEYS, SINKS=scoring.sinks is not None, **fixed,
    )  # fmt: skip


def divide_decodes(heads: int, cache: KvCache, batch: Batch, window: int) -> DecodeWork:
    """Cut the decodes' contexts into items."""
    count, device = batch.decodes, batch.contexts.device
    is_few = count * cache.kv_heads <= _FEW
    items = count + -(-(_FILLS_OF_FEW if is_few else _FILLS) // cache.kv_heads)
    shared = batch.shared
    slots = items + (0 if shared is None else shared.slots)
    work = DecodeWork(
        torch.empty(items, 8, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        torch.zeros(count, cache.kv_heads, dtype=torch.int32, device=device),
        torch.empty(slots, heads, cache.dim, dtype=torch.float32, device=device),
        torch.empty(slots, heads, 2, dtype=torch.float32, device=device),
    )
    prefixes, parts = (batch.contexts, batch.contexts) if shared is None else (shared.prefixes, shared.parts)
    _divide_decodes[(count,)](
        batch.contexts, prefixes, parts, work.items, work.firsts, count, items, window or 1 << 30,
        _LEAST_OF_FEW if is_few else _LEAST, COUNT=max(_COUNTED, triton.next_power_of_2(count)), KEYS=_KEYS,
        SHARED=shared is not None, num_warps=4, **early(),
    )  # fmt: skip
    return work


def members_of_item(heads: int, kv_heads: int) -> int:
    """Return the largest number of sequences in a shared item."""
    return _SHARED_ROWS // (heads // kv_heads)


@triton.jit(do_not_specialize=["count", "items", "window", "least"])
def _divide_decodes(
    contexts_at, prefixes_at, parts_at, items_at, firsts_at, count, items, window, least,
    COUNT: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the items of one sequence; the longest items of all sequences are first, so that programs end together.

    Every program counts the items of the sequences before its own.
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
    # The length of all items but a sequence's last, chosen so that the items fit the list.
    longest = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(length), items - count), KEYS) * KEYS, least)
    own = tl.cdiv(length, longest)
    is_any = own > 0  # an empty context has no item
    more = tl.maximum(own - 1, 0)
    rest = length - more * longest  # length of the last item
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


# The width of the tables differs from step to step: do not compile a kernel per stride.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_own(
    q_at, data_at, scales_at, tables_at, sums_at, peaks_at, items_at, finished_at, sinks_at, out_at, scale,
    table_stride, q_stride, block_stride, side_stride, head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr,
    MAX_CODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one item of one sequence; the sequence's last item to finish combines the results of all its items."""
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
        q_row = q_at + piece.to(tl.int64) * q_stride + query_head * DIM
        table_at = tables_at + piece.to(tl.int64) * table_stride
        peak, total, sums = _pass_over(
            q_row, is_row, data_at, scales_at, table_at, low, high, head, scale, block_stride, side_stride,
            head_stride, DIM, WIDTH, BLOCK, ROWS, KEYS, EXACT, CAP, MAX_CODE, EARLY,
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
            tl.debug_barrier()  # the results must be written before the item counts as finished
            done = tl.atomic_add(finished_at + piece * (HEADS // GROUP) + head, 1)
            if done == own - 1:
                tl.store(finished_at + piece * (HEADS // GROUP) + head, 0)
                _join(sums_at, peaks_at, sinks_at, out_at, piece, head, first, slots, GROUP, HEADS, DIM, WIDTH, SINKS)


# The width of the tables differs from step to step: do not compile a kernel per stride.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_shared(
    q_at, data_at, scales_at, tables_at, sums_at, peaks_at, firsts_at, items_at, members_at, scale,
    table_stride, q_stride, block_stride, side_stride, head_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr, MAX_CODE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the queries of several sequences over a part of their common prefix."""
    item, head = tl.program_id(0), tl.program_id(1)
    wait(EARLY)
    first, members = tl.load(items_at + item * 5), tl.load(items_at + item * 5 + 1)
    if members > 0:
        low, high = tl.load(items_at + item * 5 + 2), tl.load(items_at + item * 5 + 3)
        part = tl.load(items_at + item * 5 + 4)
        row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        is_row, is_column = row < members * GROUP, column < DIM
        piece = tl.load(members_at + first + row // GROUP, mask=is_row, other=0).to(tl.int64)
        any_member = tl.load(members_at + first).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        inside = is_row[:, None] & is_column[None, :]
        q_row = q_at + piece * q_stride + query_head * DIM
        table_at = tables_at + any_member * table_stride
        peak, total, sums = _pass_over(
            q_row, is_row, data_at, scales_at, table_at, low, high, head, scale, block_stride, side_stride,
            head_stride, DIM, WIDTH, BLOCK, ROWS, KEYS, EXACT, CAP, MAX_CODE, EARLY,
        )  # fmt: skip
        slot = tl.load(firsts_at + piece, mask=is_row, other=0) + part
        line = slot * HEADS + query_head
        tl.store(sums_at + line[:, None] * DIM + column[None, :], sums, mask=inside)
        tl.store(peaks_at + line * 2, peak, mask=is_row)
        tl.store(peaks_at + line * 2 + 1, total, mask=is_row)


@triton.jit
def _pass_over(
    q_row, is_row, data_at, scales_at, table_at, low, high, head, scale, block_stride, side_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, CAP: tl.constexpr, MAX_CODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return highest score, sum of weights and weighted values of queries over the unmasked keys low..high.

    Scores are base-2 exponents. MAX_CODE is the largest code of an 8-bit cache, 0 for other dtypes.
    """
    if MAX_CODE:
        peak, total, sums = pass_over_codes(
            q_row, is_row, data_at, scales_at, table_at, low, high, head, scale, block_stride, side_stride,
            head_stride, DIM, WIDTH, BLOCK, ROWS, KEYS, EXACT, CAP, MAX_CODE, EARLY,
        )  # fmt: skip
    else:
        peak, total, sums = _pass_over_numbers(
            q_row, is_row, data_at, table_at, low, high, head, scale, block_stride, side_stride, head_stride, DIM,
            WIDTH, BLOCK, ROWS, KEYS, EXACT, CAP,
        )  # fmt: skip
    return peak, total, sums


@triton.jit
def _pass_over_numbers(
    q_row, is_row, data_at, table_at, low, high, head, scale, block_stride, side_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute _pass_over for keys and values in the dtype of the queries."""
    column, key = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    is_column = column < DIM
    q = tl.load(q_row[:, None] + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
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
        scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
        if CAP > 0:
            scores = capped(scores, CAP)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        rescale = tl.exp2(peak - top)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(at[:, None] + side_stride + column[None, :], mask=inside, other=0)
        sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        peak = top
    return peak, total, sums


@triton.jit
def _join(
    sums_at, peaks_at, sinks_at, out_at, piece, head, first, slots, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the slots of one sequence, for all query heads of one KV head."""
    SLOTS: tl.constexpr = 4 if GROUP <= 4 else 2 if GROUP <= 8 else 1  # per iteration: most sequences have no more
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
        weights, rescale = tl.exp2(peaks - top[None, :]), tl.exp2(peak - top)
        total = total * rescale + tl.sum(totals * weights, 0)
        answer = answer * rescale + tl.sum(sums * weights, 0)
        peak = top
    to = out_at + (piece.to(tl.int64) * HEADS + query_head) * DIM + column
    if SINKS:
        total = with_sink(total, peak, sinks_at + query_head, is_place)
    answer = answer / tl.where(is_place, total, 1.0)
    tl.store(to, answer.to(out_at.dtype.element_ty), mask=is_place)


@triton.jit
def with_sink(total, peak, sinks_at, inside):
    """Return the sum of weights with the sink's weight, relative to `peak`."""
    sink = tl.load(sinks_at, mask=inside, other=0.0) * 1.4426950408889634
    return total + tl.exp2(tl.minimum(sink - peak, 80.0))
