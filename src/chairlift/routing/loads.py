"""Loads: the live requests of each replica, and the prompt tokens that it has to compute for them."""

from __future__ import annotations

from collections import defaultdict

# Tokens of work that a live request counts for, besides its prompt: its decodes take part of every step.
TOKENS_A_REQUEST = 256


class Loads:
    """Counts of one process; the server has them in memory that its HTTP processes share."""

    def __init__(self) -> None:
        self._live: dict[str, int] = defaultdict(int)
        self._pending: dict[str, int] = defaultdict(int)

    def add(self, name: str, live: int, pending: int) -> None:
        """Add live requests and pending prompt tokens to a replica; negative when they end."""
        self._live[name] += live
        self._pending[name] += pending

    def live(self, name: str) -> int:
        """Return the requests that the replica has not ended."""
        return self._live[name]

    def pending(self, name: str) -> int:
        """Return the uncached prompt tokens of requests without a first token."""
        return self._pending[name]

    def work(self, name: str) -> int:
        """Return the replica's work in tokens."""
        return self.pending(name) + TOKENS_A_REQUEST * self.live(name)
