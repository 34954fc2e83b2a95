"""The scheduler's own cost: microseconds to plan and to apply a step of decodes, by the length of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

from rich.table import Table

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import StepResult
from chairlift.report.tables import Columns, number_table

COLUMNS: Columns = (
    ("running", "running", "{:,}"),
    ("waiting", "waiting", "{:,}"),
    ("plan_us", "plan", "{:,.1f}"),
    ("apply_us", "apply", "{:,.1f}"),
    ("step_us", "step", "{:,.1f}"),
)
_BLOCK = 16
_TOKEN = 1


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """The median time of a steady step: every running sequence decodes one token, none is admitted or finishes."""

    running: int
    waiting: int
    plan_us: float
    apply_us: float

    @property
    def step_us(self) -> float:
        """The sum of plan and apply."""
        return self.plan_us + self.apply_us


def run(
    running: int = 256, waiting: Sequence[int] = (10, 1000, 100_000), *, warmup: int = 50, steps: int = 400
) -> list[SchedulerRow]:
    """Time the real scheduler, without an executor, for each length of the queue.

    >>> [row.waiting for row in run(running=2, waiting=(0, 3), warmup=1, steps=2)]
    [0, 3]
    """
    return [_measure(running, queued, warmup, steps) for queued in waiting]


def _measure(running: int, waiting: int, warmup: int, steps: int) -> SchedulerRow:
    # Blocks for every running sequence's whole answer, so that no step preempts: only max_sequences limits the batch.
    length = _BLOCK + 1 + warmup + steps + 1
    limits = Limits(running, running * _BLOCK, max_length=length, vocab_size=_TOKEN + 1)
    scheduler = Scheduler(limits, BlockPool(2 * running * -(-length // _BLOCK), _BLOCK))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for number in range(running + waiting):
        # Prompts of all lengths up to a block, so that every step allocates the same number of blocks.
        scheduler.submit(Request(str(number), [_TOKEN] * (1 + number % _BLOCK), params))
    _step(scheduler)  # prefills all prompts
    for _ in range(warmup):
        _step(scheduler)
    times = [_step(scheduler) for _ in range(steps)]
    assert len(scheduler.running) == running and len(scheduler.waiting) == waiting
    return SchedulerRow(
        running,
        waiting,
        plan_us=median(planned for planned, _ in times) * 1e6,
        apply_us=median(applied for _, applied in times) * 1e6,
    )


def _step(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step; return the seconds of plan and apply."""
    began = perf_counter()
    plan = scheduler.plan(0.0)
    planned = perf_counter()
    result = StepResult([_TOKEN] * len(plan.samples))
    applying = perf_counter()
    scheduler.apply(plan, result)
    return planned - began, perf_counter() - applying


def scheduler_table(rows: Sequence[SchedulerRow]) -> Table:
    """Return the table, with a row for each length of the queue."""
    numbers = [{**asdict(row), "step_us": row.step_us} for row in rows]
    return number_table("microseconds per step", COLUMNS, [((), each) for each in numbers], is_centered=True)
