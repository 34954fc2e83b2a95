"""A look at an engine's cache, queue and counters, as plain numbers and words for JSON; it changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from chairlift.core.explain import explain_head
from chairlift.core.preemption import Swap
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.shared_prefixes import largest_prefixes

MAP_CELLS = 2048  # of the map of blocks
QUEUE, TENANTS, PREFIXES = 12, 16, 6  # entries of each list


def look_at(scheduler: Scheduler, name_of: Callable[[Request], str], now: float, epoch: float) -> dict[str, Any]:
    """Describe the cache, the queue and the counters; `at` is in microseconds since the epoch."""
    pool, count = scheduler.pool, scheduler.counters
    cells, every = pool.states(MAP_CELLS)
    cache, speculation = scheduler.memory.prefix_cache, scheduler.planner.speculation
    drafts = None if speculation is None else speculation.counts
    return {
        "at": int((now - epoch) * 1e6),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "blocked_by": scheduler.planner.blocked_by,
        "blocks": [pool.free, pool.cached, pool.owned],
        "map": cells.decode(),  # BlockPool.states: a digit for one block of `every`
        "every": every,
        "tiers": _tiers(scheduler),
        "counts": [count.submitted, count.finished, count.aborted, count.rejected, count.failed, count.preemptions],
        "prompt_tokens": count.prompt_tokens,
        "cached_tokens": count.cached_tokens,
        "evictions": 0 if cache is None else cache.evictions,
        "has_cache": cache is not None,
        "drafts": None if drafts is None else [sum(drafts.drafted), sum(drafts.accepted)],
        "prefixes": _prefixes(scheduler),
        "queue": _queue(scheduler, name_of, now),
        "tenants": _tenants(scheduler),
    }


def _tiers(scheduler: Scheduler) -> list[list[Any]]:
    """Return host memory and disk: name, swapped-out blocks, cached blocks, all blocks."""
    memory = scheduler.memory
    shelves = [] if memory.prefix_cache is None else memory.prefix_cache.shelves
    if not shelves and isinstance(memory.preemption, Swap) and memory.preemption.host.total:
        shelves = [memory.preemption.host]
    return [
        [name, shelf.owned, shelf.cached, shelf.total] for name, shelf in zip(("host", "disk"), shelves, strict=False)
    ]


def _prefixes(scheduler: Scheduler) -> list[list[Any]]:
    """Return the largest cached prefixes: tenant, tokens, continuations, sequences that hold its last block."""
    cache, pool = scheduler.memory.prefix_cache, scheduler.pool
    found = [] if cache is None else largest_prefixes(cache, PREFIXES)
    return [
        [
            *(each.salt.partition("/")[0], each.blocks * pool.block_size, each.branches),
            pool.holders(each.node.block) if each.node.block >= 0 else 0,
        ]
        for each in found
    ]


def _queue(scheduler: Scheduler, name_of: Callable[[Request], str], now: float) -> list[list[Any]]:
    """Return the head of the queue: id, index, tenant, prompt tokens, place, wait, priority, preemptions, sentences."""
    if not len(scheduler.waiting):
        return []
    return [
        [
            *(name_of(sequence.request), sequence.index, each.tenant, each.prompt_tokens, each.ahead, each.seconds),
            *(sequence.request.priority, each.preemptions, each.why[:-1]),  # the last one repeats the wait
        ]
        for sequence, each in explain_head(scheduler, QUEUE, now)
    ]


def _tenants(scheduler: Scheduler) -> list[list[Any]]:
    """Return the running and waiting sequences of the tenants with the most."""
    waiting = Counter(each.request.tenant for each in scheduler.waiting)
    running = Counter(each.request.tenant for each in scheduler.running)
    most = (waiting + running).most_common(TENANTS)
    return [[tenant, running[tenant], waiting[tenant]] for tenant, _ in most]
