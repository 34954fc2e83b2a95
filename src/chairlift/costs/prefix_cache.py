"""The prefix cache's own cost: microseconds to match, lock, insert and evict, by the number of cached blocks."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from struct import unpack
from time import perf_counter
from typing import Any

from rich.table import Table

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import Node, packed
from chairlift.core.words import counted
from chairlift.report.tables import Columns, number_table

COLUMNS: Columns = (
    ("cached", "cached\nblocks", "{:,}"),
    ("match_us", "match 8,000\ntokens", "{:,.0f}"),
    ("lock_us", "lock\nthem", "{:,.0f}"),
    ("insert_us", "insert\na block", "{:.2f}"),
    ("evict_us", "evict\na block", "{:.2f}"),
)
_BLOCK = 16
_WIDTH = 4 * _BLOCK  # bytes of a block's tokens


@dataclass(frozen=True, slots=True)
class CostRow:
    """Median times in microseconds."""

    cached: int  # blocks: the cache is full
    match_us: float  # to match a fully cached prompt, from its list of tokens
    lock_us: float  # to share the matched blocks with a sequence
    insert_us: float  # to insert one block
    evict_us: float  # to evict and allocate one block


def run(
    cached: Sequence[int] = (1000, 10_000, 100_000, 1_000_000),
    *,
    prompt: int = 8000,
    repeat: int = 100,
    notice: Callable[[str], None] = lambda text: None,
) -> list[CostRow]:
    """Time the engine's prefix cache, full of random prompts of `prompt` tokens.

    >>> [row.cached for row in run((4, 8), prompt=32, repeat=2)]
    [4, 8]
    """
    rows = []
    for blocks in cached:
        notice(f"{counted(blocks, 'cached block')}")
        with _without_collection():
            rows.append(_measure(blocks, prompt, repeat))
    return rows


def _measure(blocks: int, prompt: int, repeat: int) -> CostRow:
    length = prompt // _BLOCK  # of a prompt, in blocks
    count = blocks // length
    pool = BlockPool(count * length, _BLOCK)
    cache = PrefixCache(pool)
    for number in range(count):
        _add(pool, cache, _key(number, length))
    r = Random(0)
    matches, locks = [], []
    for _ in range(repeat):
        tokens = list(unpack(f"{length * _BLOCK}i", _key(r.randrange(count), length)))
        began = perf_counter()
        path: list[Node] = []
        cache.match(path, "", packed(tokens), length)
        found = perf_counter()
        table = BlockTable()
        pool.share(table, [node.block for node in path])
        locked = perf_counter()
        assert len(path) == length, "the whole prompt is cached"
        matches.append(found - began)
        locks.append(locked - found)
        pool.release(table)
    assert not pool.free, "each allocation from now on must evict a block"
    evictions, inserts = zip(
        *(_add(pool, cache, _key(count + number, length)) for number in range(repeat)), strict=True
    )
    return CostRow(
        count * length,
        match_us=median(matches) * 1e6,
        lock_us=median(locks) * 1e6,
        insert_us=median(inserts) * 1e6,
        evict_us=median(evictions) * 1e6,
    )


def _key(number: int, length: int) -> bytes:
    """Return a random prompt, a function of `number`, with realistic token ids."""
    return array("i", array("H", Random(number).randbytes(2 * length * _BLOCK))).tobytes()


def _add(pool: BlockPool, cache: PrefixCache, key: bytes) -> tuple[float, float]:
    """Cache a prompt; return the seconds per block to allocate and to insert."""
    table = BlockTable()
    began = perf_counter()
    pool.grow(table, len(key) // 4)
    allocated = perf_counter()
    node = cache.root("")
    for place, block in enumerate(table.blocks):
        kept = cache.insert(node, key[place * _WIDTH : (place + 1) * _WIDTH], block)
        assert kept is not None, "all prompts are different"
        node = kept
    ended = perf_counter()
    count = len(table.blocks)
    pool.release(table)
    return (allocated - began) / count, (ended - allocated) / count


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: there is no garbage, and a pause would distort a timed operation."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def cost_table(costs: Sequence[dict[str, Any]]) -> Table:
    """Return the table, with a row for each number of cached blocks."""
    return number_table("the prefix cache, microseconds", COLUMNS, [((), row) for row in costs])
