"""Scaling: chooses how many replicas run, by the prompt tokens in the queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chairlift.core.errors import SettingsError

# A replica is ended only if live requests would fill at most this share of the other replicas' batches: with more, the
# queue would soon grow again.
_FULL_ENOUGH = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """The load of all replicas that work."""

    working: int
    queued_tokens: int  # of requests without a first token
    live: int  # requests
    max_sequences: int  # of one replica's batch


class Scaling:
    """Chooses the number of replicas between two bounds, from loads at successive times.

    A queue of more than `queued_tokens` per replica for `up_after` seconds raises the number to one replica for each
    `queued_tokens`, unless some replicas have not started yet. One replica is ended when, for `down_after` seconds, the
    others would be enough for the queue and have room for the live requests.

    >>> scaling = Scaling(1, 3, queued_tokens=1000, up_after=5, down_after=60)
    >>> [scaling.count(now, Load(1, 2500, 40, 32)) for now in (0, 4, 5)]
    [1, 1, 3]
    >>> [scaling.count(now, Load(3, 0, 2, 32)) for now in (6, 65, 66, 125, 126)]
    [3, 3, 2, 2, 1]
    """

    def __init__(self, least: int, most: int, *, queued_tokens: int, up_after: float, down_after: float) -> None:
        self._least, self._most, self._queued_tokens = least, most, queued_tokens
        self._up_after, self._down_after = up_after, down_after
        self._wanted = least
        self._too_few_since: float | None = None
        self._too_many_since: float | None = None

    def count(self, now: float, load: Load) -> int:
        """Return the number of replicas that should run."""
        worth = math.ceil(load.queued_tokens / self._queued_tokens)
        is_too_few = worth > self._wanted < self._most and load.working >= self._wanted
        room = _FULL_ENOUGH * load.max_sequences * (self._wanted - 1)
        is_too_many = self._wanted > self._least and worth < self._wanted and load.live <= room
        self._too_few_since = _since(self._too_few_since, now, is_too_few)
        self._too_many_since = _since(self._too_many_since, now, is_too_many)
        if self._too_few_since is not None and now - self._too_few_since >= self._up_after:
            self._wanted = min(self._most, worth)
            self._too_few_since = None
        elif self._too_many_since is not None and now - self._too_many_since >= self._down_after:
            self._wanted -= 1
            self._too_many_since = now
        return self._wanted


def read_counts(text: str | None) -> tuple[int | None, int | None]:
    """Read the least and the largest number of replicas; None if it is not given.

    >>> read_counts("2"), read_counts("1..3"), read_counts(None)
    ((2, 2), (1, 3), (None, None))
    """
    if text is None:
        return None, None
    least, dots, most = text.partition("..")
    found = [int(each) for each in (least, most if dots else least) if each.isdecimal() and 1 <= int(each) <= 64]
    if len(found) < 2 or found[0] > found[1]:
        raise SettingsError(f"--replicas is {text}: use a number from 1 to 64, or with --on ray a range such as 1..3")
    return found[0], found[1]


def _since(before: float | None, now: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now if before is None else before
