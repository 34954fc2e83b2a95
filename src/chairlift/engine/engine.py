"""The engine: a scheduler, an executor and the loop between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from chairlift.core.errors import DeviceError, EngineFault
from chairlift.core.plan import Event, Outcome, StepPlan
from chairlift.core.request import Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import Bits, Step, StepResult

log = logging.getLogger("chairlift")

MAX_FAILED_STEPS = 4  # in a row; overlapped, one fault can fail the next step in flight, too
MAX_IDLE_PLANS = 8  # in a row; a plan that only preempts is followed by one with slices


class Executor(Protocol):
    """Runs steps, in the order they were launched; what `launch` returns, of any type, identifies a launched step.

    Every call may raise: the requests of that step then fail, and the engine continues unless it is a DeviceError.
    """

    def launch(self, step: Step) -> Any:
        """Start one forward pass; the step must not be read after this call."""
        ...

    def choose(self, launched: Any, masks: list[Bits | None]) -> None:
        """Choose the tokens of the step's `masked` samples; called before the next launch, if the step has any."""
        ...

    def collect(self, launched: Any) -> StepResult:
        """Wait for the step's results."""
        ...


class Clock(Protocol):
    """A clock: real or simulated."""

    def now(self) -> float:
        """Return seconds since a fixed moment."""
        ...


class Flight(NamedTuple):
    """A step in flight: its plan, what the executor returned for it, and the time of planning."""

    plan: StepPlan
    launched: Any
    begun: float


class Engine:
    """Runs requests, one step at a time.

    Overlapped, it keeps two steps in flight: step N+1 is planned and launched before N is collected, so that planning
    runs while the device computes. A stop found late then costs one discarded token, never a wrong one. The masks of
    constrained samples need the previous token: they are sent after N is applied, while the device computes N+1.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._executor = executor
        self.overlap = overlap
        self.last_tokens = 0  # of the step planned last
        self.fault: str | None = None  # why no further step can run: the device is lost, or every step fails
        self._failed_steps = 0  # in a row
        self._idle_plans = 0  # in a row
        # Called after each collected step with its plan, its start time and its seconds.
        self.on_step: Callable[[StepPlan, float, float], None] | None = None
        # Called after a step's result is applied, with its plan, its result, its news, its start time and its seconds.
        self.on_applied: Callable[[StepPlan, StepResult, Outcome, float, float], None] | None = None
        self._in_flight: Flight | None = None
        self._late: list[Event] = []  # events of failed constraints, reported with the next outcome
        self._last_end = 0.0  # when the last step was collected

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended or any step is in flight."""
        return self._in_flight is not None or self.scheduler.has_work or bool(self._late)

    @property
    def may_step_while_submitting(self) -> bool:
        """Whether to step before all requests are submitted: it does not block, and they would not change the plan."""
        return self.overlap and self.scheduler.serves_in_order

    def submit(self, request: Request) -> None:
        """Queue a request, or reject it with a RequestError."""
        self._check_fault()
        self.scheduler.submit(request)

    def end(self, fault: str) -> None:
        """Run no further step, because of this fault; called by any thread."""
        self.fault = self.fault or fault

    def abort(self, request_id: str, error: str | None = None) -> list[Event]:
        """End a request now, as failed if there is an error; its blocks are free on return."""
        return self.scheduler.abort(request_id, error)

    def stop(self, sequence: Sequence) -> list[Event]:
        """End a sequence after a stop string in its text."""
        return self.scheduler.stop(sequence)

    def stop_answer(self, request_id: str, index: int) -> list[Event]:
        """End an answer by request id and index; no error if it has ended already."""
        sequence = self.scheduler.find(request_id, index)
        return [] if sequence is None else self.scheduler.stop(sequence)

    def end_input(self) -> None:
        """Announce that no more requests will be submitted: a static batch need not wait until it is full."""
        self.scheduler.planner.is_input_over = True

    def expect_input(self) -> None:
        """Announce that more requests may be submitted, as is assumed at first."""
        self.scheduler.planner.is_input_over = False

    def clear_prefix_cache(self) -> int:
        """Empty the prefix cache and return the number of blocks dropped; running sequences keep their blocks."""
        cache = self.scheduler.memory.prefix_cache
        return 0 if cache is None else cache.clear()

    @property
    def pause(self) -> float:
        """Seconds for which `step` would compute nothing; inf: until a request is submitted."""
        return 0.0 if self._in_flight is not None or self._late else self.scheduler.pause(self.clock.now())

    def step(self) -> Outcome:
        """Plan and launch one step, and return the outcome of the step that was collected."""
        self._check_fault()
        early = self._collect_early()
        now = self.clock.now()
        plan = self.scheduler.plan(now)
        self.last_tokens = plan.tokens
        events, self._late = self._late, []
        is_empty = not plan
        if early is not None:
            early.events[:0] = events
            events = []
        launched = None if is_empty else self._launch(plan, now, events)
        if self.overlap:
            awaited, self._in_flight = self._in_flight, launched
        else:
            awaited = self._choose(launched, events)
        if not is_empty or awaited or early is not None:
            self._idle_plans = 0
        else:
            events += self._end_stuck(now)
        if early is not None:
            self.scheduler.observe_early(plan, self.clock.now() - self._last_end)
            self._late += events  # of the step launched now: the tokens of the one before are reported first
            outcome = early
        else:
            outcome = self._collect(awaited) if awaited else Outcome()
            outcome.events[:0] = events
        if self.overlap:
            self._in_flight = self._choose(launched, self._late)
        return outcome

    def _collect_early(self) -> Outcome | None:
        """Collect the step in flight before the next is planned, if that is to check drafts behind its tokens."""
        flight = self._in_flight
        if flight is None or not self.scheduler.collects_early(flight.plan):
            return None
        self._in_flight = None
        return self._collect(flight)

    def _end_stuck(self, now: float) -> list[Event]:
        """Count a plan without slices though requests could run; after a few in a row, end the request that is stuck.

        No such state is known. But a loop in one would spin and answer nothing while health checks pass.
        """
        scheduler = self.scheduler
        if not scheduler.has_work or scheduler.pause(now) > 0:
            return []
        scheduler.counters.idle_plans += 1
        self._idle_plans += 1
        if self._idle_plans < MAX_IDLE_PLANS:
            return []
        stuck, pool = scheduler.stuck(now), scheduler.pool
        log.error(
            "%d plans in a row computed nothing: ending %s, with %d sequences running, %d waiting (blocked by: %s) and "
            "%d of %d KV blocks available. Please report this with the settings and these numbers",
            *(self._idle_plans, stuck, len(scheduler.running), len(scheduler.waiting)),
            *(scheduler.planner.blocked_by or "nothing", pool.available, pool.total),
        )
        self._idle_plans = 0
        return scheduler.abort(
            stuck.request.id,
            f"the request could not be computed in {MAX_IDLE_PLANS} steps in a row and was ended, so that others can "
            "run: send it again, with a smaller n or max_tokens if it fails again",
        )

    def _launch(self, plan: StepPlan, now: float, events: list[Event]) -> Flight | None:
        """Launch a step; if that fails, add the events of its requests."""
        try:
            return Flight(plan, self._executor.launch(plan), now)
        except Exception as error:
            events += self._fail(plan, error)
            return None

    def _choose(self, flight: Flight | None, events: list[Event]) -> Flight | None:
        """Send the masks of a step's constrained samples, if it has any; return the step, or None if that failed."""
        if flight is None or not flight.plan.masked:
            return flight
        masks, failed = self.scheduler.masks(flight.plan)
        events += failed
        try:
            self._executor.choose(flight.launched, masks)
        except Exception as error:
            events += self._fail(flight.plan, error)
            return None
        return flight

    def _collect(self, flight: Flight) -> Outcome:
        plan, launched, begun = flight
        try:
            result = self._executor.collect(launched)
        except Exception as error:
            return Outcome(events=self._fail(plan, error))
        now = self.clock.now()
        begun = max(begun, self._last_end)  # overlapped, a step begins on the device when the previous one ends
        self._last_end = now
        self._failed_steps = 0
        self.scheduler.observe(plan, now - begun)
        if self.on_step is not None:
            self.on_step(plan, begun, now - begun)
        outcome = self.scheduler.apply(plan, result)
        if self.on_applied is not None:
            self.on_applied(plan, result, outcome, begun, now - begun)
        return outcome

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        """End the requests of a failed step, and no others; set a fault if no further step can run."""
        log.error("a step of %d slices failed", len(plan.sequences), exc_info=error)
        self._failed_steps += 1
        if isinstance(error, DeviceError):
            self.fault = f"the device has failed: {error}"
        elif self._failed_steps >= MAX_FAILED_STEPS:
            self.fault = (
                f"the last {self._failed_steps} steps failed, the last one with {type(error).__name__}: {error}"
            )
        return self.scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")

    def _check_fault(self) -> None:
        if self.fault is not None:
            raise EngineFault(f"the engine has stopped: {self.fault}; make a new one")
