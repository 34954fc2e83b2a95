"""The token budget of a step: a fixed number, or as many tokens as fit a latency target."""

from __future__ import annotations

from typing import Protocol

from chairlift.core.cost import Cost, Work, pairs_of
from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.plan import StepPlan

_LEAST = 16  # prompt tokens per step, whatever the target: else decodes that miss it would block every prompt


class Budget(Protocol):
    """The token budget of a step, given its slices so far; its next slice begins at position `start`."""

    def tokens(self, step: StepPlan, limit: int, start: int) -> int:
        """Return the step's token limit, if the next slice is of a prompt."""
        ...

    def tokens_with_drafts(self, step: StepPlan, limit: int, start: int) -> int:
        """Return the step's token limit, if the next slice is a check of drafts."""
        ...


class FixedBudget:
    """A fixed number of tokens."""

    def tokens(self, step: StepPlan, limit: int, start: int) -> int:
        """Return the limit itself."""
        return limit

    tokens_with_drafts = tokens


class LatencyBudget:
    """As many tokens as the cost model predicts to fit the target."""

    def __init__(self, target: float, cost: Cost) -> None:
        self.target = target  # seconds
        self._cost = cost

    def tokens(self, step: StepPlan, limit: int, start: int) -> int:
        """Return the tokens predicted to fit, and at least `_LEAST` for prompts."""
        generating = step.counts.count(1) + sum(1 + len(drafts) for _, drafts in step.drafts)
        return max(self.tokens_with_drafts(step, limit, start), min(limit, generating + _LEAST))

    def tokens_with_drafts(self, step: StepPlan, limit: int, start: int) -> int:
        """Return the tokens predicted to fit: a decode needs no drafts."""
        return min(limit, step.tokens + self._cost.tokens_within(self.target, work_of(step), start))


def work_of(step: StepPlan) -> Work:
    """Return a planned step's work for the cost model."""
    context = pairs = prompts = 0
    for start, count in zip(step.starts, step.counts, strict=True):
        if count <= 1 + MAX_DRAFTS:  # its tokens read the context together
            context += start
        else:
            pairs += pairs_of(start, count)
            prompts += 1
    return Work(step.tokens, context, pairs, len(step.samples), prompts)
