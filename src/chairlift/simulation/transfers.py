"""Transfers: KV blocks between simulated replicas, timed by their bytes on a link, and the calls that follow them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from chairlift.simulation.replica import Hardware, Replica
from chairlift.traffic.query import Query

MESSAGE = 0.5e-3  # seconds from the last block's arrival to the request's: assumed, not measured


class Transfers:
    """The links of prefill replicas, one each, and their future deliveries."""

    def __init__(self, hardware: Hardware, replicas: int) -> None:
        self.block_bytes = hardware.block_size * hardware.kv_bytes
        self.link = hardware.link
        self.free_at = [0.0] * replicas  # when each replica's link has sent the blocks before
        self._waiting: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    @property
    def waiting(self) -> bool:
        """Whether there are future deliveries."""
        return bool(self._waiting)

    @property
    def next_at(self) -> float:
        """The time of the next delivery."""
        return self._waiting[0][0]

    def deliver(self) -> None:
        """Make the next delivery."""
        moment, _, then = heappop(self._waiting)
        then(moment)

    def add(self, moment: float, then: Callable[[float], None]) -> None:
        """Schedule a delivery."""
        self._count += 1
        heappush(self._waiting, (moment, self._count, then))


class Moved:
    """A prompt with blocks sent as they are computed, like the server's."""

    def __init__(
        self, transfers: Transfers, sender: int, computing: Replica, decoding: Replica, number: int, query: Query
    ) -> None:
        self._transfers = transfers
        self._sender = sender
        self._computing = computing
        self._decoding = decoding
        self._number, self._query = number, query
        self._blocks = 0  # sent
        self._arrival = 0.0  # of the last one
        self.bytes = 0

    def computed(self, tokens: int) -> None:
        """Send the blocks that the first `tokens` tokens fill, after earlier ones on the same link."""
        transfers, decoding = self._transfers, self._decoding
        blocks = range(self._blocks, tokens // decoding.engine.scheduler.pool.block_size)
        if not blocks:
            return
        size = len(blocks) * transfers.block_bytes
        start = max(self._computing.clock.now(), transfers.free_at[self._sender])
        self._arrival = transfers.free_at[self._sender] = start + size / transfers.link
        self._blocks = blocks.stop
        self.bytes += size
        transfers.add(self._arrival, lambda _: decoding.take_in(self._number, self._query, blocks))

    def end(self, then: Callable[[float], None]) -> None:
        """Call a function when the last block has arrived and the request has been sent after it."""
        self._transfers.add(max(self._arrival, self._computing.clock.now()) + MESSAGE, then)
