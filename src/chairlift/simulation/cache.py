"""The prefix cache's hit rate on a recorded trace, beside other eviction rules and the optimal one.

Only the cache is simulated: requests run in the order of the trace; each matches the longest cached prefix of its
blocks, inserts the others, and releases all before the next request. There are no service times and no answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from rich.table import Table

from chairlift.core.blocks import BlockPool, BlockTable
from chairlift.core.errors import ChairliftError
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import Node, packed
from chairlift.core.words import counted
from chairlift.report.numbers import rounded
from chairlift.report.tables import table
from chairlift.simulation.eviction import RULES, Clairvoyant, Eviction
from chairlift.traffic.traces import BLOCK_TOKENS, read_trace, with_blocks

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)  # cache sizes, as shares of a trace's distinct blocks
OURS = "LRU"
_TELL = 256  # requests between progress updates
_FORMAT = 'each line must be as {"timestamp": 0, "hash_ids": [0, 1, 2]}, one id for each block of the prompt'

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, each as the path of its blocks in the tree of all prefixes."""

    name: str
    paths: list[list[int]]
    distinct: int  # number of distinct blocks; block ids are below it

    @property
    def blocks(self) -> int:
        """The total of all requests' blocks."""
        return sum(map(len, self.paths))

    @property
    def longest(self) -> int:
        """The blocks of the longest request."""
        return max(map(len, self.paths))


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Hits, in blocks, of each rule in a cache of one size."""

    size: int
    optimum: int
    hits: dict[str, int]


def make_trace(name: str, requests: Iterable[Sequence[int]]) -> Trace:
    """Number the blocks by their path from the root, so that equal numbers mean equal prefixes.

    >>> make_trace("two chats", [[7, 8], [9, 8]]).paths
    [[0, 1], [2, 3]]
    """
    numbers: dict[tuple[int, int], int] = {}
    paths = []
    for ids in requests:
        path: list[int] = []
        for block in ids:
            path.append(numbers.setdefault((path[-1] if path else -1, block), len(numbers)))
        paths.append(path)
    return Trace(name, paths, len(numbers))


def read_paths(file: Path) -> Trace:
    """Read a trace in Mooncake's format: lines of JSON with a timestamp and hash_ids."""
    trace = make_trace(file.name, (query.blocks for query in read_trace(file, with_blocks, "request", f"; {_FORMAT}")))
    if not trace.distinct:
        raise ChairliftError(f"{file} holds no request with a block: {_FORMAT}")
    return trace


def sizes_of(trace: Trace, shares: Sequence[float] = SHARES) -> list[int]:
    """Return cache sizes in blocks, each large enough for the longest request."""
    return sorted({max(trace.longest, round(share * trace.distinct)) for share in shares})


def run(trace: Trace, sizes: Sequence[int], notice: Callable[[str], None], advance: Advance) -> list[SizeRow]:
    """Return the hits of every rule and of the optimum in each size; `advance` counts up to `work(trace, sizes)`."""
    rows = []
    for size in sizes:
        hits = {}
        notice(f"{counted(size, 'block')}, {OURS}")
        hits[OURS] = engine_hits(trace, size, advance)
        for name, rule in RULES.items():
            notice(f"{counted(size, 'block')}, {name}")
            hits[name] = hits_of(trace, size, rule(size), advance)
        notice(f"{counted(size, 'block')}, the optimum")
        rows.append(SizeRow(size, optimum(trace, size, advance), hits))
    return rows


def work(trace: Trace, sizes: Sequence[int]) -> int:
    """Return the number of requests that `run` simulates."""
    return len(trace.paths) * len(sizes) * (len(RULES) + 2)


def infinite(trace: Trace) -> int:
    """Return the hits of an unlimited cache: all repeated blocks."""
    return trace.blocks - trace.distinct


def optimum(trace: Trace, size: int, advance: Advance = lambda _: None) -> int:
    """Return the hits of optimal eviction, which knows all later requests (Belady).

    A request needs all its blocks at once; which other blocks are evicted decides the later hits. Evicting the block
    with the farthest next use is optimal, as in any cache of equal pages: choices that keep it and evict another block
    can be changed to keep that block, and miss no more. A parent's next use is never later than its child's, so this
    block is a leaf, and the best rule that may evict any block is also the best that may evict only leaves.
    """
    return hits_of(trace, size, Clairvoyant(_next_uses(trace)), advance)


def _next_uses(trace: Trace) -> list[list[float]]:
    """Return, for each block of each request, the number of the next request with that block."""
    following: list[float] = [inf] * trace.distinct
    found: list[list[float]] = []
    for number in range(len(trace.paths) - 1, -1, -1):
        path = trace.paths[number]
        found.append([following[block] for block in path])
        for block in path:
            following[block] = number
    return found[::-1]


def hits_of(trace: Trace, size: int, rule: Eviction, advance: Advance = lambda _: None) -> int:
    """Return the hits in a cache of `size` blocks under an eviction rule."""
    is_cached = bytearray(trace.distinct)
    room, hits = size, 0
    for number, path in enumerate(trace.paths, 1):
        found = next((place for place, block in enumerate(path) if not is_cached[block]), len(path))
        hits += found
        for block in path[:found]:
            rule.remove(block)
        for block in path[found:]:
            if room:
                room -= 1
            else:
                is_cached[rule.pop()] = False
            is_cached[block] = True
            rule.keep(block, block)
        rule.use(path)
        for block in reversed(path):
            rule.add(block)
        if number % _TELL == 0:
            advance(_TELL)
    advance(len(trace.paths) % _TELL)
    return hits


def engine_hits(trace: Trace, size: int, advance: Advance = lambda _: None) -> int:
    """Return the hits of the engine's own prefix cache, with each block of the trace as a block of one token."""
    pool = BlockPool(size, block_size=1)
    cache = PrefixCache(pool)
    hits = 0
    for number, path in enumerate(trace.paths, 1):
        key = packed(path)
        found: list[Node] = []
        cache.match(found, "", key, len(path))
        hits += len(found)
        table = BlockTable()
        pool.share(table, [node.block for node in found])
        pool.grow(table, len(path))
        node = found[-1] if found else cache.root("")
        for place in range(len(found), len(path)):
            kept = cache.insert(node, key[4 * place : 4 * place + 4], table.blocks[place])
            assert kept is not None, "the block was not found, so it is not in the cache"
            node = kept
        pool.release(table)
        if number % _TELL == 0:
            advance(_TELL)
    advance(len(trace.paths) % _TELL)
    return hits


# ---- results


def summarize(trace: Trace, rows: Sequence[SizeRow]) -> dict[str, Any]:
    """Return all numbers; hits are blocks."""
    return {
        "name": trace.name,
        "requests": len(trace.paths),
        "blocks": trace.blocks,
        "distinct": trace.distinct,
        "block_tokens": BLOCK_TOKENS,
        "infinite": infinite(trace),
        "sizes": [asdict(row) for row in rows],
    }


def trace_table(trace: dict[str, Any]) -> Table:
    """Return the table: a row per eviction rule, a column per size: hit rate, share of the optimum, gap closed."""
    most, blocks, sizes = trace["infinite"], trace["blocks"], trace["sizes"]
    columns = [
        f"{counted(row['size'], 'block')}\n{rounded(row['size'] * trace['block_tokens'])} tokens, "
        f"{row['size'] / trace['distinct']:.0%}"
        for row in sizes
    ]
    best = [f"{row['optimum'] / blocks:.1%}, {row['optimum'] / max(1, most):.0%} of no limit" for row in sizes]
    return table(
        f"{trace['name']}: {counted(trace['requests'], 'request')}, {counted(blocks, 'block')} of "
        f"{counted(trace['block_tokens'], 'token')}, {trace['distinct']:,} of them distinct",
        ("cache", *columns),
        [
            *((name, *(_cell(row, name, blocks) for row in sizes)) for name in sizes[0]["hits"]),
            None,
            ("optimum", *best),
        ],
        "hits, as a share of all blocks; of the optimum's hits; of the gap between LRU and the optimum\n"
        f"an unlimited cache hits {most / max(1, blocks):.1%}; requests run one after the other",
    )


def _cell(row: dict[str, Any], name: str, blocks: int) -> str:
    hits, best, ours = row["hits"][name], row["optimum"], row["hits"][OURS]
    text = f"{hits / blocks:.1%}  {hits / max(1, best):4.0%}"
    return text if name == OURS else f"{text}  {(hits - ours) / max(1, best - ours):+5.0%}"
