"""Fetching: requests that wait for blocks of the KV store, no longer than computing these would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chairlift.core.constraint import Constraint
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_node import Node, packed
from chairlift.core.scheduler import Scheduler
from chairlift.serving.link import Link
from chairlift.serving.messages import Submit

if TYPE_CHECKING:
    from chairlift.cluster.kv_store.store import KvStore

_RATE = 0.1  # share of a step in the mean
_PROMPT = 32  # tokens of a step that tells how long a prompt takes


class Waiting(NamedTuple):
    """A request that is not submitted yet."""

    link: Link
    name: str
    order: Submit
    constraint: Constraint | None


class Fetching:
    """Looks for the blocks of prompts in the store, and gives it the blocks that steps have evicted."""

    def __init__(self, store: KvStore, scheduler: Scheduler, token_seconds: float) -> None:
        self._store, self._scheduler = store, scheduler
        self._token_seconds = token_seconds  # to compute a prompt's token, from steps with prompts
        self._waiting: dict[str, Waiting] = {}

    @property
    def reader(self) -> int:
        """A descriptor that is readable when blocks have been fetched."""
        return self._store.reader

    @property
    def sent(self) -> int:
        """Blocks stored so far."""
        return self._store.stored

    @property
    def wait(self) -> float | None:
        """Seconds until a request has waited long enough; None if none waits."""
        return self._store.wait

    def begin(self, waiting: Waiting) -> bool:
        """Look for the blocks of a request that the prefix cache lacks; whether the request waits for them."""
        order, cache = waiting.order, self._scheduler.memory.prefix_cache
        if cache is None or order.params.prompt_logprobs is not None:
            return False
        size = self._scheduler.pool.block_size
        most = (len(order.prompt) - 1) // size
        if not most:
            return False
        key = packed(order.prompt[: most * size])
        path: list[Node] = []
        cache.match(path, order.salt, key, most)
        seconds = self._token_seconds * (most - len(path)) * size
        if not self._store.fetch(waiting.name, order.salt, key, len(path), seconds):
            return False
        self._waiting[waiting.name] = waiting
        return True

    def abort(self, name: str) -> None:
        """Forget a request."""
        if self._waiting.pop(name, None) is not None:
            self._store.abort(name)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step how long prompts take."""
        if plan.tokens >= len(plan.sequences) + _PROMPT:
            self._token_seconds += _RATE * (seconds / plan.tokens - self._token_seconds)

    def settle(self) -> list[Waiting]:
        """Store what steps have evicted; return the requests that need not wait any more."""
        exchange = self._scheduler.memory.prefixes.exchange
        if exchange.written:
            written, exchange.written = exchange.written, []
            self._store.store(written)
        return [found for name in self._store.take_ready() if (found := self._waiting.pop(name, None)) is not None]
