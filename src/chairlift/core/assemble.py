"""Build a scheduler from settings, for serving and for simulation alike."""

from __future__ import annotations

from typing import Any

from chairlift.core.batching import GATES
from chairlift.core.blocks import BlockPool
from chairlift.core.budget import FixedBudget, LatencyBudget
from chairlift.core.cost import Cost
from chairlift.core.drafting import DeviceDrafter, Drafter, Filler
from chairlift.core.limits import Limits
from chairlift.core.ngram import NgramDrafter
from chairlift.core.policies import POLICIES
from chairlift.core.policy import Knowledge
from chairlift.core.predictor import PREDICTORS
from chairlift.core.preemption import PREEMPTIONS
from chairlift.core.prefill import PREFILL_MODES
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import SchedulingSettings
from chairlift.core.speculation import Speculation
from chairlift.core.step_times import StepTimes


def assemble_scheduler(
    settings: SchedulingSettings,
    limits: Limits,
    pool: BlockPool,
    host: BlockPool,
    cost: Cost,
    prefix_cache: PrefixCache | None = None,
    windows: tuple[int, ...] = (0,),
) -> Scheduler:
    """Build the scheduler that the settings describe, over these blocks on the device and in host memory."""
    return Scheduler(limits, pool, **parts(settings, limits, host, cost), prefix_cache=prefix_cache, windows=windows)


def speculation_of(
    settings: SchedulingSettings, limits: Limits, times: StepTimes, draft_times: StepTimes | None = None
) -> Speculation:
    """Build the part of the scheduler that chooses drafts."""
    drafter: Drafter = NgramDrafter() if settings.speculation == "ngram" else DeviceDrafter()
    if settings.acceptance is not None and not drafter.is_on_device:
        drafter = Filler()
    found = Speculation(drafter, times, settings.max_drafts, limits.step_drafts, draft_times)
    found.fixed = settings.fixed_drafts
    return found


def parts(settings: SchedulingSettings, limits: Limits, host: BlockPool, cost: Cost) -> dict[str, Any]:
    """Return a scheduler's keyword arguments: policy, gate, prefill, preemption, predictor, budget and cost."""
    predictor = PREDICTORS[settings.predictor](limits.max_length)
    target = settings.target_tpot
    return {
        "policy": POLICIES[settings.policy](Knowledge(predictor, cost, limits.max_sequences, settings.aging)),
        "gate": GATES[settings.batching](settings.batch_window),
        "prefill": PREFILL_MODES[settings.prefill](limits, cost),
        "preemption": PREEMPTIONS[settings.preemption](host, cost),
        "predictor": predictor,
        "budget": FixedBudget() if target is None else LatencyBudget(target, cost),
        "cost": cost if reads_cost(settings) else None,
    }


def reads_cost(settings: SchedulingSettings) -> bool:
    """Whether a chosen setting uses the cost model."""
    return (
        settings.target_tpot is not None
        or settings.policy == "deadline"
        or settings.preemption == "auto"
        or settings.prefill == "splitfuse"
    )
