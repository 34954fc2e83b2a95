"""The simulated device and the fake device, which verifies every plan, are given the same plans, step by step."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from device import FakeExecutor, LaunchedStep
from fakes import VOCAB

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Request
from chairlift.core.settings import SchedulingSettings
from chairlift.core.step import Step, StepResult
from chairlift.engine.engine import Engine
from chairlift.simulation.device import SimulatedDevice, VirtualClock, work_of

COST = Cost(fixed=0.004, weights=0.006, token=0.0005, context=2e-6, pair=1e-6, sample=1e-4)
ROWS, BLOCKS, SIZE, LENGTH = 6, 24, 4, 64


class TimedExecutor(FakeExecutor):
    """The fake device, with steps as long as the cost model says."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(ROWS, BLOCKS, SIZE, LENGTH)
        self._clock, self._free_at = clock, 0.0
        self._ends: dict[int, float] = {}

    def launch(self, plan: Step) -> LaunchedStep:
        self._free_at = max(self._free_at, self._clock.now()) + COST.seconds(work_of(plan))
        launched = super().launch(plan)
        self._ends[id(launched)] = self._free_at
        return launched

    def collect(self, launched: LaunchedStep) -> StepResult:
        self._clock.reach(self._ends.pop(id(launched)))
        return super().collect(launched)


def plans(is_simulated: bool, overlap: bool, **scheduling: Any) -> list[tuple[Any, ...]]:
    """Serve the same requests, which arrive over time; return the numbers of every plan, and when it was made."""
    clock, limits = VirtualClock(), Limits(ROWS, 16, LENGTH, VOCAB)
    pool = BlockPool(BLOCKS, SIZE)
    scheduler = assemble_scheduler(
        SchedulingSettings(**scheduling), limits, pool, BlockPool(0, SIZE), replace(COST), PrefixCache(pool)
    )
    device: Any = SimulatedDevice(COST, clock, ROWS) if is_simulated else TimedExecutor(clock)
    engine = Engine(scheduler, device, clock, overlap=overlap)
    seen: list[tuple[Any, ...]] = []
    plan = scheduler.plan

    def note(now: float) -> Any:
        step = plan(now)
        seen.append((round(now, 9), step.rows[:], step.starts[:], step.counts[:], step.sampled_at[:]))
        seen[-1] += ([newcomer.tables for newcomer in step.newcomers], step.table_blocks[:], len(step.preempted))
        return step

    scheduler.plan = note  # type: ignore[method-assign]
    arrivals = [(0.03 * number, 3 + 5 * number % 17, 4 + 7 * number % 23) for number in range(24)]
    while arrivals or engine.has_work:
        while arrivals and (arrivals[0][0] <= clock.now() or not engine.has_work):
            at, prompt, output = arrivals.pop(0)
            clock.reach(at)
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0)
            content = [number * prompt % VOCAB for number in range(prompt)]
            engine.submit(Request(f"r{at}", content, params, arrival=at, seed=output, known_length=output))
        engine.step()
        scheduler.check()
    return seen


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
@pytest.mark.parametrize(
    "scheduling",
    [{}, {"policy": "sjf", "predictor": "oracle"}, {"prefill": "prefill-first"}, {"target_tpot": 0.02}],
    ids=str,
)
def test_both_devices_get_the_same_plans(overlap: bool, scheduling: dict[str, Any]) -> None:
    simulated, real = (plans(each, overlap, **scheduling) for each in (True, False))
    assert len(real) > 100 and any(preempted for *_, preempted in real)
    assert simulated == real


def test_an_empty_plan_has_every_column_for_itself() -> None:
    plan, other = StepPlan(), StepPlan()
    for each in fields(StepPlan):
        found = getattr(plan, each.name)
        assert found == (0 if each.name == "tokens" else [])
        assert each.name == "tokens" or found is not getattr(other, each.name)
    assert len({id(getattr(plan, each.name)) for each in fields(StepPlan)}) == len(fields(StepPlan))
