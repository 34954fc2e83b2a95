"""Counters of requests, preemptions and prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start: submitted = live + finished + aborted + rejected + failed, at every moment."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    preemptions: int = 0
    idle_plans: int = 0  # plans without a slice while requests could run and no step was in flight
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of these, found in the prefix cache
