"""Counters: how requests have fared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """How requests have fared: submitted = live + finished + aborted + rejected + failed, at every moment."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    preemptions: int = 0
    idle_plans: int = 0  # that computed nothing though requests could run and nothing was in flight
    prompt_tokens: int = 0  # of those that took a seat
    cached_tokens: int = 0  # of these, what the prefix cache had
