"""Router: the replicas of one model, which of them take requests, and an account of every request sent to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from chairlift.core.errors import SettingsError
from chairlift.routing.loads import Loads
from chairlift.routing.policies import POLICIES, Ask, RoutingPolicy

TREE_BLOCKS = 1 << 16  # per replica: about 10 MB, or 4 million tokens
End = Literal["finished", "aborted", "rejected", "failed"]


@dataclass(slots=True)
class Counts:
    """The requests sent to one replica: sent = live + finished + aborted + rejected + failed."""

    sent: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self.sent - self.finished - self.aborted - self.rejected - self.failed


class Route:
    """One request at one replica, from its choice to its end."""

    def __init__(self, router: Router, name: str, pending: int, cached: int) -> None:
        self.name = name
        self.cached = cached  # prompt tokens that the replica is believed to have cached
        self._router = router
        self._pending = pending
        self._has_ended = False

    def started(self) -> None:
        """Record the first token: the prompt is computed."""
        self._router.loads.add(self.name, 0, -self._pending)
        self._pending = 0

    def end(self, how: End) -> None:
        """Record the end; a second call does nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._router.loads.add(self.name, -1, -self._pending)
            self._pending = 0
            counts = self._router.counts[self.name]
            setattr(counts, how, getattr(counts, how) + 1)


class Router:
    """Routes requests among the replicas that are not ejected.

    >>> router = Router(["a", "b"], "round-robin")
    >>> [router.route(Ask(10)).name for _ in range(3)]
    ['a', 'b', 'a']
    >>> router.eject("a")
    >>> router.route(Ask(10)).name, router.route(Ask(10), exclude={"b"})
    ('b', None)
    """

    def __init__(
        self,
        names: Iterable[str],
        policy: str = "cache-aware",
        *,
        capacity: int = TREE_BLOCKS,
        loads: Loads | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise SettingsError(f"the routing policy is {policy!r}: use one of {', '.join(POLICIES)}")
        self.names = tuple(names)
        self.counts = {name: Counts() for name in self.names}
        self.loads = loads or Loads()
        self.policy: RoutingPolicy = POLICIES[policy](capacity)
        self._ejected: set[str] = set()

    def route(self, ask: Ask, exclude: Collection[str] = ()) -> Route | None:
        """Choose a replica and record the request there; None if all are ejected or excluded."""
        name = self.choose(ask, exclude)
        return None if name is None else self.send(ask, name)

    def choose(self, ask: Ask, exclude: Collection[str] = ()) -> str | None:
        """Return the replica for a request, without recording it there; None if all are ejected or excluded."""
        names = [name for name in self.names if name not in self._ejected and name not in exclude]
        if len(names) > 1:
            return self.policy.choose(ask, names, self.loads)
        return names[0] if names else None

    def send(self, ask: Ask, name: str) -> Route:
        """Record a request at a replica."""
        cached = self.policy.cached(ask, name)
        self.policy.sent(ask, name)
        self.counts[name].sent += 1
        pending = ask.tokens - cached
        self.loads.add(name, 1, pending)
        return Route(self, name, pending, cached)

    def is_ejected(self, name: str) -> bool:
        """Whether the replica gets no requests."""
        return name in self._ejected

    def eject(self, name: str) -> None:
        """Send no further requests to a replica: it is down, stuck or draining. Its live requests go on."""
        self._ejected.add(name)

    def readmit(self, name: str) -> None:
        """Send requests to a replica again."""
        self._ejected.discard(name)

    def forget(self, name: str) -> None:
        """Forget what a replica was sent: it was restarted."""
        self.policy.forget(name)
