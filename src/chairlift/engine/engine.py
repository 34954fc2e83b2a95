"""The engine: a scheduler, an executor and the loop between them."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from chairlift.core.plan import Event, StepPlan, StepResult
from chairlift.core.request import Request, Sequence
from chairlift.core.scheduler import Scheduler

log = logging.getLogger("chairlift")


class Executor(Protocol):
    """Runs plans, in the order they were submitted; the ticket between the two calls is its own affair."""

    def submit(self, plan: StepPlan) -> Any:
        """Start one forward pass."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for it."""
        ...


class Clock(Protocol):
    """Tells the time: of the wall, or of a simulation."""

    def now(self) -> float:
        """Seconds from some fixed moment."""
        ...


class Engine:
    """Drives requests to their end, one step at a time.

    Overlapped, it keeps two plans in flight: step N+1 is planned and submitted before N is collected, so that planning
    hides behind the device's work. A stop found late then costs one discarded token, never a wrong one.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._executor = executor
        self._overlap = overlap
        self.last_tokens = 0  # of the step planned last
        self._in_flight: tuple[StepPlan, Any] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any step has not come back."""
        return self.scheduler.has_work or self._in_flight is not None

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with a RequestError."""
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> list[Event]:
        """End a request now; its blocks are free when this returns."""
        return self.scheduler.abort(request_id)

    def stop(self, sequence: Sequence) -> list[Event]:
        """End one sequence whose text met a stop string."""
        return self.scheduler.stop(sequence)

    def stop_answer(self, request_id: str, index: int) -> list[Event]:
        """The same by name; one that has ended already is no error."""
        sequence = self.scheduler.find(request_id, index)
        return [] if sequence is None else self.scheduler.stop(sequence)

    def step(self) -> list[Event]:
        """Plan and run one forward pass, and return the news of the pass that came back."""
        plan = self.scheduler.plan(self.clock.now())
        self.last_tokens = plan.tokens
        if not self._overlap:
            if not plan:
                return []
            events, ticket = self._submit(plan)
            return events if ticket is None else self._collect(plan, ticket)
        events, ticket = self._submit(plan) if plan else ([], None)
        arrived, self._in_flight = self._in_flight, (plan, ticket) if ticket is not None else None
        return events + (self._collect(*arrived) if arrived else [])

    def _submit(self, plan: StepPlan) -> tuple[list[Event], Any]:
        try:
            return [], self._executor.submit(plan)
        except Exception as error:
            return self._fail(plan, error), None

    def _collect(self, plan: StepPlan, ticket: Any) -> list[Event]:
        try:
            result = self._executor.collect(ticket)
        except Exception as error:
            return self._fail(plan, error)
        return self.scheduler.apply(plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        """A broken pass ends the requests that were in it, and only those."""
        log.error("a step of %d slices failed", len(plan.slices), exc_info=error)
        return self.scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
