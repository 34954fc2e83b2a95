"""drive: the loop that runs an engine for callers in other threads or processes."""

from __future__ import annotations

from math import inf
from typing import Protocol

from chairlift.core.plan import Outcome
from chairlift.engine.engine import Engine


class Port(Protocol):
    """Where the loop takes requests from and reports to. The loop's thread alone calls it, and the engine."""

    def is_open(self) -> bool:
        """Whether the loop goes on."""
        ...

    def receive(self, wait: float) -> None:
        """Submit, stop and abort what callers have asked for; with nothing to compute, wait so many seconds for it."""
        ...

    def report(self, outcome: Outcome, seconds: float) -> None:
        """Tell callers what a step has generated; it took so many seconds."""
        ...


def drive(engine: Engine, port: Port) -> None:
    """Run steps until the port is closed or the engine has a fault."""
    now = engine.clock.now
    while port.is_open() and engine.fault is None:
        # A batch that waits to be full has work, but nothing to compute yet.
        port.receive(engine.pause if engine.has_work else inf)
        if engine.has_work:
            before = now()
            outcome = engine.step()
            port.report(outcome, now() - before)
