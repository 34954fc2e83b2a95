"""How well the prefix cache does on a recorded trace, beside other rules of eviction and the best one there can be.

The cache alone is simulated: requests come in the order of the trace, each finds the longest prefix of its blocks that
is cached, adds the others, and lets all go before the next one comes. There are no service times and no answers.
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
from chairlift.core.prefix_cache import Node, PrefixCache, packed
from chairlift.core.words import counted
from chairlift.report.numbers import rounded
from chairlift.report.tables import table
from chairlift.simulation.eviction import RIVALS, Clairvoyant, Eviction
from chairlift.traffic.traces import BLOCK_TOKENS, read_trace, with_blocks

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of a trace's distinct blocks that a cache has room for
OURS = "LRU"
_TELL = 256  # requests between two signs of progress
_FORMAT = 'each line must be as {"timestamp": 0, "hash_ids": [0, 1, 2]}, one id for each block of the prompt'

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, each the path of its blocks in the tree of all prefixes."""

    name: str
    paths: list[list[int]]
    distinct: int  # blocks are numbered from 0 to here

    @property
    def blocks(self) -> int:
        """Blocks of all requests."""
        return sum(map(len, self.paths))

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return max(map(len, self.paths))


@dataclass(frozen=True, slots=True)
class SizeRow:
    """How many blocks were found in a cache of one size."""

    size: int
    optimum: int
    hits: dict[str, int]


def make_trace(name: str, requests: Iterable[Sequence[int]]) -> Trace:
    """Number the blocks by the way that leads to them, so that equal numbers are equal prefixes.

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
    """Cache sizes in blocks, each large enough for the longest request."""
    return sorted({max(trace.longest, round(share * trace.distinct)) for share in shares})


def run(trace: Trace, sizes: Sequence[int], notice: Callable[[str], None], advance: Advance) -> list[SizeRow]:
    """The hits of every rule and of the optimum in each size; `advance` hears `work(trace, sizes)` requests."""
    rows = []
    for size in sizes:
        hits = {}
        notice(f"{counted(size, 'block')}, {OURS}")
        hits[OURS] = engine_hits(trace, size, advance)
        for name, rule in RIVALS.items():
            notice(f"{counted(size, 'block')}, {name}")
            hits[name] = hits_of(trace, size, rule(size), advance)
        notice(f"{counted(size, 'block')}, the optimum")
        rows.append(SizeRow(size, optimum(trace, size, advance), hits))
    return rows


def work(trace: Trace, sizes: Sequence[int]) -> int:
    """Requests that `run` goes through."""
    return len(trace.paths) * len(sizes) * (len(RIVALS) + 2)


def infinite(trace: Trace) -> int:
    """Hits of a cache without a limit: every block that has come before."""
    return trace.blocks - trace.distinct


def optimum(trace: Trace, size: int, advance: Advance = lambda _: None) -> int:
    """Hits of the best choices there are, made with all that follows in sight (Belady).

    A request must have all its blocks at once; which of the others to give up decides the hits to come. The one whose
    next use is farthest ahead is never the wrong one, as in any cache of equal pages: choices that keep it and give up
    another can be changed to keep that other, and miss no more. A parent's next use is never later than its child's, so
    this is a leaf, and the best rule that may take any block is also the best that may take only leaves.
    """
    return hits_of(trace, size, Clairvoyant(_next_uses(trace)), advance)


def _next_uses(trace: Trace) -> list[list[float]]:
    """For each block of each request, the number of the next request with it."""
    following: list[float] = [inf] * trace.distinct
    found: list[list[float]] = []
    for number in range(len(trace.paths) - 1, -1, -1):
        path = trace.paths[number]
        found.append([following[block] for block in path])
        for block in path:
            following[block] = number
    return found[::-1]


def hits_of(trace: Trace, size: int, rule: Eviction, advance: Advance = lambda _: None) -> int:
    """Blocks found in a cache of `size` under a rule of eviction."""
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
    """The same of the engine's own cache: a block of the trace is one of a single token there."""
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
            assert kept is not None, "it was not found, so nobody has kept it"
            node = kept
        pool.release(table)
        if number % _TELL == 0:
            advance(_TELL)
    advance(len(trace.paths) % _TELL)
    return hits


# ---- what was found


def summarize(trace: Trace, rows: Sequence[SizeRow]) -> dict[str, Any]:
    """All numbers; hits are blocks."""
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
    """A row for each rule of eviction, a column for each size: the share of blocks found, and of the gap closed."""
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
        "blocks found, of all that were asked for; of what the optimum finds; of the gap from LRU to it, closed\n"
        f"a cache without a limit finds {most / max(1, blocks):.1%}; requests come one after the other",
    )


def _cell(row: dict[str, Any], name: str, blocks: int) -> str:
    hits, best, ours = row["hits"][name], row["optimum"], row["hits"][OURS]
    text = f"{hits / blocks:.1%}  {hits / max(1, best):4.0%}"
    return text if name == OURS else f"{text}  {(hits - ours) / max(1, best - ours):+5.0%}"
