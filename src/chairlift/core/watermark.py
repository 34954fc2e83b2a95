"""The number of blocks that admission keeps free, so that an admitted prompt does not cause a preemption soon after."""

from __future__ import annotations

_FLOOR = 0.01  # share of the cache
_CEILING = 0.5
_RISE = 0.02  # share of the cache, added per step with a preemption
_FALL = 0.999  # factor per step without one


class Watermark:
    """Rises with each step that preempts, since too many sequences were admitted; decays with each other step."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._floor = max(1.0, _FLOOR * total)
        self._level = self._floor

    @property
    def blocks(self) -> int:
        """The number of blocks to keep free."""
        return int(self._level)

    def learn(self, has_preempted: bool) -> None:
        """Update the level after a planned step."""
        if has_preempted:
            self._level = min(_CEILING * self._total, self._level + _RISE * self._total)
        else:
            self._level = max(self._floor, self._level * _FALL)
