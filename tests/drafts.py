"""Engines that draft as many tokens as they may, whatever these cost, and requests for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from chairlift.core.drafting import MAX_DRAFTS, DeviceDrafter, Drafter
from chairlift.core.speculation import Speculation
from chairlift.core.step_times import StepTimes

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
_FREE = StepTimes([(1, 1.0), (400, 1.0)])


def speculate(llm: LLM, drafter: Drafter) -> Speculation:
    """Let an engine check as many drafts as a drafter proposes."""
    speculation = Speculation(drafter, _FREE, most=llm.engine.scheduler.limits.step_drafts)
    speculation.fixed = MAX_DRAFTS
    llm.engine.scheduler.planner.speculation = speculation
    return speculation


def drafting(model: Path, draft: Path, kind: str, **settings: Any) -> tuple[LLM, Speculation]:
    """An engine that drafts with a draft model or a head."""
    llm = LLM(str(model), progress=False, speculation=kind, draft=str(draft), **settings)
    return llm, speculate(llm, DeviceDrafter())


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(384) for _ in range(draw.randint(1, 90))] for _ in range(count)]


def tokens_of(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    """The tokens of every answer."""
    return [output.token_ids for result in llm.generate(prompts, params) for output in result.outputs]
