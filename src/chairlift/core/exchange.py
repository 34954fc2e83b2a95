"""Exchange: KV blocks that come from other processes, and evicted blocks that go to a store outside this one.

The content of both is in memory outside the pool, in numbered slots: a connector fills the slots of blocks that have
arrived, and the next step copies them into the pool, where the prefix cache finds them. Nothing waits for them: what
has not arrived, or has been evicted again, is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.core.prefix_node import Node


class Arrived(NamedTuple):
    """Consecutive blocks of one prompt, in slots outside the pool."""

    salt: str
    key: bytes  # the packed tokens of the prompt, up to the end of the last block
    first: int  # number of the first block
    slots: Sequence[int]


class Departing(NamedTuple):
    """An evicted block that a step copies to a slot outside the pool."""

    salt: str
    key: bytes  # the packed tokens from the start of the prompt to the end of the block
    slot: int


class Exchange:
    """The blocks on their way into and out of the pool; connectors in other threads may add to both deques."""

    def __init__(self) -> None:
        self.arrived: deque[Arrived] = deque()
        self.read: list[int] = []  # slots of arrived blocks that no step needs any more
        self.taken = 0  # arrived blocks that entered the pool
        self.free: deque[int] = deque()  # slots for evicted blocks; none: evicted blocks are not kept
        self.written: list[Departing] = []  # evicted blocks that finished steps have copied to their slots


def key_of(node: Node) -> tuple[str, bytes]:
    """Return the salt and the packed tokens that lead to a node, its own included."""
    chunks = []
    at: Node = node
    while at.parent is not None:
        chunks.append(at.chunk)
        at = at.parent
    return at.chunk.decode(), b"".join(reversed(chunks))
