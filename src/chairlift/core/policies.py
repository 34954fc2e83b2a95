"""Who goes next, who yields: the policies a user can choose, each a few rules on top of first come, first served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2

from chairlift.core.cost import Cost
from chairlift.core.policy import Lane, Policy
from chairlift.core.predictor import Predictor
from chairlift.core.request import Sequence


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a policy may be built on."""

    predictor: Predictor
    cost: Cost
    seats: int
    aging: float | None = None  # what a second of waiting is worth; None: the policy's own


class Fcfs(Policy):
    """First come, first served: the oldest goes first, the youngest yields; nobody starves."""

    is_in_order = True

    def __init__(self, known: Knowledge | None = None) -> None:
        pass


class Priority(Policy):
    """Higher priority first, and at once: a lower one yields its seat. Strict: low ones starve unless they age.

    With aging, every second of waiting counts as so many levels in the queue, though never to take a seat from anybody.
    """

    is_preemptive = True

    def __init__(self, known: Knowledge) -> None:
        self._aging = known.aging or 0.0

    def key(self, sequence: Sequence) -> float:
        """All age at one rate, so that the order of two never changes: what counts is who came when."""
        return self._aging * sequence.request.arrival - sequence.request.priority

    def yields_to(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        """The last in the batch, if its priority is lower and its age does not make up for that."""
        if not running or running[-1].rank < newcomer.rank:
            return None
        return running[-1] if running[-1].request.priority < newcomer.request.priority else None


class ShortestFirst(Policy):
    """The shortest predicted answer first. Aging bounds the wait: one second is worth one predicted token.

    So a request of p tokens is overtaken only by those that come within p seconds of it. Where predictions have shown
    to be worse than chance, arrival alone counts.
    """

    needs_lengths = True

    def __init__(self, known: Knowledge) -> None:
        self._predictor = known.predictor
        self._aging = 1.0 if known.aging is None else known.aging

    def key(self, sequence: Sequence) -> float:
        """The predicted length and what waiting is worth."""
        expected = sequence.expected if self._predictor.is_trusted else 0
        return expected + self._aging * sequence.request.arrival


class MultiBin(Policy):
    """Bins of similar predicted lengths, each first come, first served; they take turns, so nobody starves.

    A batch that closes is drawn from one bin, so that its members end at about the same time.
    """

    needs_lengths = True
    fills_by_lane = True

    def __init__(self, known: Knowledge) -> None:
        self._served: Counter[Lane] = Counter()

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Doubling lengths."""
        return round(log2(max(1, sequence.expected)))

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """The bin whose turn it is: the one served least since it last stood empty."""
        for gone in self._served.keys() - heads.keys():
            del self._served[gone]
        least = min(self._served.values(), default=0)
        for come in heads.keys() - self._served.keys():
            self._served[come] = least
        return min(heads, key=lambda lane: (self._served[lane], heads[lane].order))

    def seated(self, sequence: Sequence) -> None:
        """Its bin has had a turn."""
        self._served[self.lane(sequence, 0.0)] += 1


class Fair(Policy):
    """Equal service to tenants, by weight, in prompt tokens and (twice as dear) answer tokens: a virtual token counter.

    The tenant served least goes next, and one below its share of the seats takes one from the tenant most above: so a
    flood by one costs the others almost nothing. A tenant that returns from idleness is owed nothing for the time away:
    it starts level with the least served, unless it was served more, which it still owes. Nobody starves: whoever waits
    is served least in the end.
    """

    needs_lengths = True
    is_preemptive = True
    _ANSWER = 2.0  # what a token of an answer counts against one of a prompt, which many share a pass with

    def __init__(self, known: Knowledge) -> None:
        self._all_seats = known.seats
        self.service: dict[str, float] = {}  # of the tenants that have requests here
        self._live: Counter[str] = Counter()
        self._seats: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._paid: dict[Sequence, int] = {}  # the answer tokens that each sequence has been charged for
        self._idle: dict[str, float] = {}  # the service of tenants that have no requests here and were served more
        self._level = 0.0  # what the last tenant here was served, while there is none

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """One a tenant."""
        return sequence.request.tenant

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """The tenant served least; of equals, one that has fewer seats."""
        return min(heads, key=lambda tenant: (self.service[str(tenant)], self._seats[str(tenant)], heads[tenant].order))

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """The last of the tenant that is most above its share."""
        excess = {tenant: self._excess(tenant) for tenant in {each.request.tenant for each in candidates}}
        return max(candidates, key=lambda each: (excess[each.request.tenant], each.rank))

    def yields_to(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        """The last of the tenant most above its share, while the newcomer's would not be above its own."""
        if not running or self._excess(newcomer.request.tenant) + newcomer.seats > 0:
            return None
        found = self.victim(running)
        return found if self._excess(found.request.tenant) > 0 else None

    def arrange(self, prompts: list[Sequence]) -> list[Sequence]:
        """The tenant served least first."""
        return sorted(prompts, key=lambda each: self.service[each.request.tenant])

    def _excess(self, tenant: str) -> float:
        """Seats above the share; negative below it."""
        share = self._all_seats * self._weights[tenant] / sum(self._weights.values())
        return self._seats[tenant] - share

    def arrived(self, sequence: Sequence) -> None:
        """A tenant that was away starts level, or owes what it owed."""
        request = sequence.request
        if not self._live[request.tenant]:
            level = min(self.service.values(), default=self._level)
            self.service[request.tenant] = max(level, self._idle.pop(request.tenant, level))
        self._weights[request.tenant] = request.weight
        self._live[request.tenant] += 1

    def seated(self, sequence: Sequence) -> None:
        """Pay in advance for what is to be computed and what is expected to be answered.

        Once: what is computed again after a preemption was charged when the sequence first had a seat.
        """
        self._seats[sequence.request.tenant] += 1
        if sequence not in self._paid and sequence.index == 0:
            self._charge(sequence, len(sequence.tokens) - sequence.computed)
        self._settle(sequence, max(sequence.expected, len(sequence.tokens) - sequence.prompt_length))

    def unseated(self, sequence: Sequence) -> None:
        """Settle the difference between what was expected and what it was."""
        self._seats[sequence.request.tenant] -= 1
        self._settle(sequence, len(sequence.tokens) - sequence.prompt_length)

    def ended(self, sequence: Sequence) -> None:
        """With its last sequence a tenant is idle: its service is kept until the others have been served as much."""
        tenant = sequence.request.tenant
        self._paid.pop(sequence, None)
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        self._idle[tenant] = self._level = self.service.pop(tenant)
        for account in (self._live, self._seats, self._weights):
            account.pop(tenant, None)
        level = min(self.service.values(), default=self._level)
        self._idle = {name: served for name, served in self._idle.items() if served > level}

    def _settle(self, sequence: Sequence, answered: int) -> None:
        """Charge, or refund, the tokens of the answer that make it so many in all."""
        self._charge(sequence, self._ANSWER * (answered - self._paid.get(sequence, 0)))
        self._paid[sequence] = answered

    def _charge(self, sequence: Sequence, tokens: float) -> None:
        self.service[sequence.request.tenant] += tokens / sequence.request.weight


class Deadline(Policy):
    """The earliest deadline of a first token goes first; those that cannot make it any more stand aside.

    After seven in a row that are in time, the next is one of those aside, or one without a deadline, so that nobody
    starves.
    """

    _IN_A_ROW = 7

    def __init__(self, known: Knowledge) -> None:
        self._cost = known.cost
        self._in_a_row = 0  # requests in time that were admitted since one of those aside was
        self._is_aside = False  # whether the one chosen last is one of those aside

    def key(self, sequence: Sequence) -> float:
        """The deadline, or the arrival of who has none: both are moments on one clock."""
        request = sequence.request
        return request.arrival if request.deadline is None else request.deadline

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Whether it can still make it (the lane False goes first)."""
        deadline = sequence.request.deadline
        return deadline is None or now + self._cost.prompt_seconds(len(sequence.tokens)) > deadline

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """Those in time, unless there have been too many in a row."""
        self._is_aside = False not in heads or (True in heads and self._in_a_row >= self._IN_A_ROW)
        return self._is_aside

    def seated(self, sequence: Sequence) -> None:
        """A turn was taken: one for all siblings."""
        if sequence.index == 0:
            self._in_a_row = 0 if self._is_aside else self._in_a_row + 1


class LongestPrefix(Policy):
    """Who has the most of its prompt in the prefix cache goes first, so that it is used before it has to make room.

    Aging bounds the wait: one second is worth 1,000 tokens found, so a request is overtaken only by those that find so
    much more than it as they came later.
    """

    reads_cache = True

    def __init__(self, known: Knowledge) -> None:
        self._aging = 1000.0 if known.aging is None else known.aging

    def key(self, sequence: Sequence) -> float:
        """What need not be computed, and what waiting is worth."""
        return self._aging * sequence.request.arrival - self.cached(sequence)


POLICIES: dict[str, Callable[[Knowledge], Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "sjf": ShortestFirst,
    "multibin": MultiBin,
    "fair": Fair,
    "deadline": Deadline,
    "longest-prefix": LongestPrefix,
}
