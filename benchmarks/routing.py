"""Replay a trace over replicas with simulated caches and the real routing code: prefix hits and balance per policy.

    python benchmarks/routing.py TRACE.jsonl [--replicas 4] [--cache 0.05] [--speed 1.0]

The trace is in Mooncake's format (timestamp, input_length, output_length, hash_ids: one id per block of 512 tokens,
equal ids are equal prefixes). A simulated replica prefills one prompt after the other at a constant rate, then streams
the answer; its cache evicts the least recently used leaves. `one cache` is the bound for any routing: a single cache of
the total size that all replicas share.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.report.numbers import percentile
from chairlift.routing.policies import POLICIES, Ask
from chairlift.routing.router import Route, Router

BLOCK = 512  # tokens
PREFILL = 20_000.0  # tokens a second
STEP = 0.03  # seconds a token of an answer


@dataclass(frozen=True, slots=True)
class Query:
    """A request of the trace."""

    at: float
    prompt: int
    output: int
    blocks: list[int]


class Cache:
    """The prefix cache of a replica: a path's blocks are touched from the last to the first, so leaves are oldest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, blocks: list[int]) -> int:
        """Return the number of cached leading blocks, then cache all."""
        hits = next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return hits


@dataclass(slots=True)
class Replica:
    """A simulated replica."""

    cache: Cache
    free_at: float = 0.0  # when its last prefill ends
    computed: int = 0  # prompt tokens
    live: int = 0
    hits: int = 0  # blocks


@dataclass(slots=True)
class Result:
    """What a policy did with the trace."""

    hits: int = 0
    blocks: int = 0
    first_tokens: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # most live requests of a replica / mean, at each arrival
    computed: list[int] = field(default_factory=list)  # tokens per replica


def replay(queries: list[Query], policy: str, replicas: int, capacity: int) -> Result:
    """Run the trace through the routing policy."""
    names = [str(number) for number in range(replicas)]
    router = Router(names, policy, capacity=capacity)
    pool = {name: Replica(Cache(capacity)) for name in names}
    result, events = Result(), list[tuple[float, int, str, Route]]()
    for number, query in enumerate(queries):
        while events and events[0][0] <= query.at:
            _, _, what, route = heapq.heappop(events)
            if what == "first":
                route.started()
            else:
                route.end("finished")
                pool[route.name].live -= 1
        route = router.route(Ask(query.prompt, query.blocks, str(query.blocks[:2]), BLOCK))
        assert route is not None
        chosen = pool[route.name]
        hits = chosen.cache.take(query.blocks)
        computed = max(1, query.prompt - BLOCK * hits)
        chosen.free_at = max(chosen.free_at, query.at) + computed / PREFILL
        chosen.computed += computed
        chosen.live += 1
        heapq.heappush(events, (chosen.free_at, 2 * number, "first", route))
        heapq.heappush(events, (chosen.free_at + STEP * query.output, 2 * number + 1, "end", route))
        result.hits += hits
        result.blocks += len(query.blocks)
        result.first_tokens.append(chosen.free_at - query.at)
        live = [each.live for each in pool.values()]
        result.spreads.append(max(live) * replicas / sum(live))
    result.computed = [each.computed for each in pool.values()]
    return result


def read(file: Path, speed: float) -> list[Query]:
    """Read the trace, played `speed` times as fast as it was recorded."""
    rows = map(json.loads, file.read_text().splitlines())
    return [Query(r["timestamp"] / 1000 / speed, r["input_length"], r["output_length"], r["hash_ids"]) for r in rows]


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--cache", type=float, default=0.05, help="a replica's cache, as a share of distinct blocks")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than recorded requests arrive")
    given = parser.parse_args()
    queries = read(given.trace, given.speed)
    distinct = len({block for query in queries for block in query.blocks})
    capacity = max(max(len(query.blocks) for query in queries), round(given.cache * distinct))
    total = sum(len(query.blocks) for query in queries)
    print(f"{len(queries):,} requests, {total:,} blocks, {distinct:,} distinct; {given.replicas} replicas, each with")
    print(f"{capacity:,} blocks of cache; an unlimited cache would hit {1 - distinct / total:.1%}")
    one = Cache(capacity * given.replicas)
    print(f"{'one cache':14} hits {sum(one.take(query.blocks) for query in queries) / total:6.1%}")
    for policy in POLICIES:
        found = replay(queries, policy, given.replicas, capacity)
        mean = sum(found.computed) / given.replicas
        p50, p99 = (percentile(found.first_tokens, mark) for mark in (50, 99))
        spread = math.fsum(found.spreads) / len(found.spreads)
        print(
            f"{policy:14} hits {found.hits / found.blocks:6.1%}  computed max/mean {max(found.computed) / mean:.3f}  "
            f"live max/mean {spread:.3f}  first token p50 {p50:.2f} s, p99 {p99:.2f} s"
        )


if __name__ == "__main__":
    main()
