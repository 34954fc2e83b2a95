"""The routing policies a user can choose, one class each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from chairlift.routing.loads import Loads
from chairlift.routing.prefixes import TOKENS_A_BLOCK, PrefixTree

# A replica may have this many times the mean of live requests, and a few more, before a prefix that it has cached no
# longer attracts requests. Lower values recompute more prefixes, higher ones let one prompt fill a replica.
BALANCE, SLACK = 1.25, 4
# Tokens of work elsewhere that a cached token is worth: one that is computed again delays every request behind it, and
# evicts others. Measured on a trace of conversations: with 1 a fifth of the hits is lost under load.
HIT_VALUE = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as routing sees it."""

    tokens: int  # of the prompt, or an estimate
    chain: Sequence[int] = ()  # chained hashes of its blocks
    session: str = ""  # requests of one session share most of their prompts
    block: int = TOKENS_A_BLOCK  # tokens in a block of the chain


class RoutingPolicy(Protocol):
    """Chooses a replica. `names` are the replicas that may be chosen, at least one, always in the same order."""

    def choose(self, ask: Ask, names: Sequence[str], loads: Loads) -> str:
        """Return the replica for a request."""

    def cached(self, ask: Ask, name: str) -> int:
        """Return the prompt tokens that the replica is believed to have cached."""

    def sent(self, ask: Ask, name: str) -> None:
        """Record that the request was sent to the replica."""

    def forget(self, name: str) -> None:
        """Forget what the replica was sent: it has lost its cache."""


class RoundRobin:
    """The replicas in turn."""

    def __init__(self, capacity: int = 0) -> None:
        self._turn = 0

    def choose(self, ask: Ask, names: Sequence[str], loads: Loads) -> str:
        """Return the next replica."""
        self._turn += 1
        return names[(self._turn - 1) % len(names)]

    def cached(self, ask: Ask, name: str) -> int:
        """Return 0: this policy does not record prefixes."""
        return 0

    def sent(self, ask: Ask, name: str) -> None:
        """Record nothing."""

    def forget(self, name: str) -> None:
        """Forget nothing."""


class LeastLoaded(RoundRobin):
    """The replica with the least work; of equals the next in turn, or an idle server would use its first only."""

    def choose(self, ask: Ask, names: Sequence[str], loads: Loads) -> str:
        """Return the replica with the least work."""
        self._turn += 1
        first = self._turn % len(names)
        return min((*names[first:], *names[:first]), key=loads.work)


class Session(LeastLoaded):
    """The same replica for all requests of a session; a request without a session goes to the least loaded."""

    def choose(self, ask: Ask, names: Sequence[str], loads: Loads) -> str:
        """Return the replica with the highest hash of session and name: one that is ejected moves its sessions only."""
        if not ask.session:
            return super().choose(ask, names, loads)
        session = ask.session.encode("utf-8", "surrogatepass")
        # Not a CRC: it is linear, so that of three names, two could get a quarter of the sessions each.
        return max(names, key=lambda name: sha256(name.encode() + b"\0" + session).digest())


class CacheAware:
    """The replica with the least work, less what it has cached of the request.

    Replicas with many more live requests than the mean are not considered, so that requests with a common prefix
    cannot fill one replica while others are idle; the prefix is then cached at a second one.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # blocks per replica
        self._trees: dict[str, PrefixTree] = {}
        self._turn = 0

    def choose(self, ask: Ask, names: Sequence[str], loads: Loads) -> str:
        """Return the replica with the least work, less what it has cached of the request."""
        self._turn += 1
        live = [loads.live(name) for name in names]
        most = math.ceil(BALANCE * (sum(live) + 1) / len(names)) + SLACK
        allowed = [name for name, count in zip(names, live, strict=True) if count < most]
        first = self._turn % len(allowed)

        def cost(name: str) -> tuple[int, int]:
            # Of equals, the one with the fewest prefixes: it evicts least for a new one.
            return loads.work(name) - HIT_VALUE * self.cached(ask, name), len(self._tree(name))

        return min((*allowed[first:], *allowed[:first]), key=cost)

    def cached(self, ask: Ask, name: str) -> int:
        """Return the tokens of the longest prefix that the replica was sent."""
        return min(ask.tokens, ask.block * self._tree(name).match(ask.chain))

    def sent(self, ask: Ask, name: str) -> None:
        """Add the request's prefix to the replica's tree."""
        self._tree(name).add(ask.chain)

    def forget(self, name: str) -> None:
        """Clear the replica's tree."""
        self._tree(name).clear()

    def size(self, name: str) -> int:
        """Return the number of blocks in the replica's tree."""
        return len(self._tree(name))

    def _tree(self, name: str) -> PrefixTree:
        if name not in self._trees:
            self._trees[name] = PrefixTree(self._capacity)
        return self._trees[name]


POLICIES: dict[str, Callable[[int], RoutingPolicy]] = {
    "cache-aware": CacheAware,
    "least-loaded": LeastLoaded,
    "session": Session,
    "round-robin": RoundRobin,
}
