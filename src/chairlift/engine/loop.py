"""drive: the loop that runs an engine for callers in other threads or processes."""

from __future__ import annotations

from math import inf
from typing import Protocol

from chairlift.core.plan import Outcome
from chairlift.engine.engine import Engine


class Port(Protocol):
    """The loop's source of requests and target of results. Only the loop's thread calls it and the engine."""

    def is_open(self) -> bool:
        """Whether the loop continues."""
        ...

    def receive(self, wait: float) -> None:
        """Submit, stop and abort as callers have asked; wait up to `wait` seconds for the first call."""
        ...

    def report(self, outcome: Outcome, seconds: float) -> None:
        """Deliver a step's outcome to callers; the step took so many seconds."""
        ...


def drive(engine: Engine, port: Port) -> None:
    """Run steps until the port is closed or the engine has a fault."""
    now = engine.clock.now
    # The fault first: a port that is asked once more would tell its callers that the engine works.
    while engine.fault is None and port.is_open():
        # A static batch that is not full yet has work, but nothing to compute.
        port.receive(engine.pause if engine.has_work else inf)
        if engine.has_work:
            before = now()
            outcome = engine.step()
            port.report(outcome, now() - before)
