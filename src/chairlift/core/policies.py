"""The scheduling policies that a user can choose: each is one class, a few rules on top of first come, first served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import log2

from chairlift.core.policy import Knowledge, Lane, Policy
from chairlift.core.request import Sequence
from chairlift.core.words import counted


class Fcfs(Policy):
    """First come, first served: the oldest is admitted first, the youngest is preempted; no request starves."""

    is_in_order = True


class Priority(Policy):
    """Higher priority first, and at once: lower ones are preempted. Without aging, low priorities starve.

    With aging, every second of waiting raises a request by so many levels in the queue, but never preempts another.
    """

    name = "priority"
    is_preemptive = True

    def __init__(self, known: Knowledge) -> None:
        self._aging = known.aging or 0.0

    def key(self, sequence: Sequence) -> float:
        """All requests age at one rate, so the order of two never changes: only their arrivals count."""
        return self._aging * sequence.request.arrival - sequence.request.priority

    def victim_for(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the last in the batch, if its priority is lower and its age does not make up for that."""
        if not running or running[-1].rank < newcomer.rank:
            return None
        return running[-1] if running[-1].request.priority < newcomer.request.priority else None

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return its priority."""
        return f"its priority is {sequence.request.priority}; higher priorities are admitted first, then by arrival"


class ShortestFirst(Policy):
    """The shortest predicted answer first. Aging bounds the wait: one second is worth one predicted token.

    So a request of p tokens is overtaken only by requests that arrive within p seconds after it. While predictions are
    worse than chance, only arrival counts.
    """

    name = "sjf"
    needs_lengths = True

    def __init__(self, known: Knowledge) -> None:
        self._predictor = known.predictor
        self._aging = 1.0 if known.aging is None else known.aging

    def key(self, sequence: Sequence) -> float:
        """Return the predicted length, and the arrival times what a second of waiting is worth."""
        expected = sequence.expected if self._predictor.is_trusted else 0
        return expected + self._aging * sequence.request.arrival

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return its predicted length."""
        if not self._predictor.is_trusted:
            return "predicted lengths have been worse than chance, so requests are admitted in order of arrival"
        return f"its answer is predicted to have {counted(sequence.expected, 'token')}; the shortest is admitted first"

    def stats(self) -> dict[str, float]:
        """Whether predicted lengths are used."""
        return {"predictions_trusted": float(self._predictor.is_trusted)}


class MultiBin(Policy):
    """Bins of similar predicted lengths, each first come, first served, admitted from in rotation: no request starves.

    A closed batch is admitted from one bin, so that its members end at about the same time.
    """

    name = "multibin"
    needs_lengths = True
    fills_by_lane = True

    def __init__(self, known: Knowledge) -> None:
        self._served: Counter[Lane] = Counter()

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Return the bin: each has twice the length of the one before."""
        return round(log2(max(1, sequence.expected)))

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """Return the bin that was served least since it was last empty."""
        for emptied in self._served.keys() - heads.keys():
            del self._served[emptied]
        least = min(self._served.values(), default=0)
        for filled in heads.keys() - self._served.keys():
            self._served[filled] = least
        return min(heads, key=lambda lane: (self._served[lane], heads[lane].order))

    def started(self, sequence: Sequence) -> None:
        """Count for its bin."""
        self._served[self.lane(sequence, 0.0)] += 1

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return its predicted length."""
        return (
            f"its answer is predicted to have {counted(sequence.expected, 'token')}; it waits in the bin of similar "
            "lengths, in order of arrival"
        )

    def stats(self) -> dict[str, float]:
        """The number of bins with waiting requests, as last seen."""
        return {"bins": float(len(self._served))}


class Fair(Policy):
    """Equal service to tenants, by weight: a virtual counter of prompt tokens and answer tokens, which count double.

    The tenant served least is admitted next, and a tenant below its share of the rows preempts the tenant most above
    its own: so a flood by one tenant costs the others almost nothing. Idle time earns nothing: a tenant that returns
    starts level with the least served, or with its own service if that is more. No request starves: the service of
    every other tenant grows until the waiting one is served least.
    """

    name = "fair"
    needs_lengths = True
    is_preemptive = True
    _ANSWER = 2.0  # prompt tokens that an answer token counts as: a prompt's share one forward pass

    def __init__(self, known: Knowledge) -> None:
        self._max_rows = known.max_sequences
        self.service: dict[str, float] = {}  # of the tenants with live requests
        self._live: Counter[str] = Counter()  # sequences
        self._rows: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._paid: dict[Sequence, int] = {}  # the answer tokens that each sequence has been charged for
        self._idle: dict[str, float] = {}  # of tenants without live requests that were served more than the others
        self._level = 0.0  # the service of the tenant that was last to have live requests

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Return the tenant."""
        return sequence.request.tenant

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """Return the tenant served least; of equals, the one with fewer rows."""
        return min(heads, key=lambda tenant: (self.service[str(tenant)], self._rows[str(tenant)], heads[tenant].order))

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Return the last sequence of the tenant that is most above its share of rows."""
        excess = {tenant: self._excess(tenant) for tenant in {each.request.tenant for each in candidates}}
        return max(candidates, key=lambda each: (excess[each.request.tenant], each.rank))

    def victim_for(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the last sequence of the tenant most above its share, unless the newcomer's would be above its own."""
        if not running or self._excess(newcomer.request.tenant) + newcomer.group.rows > 0:
            return None
        found = self.victim(running)
        return found if self._excess(found.request.tenant) > 0 else None

    def arrange(self, prompts: list[Sequence]) -> list[Sequence]:
        """Return the prompts of the tenants served least first."""
        return sorted(prompts, key=lambda each: self.service[each.request.tenant])

    def _excess(self, tenant: str) -> float:
        """Return a tenant's rows above its share; negative below it."""
        share = self._max_rows * self._weights[tenant] / sum(self._weights.values())
        return self._rows[tenant] - share

    def arrived(self, sequence: Sequence) -> None:
        """Start a tenant without live requests level with the least served, or with its own service if that is more."""
        request = sequence.request
        if not self._live[request.tenant]:
            level = min(self.service.values(), default=self._level)
            self.service[request.tenant] = max(level, self._idle.pop(request.tenant, level))
        self._weights[request.tenant] = request.weight
        self._live[request.tenant] += 1

    def started(self, sequence: Sequence) -> None:
        """Charge the prompt's uncached tokens and the predicted answer in advance.

        A preempted sequence is not charged again for what it recomputes.
        """
        self._rows[sequence.request.tenant] += 1
        if sequence not in self._paid and sequence.index == 0:
            self._charge(sequence, len(sequence.tokens) - sequence.computed)
        self._settle(sequence, max(sequence.expected, len(sequence.tokens) - sequence.prompt_length))

    def stopped(self, sequence: Sequence) -> None:
        """Settle the difference between the predicted answer and the real one."""
        self._rows[sequence.request.tenant] -= 1
        self._settle(sequence, len(sequence.tokens) - sequence.prompt_length)

    def ended(self, sequence: Sequence) -> None:
        """Keep the service of a tenant without live requests until the others have been served as much."""
        tenant = sequence.request.tenant
        self._paid.pop(sequence, None)
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        self._idle[tenant] = self._level = self.service.pop(tenant)
        for account in (self._live, self._rows, self._weights):
            account.pop(tenant, None)
        level = min(self.service.values(), default=self._level)
        self._idle = {name: served for name, served in self._idle.items() if served > level}

    def _settle(self, sequence: Sequence, answered: int) -> None:
        """Charge or refund answer tokens, so that `answered` have been charged in all."""
        self._charge(sequence, self._ANSWER * (answered - self._paid.get(sequence, 0)))
        self._paid[sequence] = answered

    def _charge(self, sequence: Sequence, tokens: float) -> None:
        self.service[sequence.request.tenant] += tokens / sequence.request.weight

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return what its tenant was served, and the least of the other waiting tenants."""
        request = sequence.request
        own, least = self.service[request.tenant], min(self.service[each.request.tenant] for each in waiting)
        others = f"another waiting tenant {least:,.0f}" if least < own else "no waiting tenant fewer"
        return (
            f"its tenant, with weight {request.weight:g}, was served {counted(round(own), 'token')} and {others}; "
            "the tenant served least is admitted next"
        )

    def service_of_tenants(self) -> dict[str, float]:
        """Return a copy of the counters."""
        return self.service.copy()

    def stats(self) -> dict[str, float]:
        """The live tenants, and the difference in service between the most and the least served."""
        served = self.service.values()
        return {
            "tenants": float(len(served)),
            "service_gap_tokens": max(served, default=0.0) - min(served, default=0.0),
        }


class Deadline(Policy):
    """The earliest deadline of a first token first; requests that cannot meet theirs any more go to a second lane.

    After seven admissions in a row from the first lane, the next is from the second, which also holds the requests
    without a deadline: so no request starves.
    """

    name = "deadline"
    _IN_A_ROW = 7

    def __init__(self, known: Knowledge) -> None:
        self._cost = known.cost
        self._in_a_row = 0  # admissions from the first lane since one from the second
        self._is_late = False  # whether the last choice was the second lane

    def key(self, sequence: Sequence) -> float:
        """Return the deadline, or the arrival of a request without one: both are times on one clock."""
        request = sequence.request
        return request.arrival if request.deadline is None else request.deadline

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Return whether it cannot meet its deadline any more, or has none: the second lane is True."""
        deadline = sequence.request.deadline
        return deadline is None or now + self._cost.prompt_seconds(len(sequence.tokens)) > deadline

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """Return the first lane, unless there have been too many admissions in a row from it."""
        self._is_late = False not in heads or (True in heads and self._in_a_row >= self._IN_A_ROW)
        return self._is_late

    def started(self, sequence: Sequence) -> None:
        """Count the admission, once for all siblings."""
        if sequence.index == 0:
            self._in_a_row = 0 if self._is_late else self._in_a_row + 1

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return when its first token is due, and whether that can be met."""
        deadline = sequence.request.deadline
        second = "it waits in the second lane, from which every eighth request is admitted"
        if deadline is None:
            return f"it has no deadline; {second}"
        if now > deadline:
            return f"its first token was due {now - deadline:.2f} s ago; {second}"
        due = f"its first token is due in {deadline - now:.2f} s"
        if self.lane(sequence, now):
            return f"{due}, too soon for its prompt; {second}"
        return f"{due}; the earliest deadline is admitted first"


class LongestPrefix(Policy):
    """The request with the most cached prompt tokens first, so that cached blocks are used before they are evicted.

    Aging bounds the wait: one second is worth 1,000 cached tokens, so a request is overtaken by one that arrived t
    seconds later only if that one has 1,000 t more tokens in the cache.
    """

    name = "longest-prefix"
    reads_cache = True

    def __init__(self, known: Knowledge) -> None:
        self._aging = 1000.0 if known.aging is None else known.aging

    def key(self, sequence: Sequence) -> float:
        """Return the arrival times what a second of waiting is worth, less the cached tokens."""
        return self._aging * sequence.request.arrival - self.cached(sequence)

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return its cached tokens."""
        found = self.peek_cached(sequence)
        verb = "is" if found == 1 else "are"
        return (
            f"{counted(found, 'token')} of it {verb} in the prefix cache; the request with the most is admitted first"
        )


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fcfs, Priority, ShortestFirst, MultiBin, Fair, Deadline, LongestPrefix)
}
