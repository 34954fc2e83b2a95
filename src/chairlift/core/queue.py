"""The waiting queue: lanes in the policy's order. Its cost per step does not depend on its length."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from chairlift.core.policy import Lane, Policy
from chairlift.core.request import Phase, Sequence

Entry = tuple[tuple[float, int, int], Sequence]
_FULL_FIRST = 4  # consecutive batches from full lanes while the policy would choose another lane


class WaitingQueue:
    """Waiting groups in lanes, by the rank of their first sequence; one that ends is a dead entry until it is first."""

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()
        # Ranks are unique among those waiting, so that the sequence itself is never compared.
        self._lanes: dict[Lane, list[Entry]] = {}
        self._size = 0
        self._entries = 0  # in all heaps, dead entries included
        self._has_moved = False
        self._kept: list[Lane] = []  # the only lane to admit from, if there is one
        self._passed = 0  # consecutive batches that were not admitted from the lane of the policy's choice

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, in no order."""
        heads = (head for heap in self._lanes.values() for _, head in heap if head.phase is Phase.WAITING)
        return (sequence for head in heads for sequence in head.group.members)

    def push(self, sequence: Sequence, now: float = 0.0) -> None:
        """Add the group of a sequence, which is its first in rank order."""
        heappush(self._lanes.setdefault(self._policy.lane(sequence, now), []), (sequence.rank, sequence))
        self._size += len(sequence.group.members)
        self._entries += 1

    def peek(self, now: float = 0.0) -> Sequence | None:
        """Return the first sequence of the group to admit next, if any."""
        self._has_moved = True
        while self._has_moved:  # a sequence that changes lanes may be first in a lane that was looked at already
            self._has_moved = False
            lanes = self._kept or list(self._lanes)
            heads = {lane: head for lane in lanes if (head := self._head(lane, now)) is not None}
        if not heads:
            return None
        if self._kept:
            return heads[self._kept[0]]
        return heads[self._policy.choose(heads, now)]  # even for a single lane: policies count their choices

    def take(self, sequence: Sequence) -> None:
        """Remove the group that `peek` has just returned."""
        for heap in self._lanes.values():
            if heap and heap[0][1] is sequence:
                heappop(heap)
                self._size -= len(sequence.group.members)
                self._entries -= 1
                return
        raise AssertionError(f"{sequence} is first in no lane")

    def largest(self) -> int:
        """Return how many waiting sequences count towards a full batch: all, or those of the fullest lane.

        At least half of all count: where twice as many wait as fill a batch, no single lane need ever fill one.
        """
        if not self._policy.fills_by_lane:
            return self._size
        lanes = (sum(each.phase is Phase.WAITING for _, each in heap) for heap in self._lanes.values())
        return max(self._size // 2, *lanes, 0)

    def keep_lane(self, rows: int, now: float) -> None:
        """Admit from one lane only from now on: one that fills the batch if there is any, or the policy's choice.

        After a few full lanes in a row it is the policy's choice in any case, or a lane that never fills would starve.
        """
        self._kept = []
        if self._policy.fills_by_lane and (head := self.peek(now)) is not None:
            full = [lane for lane, heap in self._lanes.items() if len(heap) >= rows]
            heads = {lane: first for lane in full if (first := self._head(lane, now)) is not None}
            chosen = self._policy.lane(head, now)
            if heads and chosen not in heads and self._passed < _FULL_FIRST:
                self._passed += 1
                chosen = min(heads, key=lambda lane: heads[lane].order)
            else:
                self._passed = 0
            self._kept = [chosen]

    def forget(self, count: int) -> None:
        """Subtract `count` sequences that ended while they waited."""
        self._size -= count
        if self._entries > 64 and self._size < self._entries // 2:
            self._rebuild()

    def rekey(self) -> None:
        """Sort again after the policy's keys have changed."""
        for heap in self._lanes.values():
            for _, sequence in heap:
                if sequence.phase is Phase.WAITING:
                    key = self._policy.key(sequence)
                    for each in sequence.group.members:  # one key, so that they are neighbours in the batch
                        each.rank = (key, each.order, each.index)
        self._rebuild()

    def _rebuild(self) -> None:
        for lane, heap in list(self._lanes.items()):
            alive = [(sequence.rank, sequence) for _, sequence in heap if sequence.phase is Phase.WAITING]
            heapify(alive)
            self._lanes[lane] = alive
            if not alive:
                del self._lanes[lane]
        self._entries = sum(map(len, self._lanes.values()))

    def _head(self, lane: Lane, now: float) -> Sequence | None:
        """Return the first sequence of a lane; remove dead entries, and move those that now belong to another lane."""
        heap = self._lanes.get(lane, [])
        while heap:
            rank, sequence = heap[0]
            if sequence.phase is not Phase.WAITING:
                heappop(heap)
                self._entries -= 1
                continue
            belongs = self._policy.lane(sequence, now)
            if belongs == lane:
                return sequence
            heappop(heap)
            self._has_moved = True
            heappush(self._lanes.setdefault(belongs, []), (rank, sequence))
        self._lanes.pop(lane, None)
        return None
