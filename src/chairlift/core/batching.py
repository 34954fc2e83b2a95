"""When the batch takes new requests: an admission gate on the one scheduling loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Gate(Protocol):
    """Decides, before each step, whether waiting requests may join."""

    def opens(self, running: int, waiting: int, now: float) -> bool:
        """Whether to admit in this step."""
        ...


class Continuous:
    """A free seat is taken at the very next step (iteration-level scheduling)."""

    def opens(self, running: int, waiting: int, now: float) -> bool:
        """Always."""
        return True


GATES: dict[str, Callable[[], Gate]] = {"continuous": Continuous}
