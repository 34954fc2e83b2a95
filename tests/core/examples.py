"""Short words for the plain examples: a small scheduler, a request of so many tokens, a step that gives one token."""

from __future__ import annotations

from typing import Any

from device import FakeExecutor
from fakes import VOCAB, ManualClock

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Event, StepPlan
from chairlift.core.policy import Policy
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Request, Sequence
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import StepResult
from chairlift.engine.engine import Engine

WORD = 7  # the token that every step of an example gives, unless it says otherwise
END = 0


def scheduler_of(
    seats: int = 4,
    step_tokens: int = 64,
    blocks: int = 100,
    block_size: int = 4,
    max_length: int = 100,
    policy: Policy | None = None,
    caches: bool = False,
) -> Scheduler:
    """A scheduler with room enough, but for what the example is about."""
    pool = BlockPool(blocks, block_size)
    cache = PrefixCache(pool) if caches else None
    return Scheduler(Limits(seats, step_tokens, max_length, VOCAB), pool, policy=policy, prefix_cache=cache)


def engine_of(scheduler: Scheduler, *, overlap: bool) -> tuple[Engine, FakeExecutor]:
    """The engine over a fake executor of the scheduler's size."""
    limits, pool = scheduler.limits, scheduler.pool
    executor = FakeExecutor(limits.max_sequences, pool.total, pool.block_size, limits.max_length)
    return Engine(scheduler, executor, ManualClock(), overlap=overlap), executor


def request(name: str, prompt: int = 3, *, eos: int | None = END, seed: int = 0, **params: Any) -> Request:
    """A request with a prompt of so many tokens."""
    eos_ids = frozenset() if eos is None else frozenset({eos})
    return Request(name, [WORD] * prompt, SamplingParams(**params), eos_ids=eos_ids, seed=seed)


def ask(scheduler: Scheduler, name: str, prompt: int = 3, **params: Any) -> Sequence:
    """Submit a request; the sequence that stands for it in the queue."""
    scheduler.submit(request(name, prompt, **params))
    return next(sequence for sequence in scheduler.waiting if sequence.request.id == name)


def give(scheduler: Scheduler, plan: StepPlan, *tokens: int) -> list[Event]:
    """Apply a plan with these tokens, or a word for each sample."""
    return list(scheduler.apply(plan, StepResult(list(tokens) or [WORD] * len(plan.samples))))


def step(scheduler: Scheduler, *tokens: int) -> StepPlan:
    """Plan and apply."""
    plan = scheduler.plan(0.0)
    give(scheduler, plan, *tokens)
    scheduler.check()
    return plan


def step_until_one_yields(scheduler: Scheduler) -> StepPlan:
    """Step on until memory runs out; the plan that preempted."""
    for _ in range(100):
        plan = step(scheduler)
        if plan.preempted:
            return plan
    raise AssertionError("memory never ran out")


def shape_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """A plan's slices, by name."""
    return [(piece.sequence.request.id, piece.start, piece.count) for piece in plan.slices]


def names(sequences: list[Sequence]) -> list[str]:
    """The ids of the requests that sequences belong to."""
    return [sequence.request.id for sequence in sequences]
