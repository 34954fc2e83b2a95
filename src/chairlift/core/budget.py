"""How many tokens a step may hold: a number, or as many as fit a latency target."""

from __future__ import annotations

from typing import Protocol

from chairlift.core.cost import Cost, Work, pairs_of
from chairlift.core.plan import StepPlan

_LEAST = 16  # prompt tokens in a step, whatever the target: else a batch of decodes that misses it would let nobody in


class Budget(Protocol):
    """The token budget of a step."""

    def tokens(self, step: StepPlan, limit: int, start: int) -> int:
        """How many tokens the step may hold in all, given what is in it; the next prompt tokens come behind `start`."""
        ...


class FixedBudget:
    """The limit itself."""

    def tokens(self, step: StepPlan, limit: int, start: int) -> int:
        """All of it."""
        return limit


class LatencyBudget:
    """As many tokens as the cost model expects to take no longer than the target."""

    def __init__(self, target: float, cost: Cost) -> None:
        self._target = target
        self._cost = cost

    def tokens(self, step: StepPlan, limit: int, start: int) -> int:
        """What is predicted to fit, but always a few tokens of a prompt."""
        fitting = self._cost.tokens_within(self._target, work_of(step), start)
        decodes = step.counts.count(1)
        return min(limit, max(step.tokens + fitting, decodes + _LEAST))


def work_of(step: StepPlan) -> Work:
    """What a planned step does, in the cost model's numbers."""
    context = pairs = 0
    for start, count in zip(step.starts, step.counts, strict=True):
        if count == 1:
            context += start
        else:
            pairs += pairs_of(start, count)
    return Work(step.tokens, context, pairs)
