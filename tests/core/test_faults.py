"""An engine stops when its device fails: after a few failed steps in a row, or at once when the device is lost."""

from __future__ import annotations

from typing import Any

import pytest
from device import FakeExecutor
from fakes import VOCAB, ManualClock

from chairlift.core.blocks import BlockPool
from chairlift.core.errors import DeviceError, EngineFault
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import Step, StepResult
from chairlift.engine.engine import MAX_FAILED_STEPS, Engine


class Failing(FakeExecutor):
    """Fails as it is told, at submit or at collect."""

    error: Exception | None = None
    at_collect = False

    def launch(self, plan: Step) -> Any:
        if self.error is not None and not self.at_collect:
            raise self.error
        return super().launch(plan)

    def collect(self, launched: Any) -> StepResult:
        result = super().collect(launched)
        if self.error is not None and self.at_collect:
            raise self.error
        return result


def made(overlap: bool, at_collect: bool) -> tuple[Engine, Failing]:
    executor = Failing(4, 16, 4, 32)
    executor.at_collect = at_collect
    scheduler = Scheduler(Limits(4, 16, 32, VOCAB), BlockPool(16, 4))
    return Engine(scheduler, executor, ManualClock(), overlap=overlap), executor


def ask(engine: Engine, name: str) -> None:
    engine.submit(Request(name, [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)))


def run(engine: Engine) -> None:
    while engine.has_work and engine.fault is None:
        engine.step()
        engine.scheduler.check()


CASES = pytest.mark.parametrize(("overlap", "at_collect"), [(False, False), (False, True), (True, False), (True, True)])


@CASES
def test_steps_that_fail_in_a_row_stop_the_engine(overlap: bool, at_collect: bool) -> None:
    engine, executor = made(overlap, at_collect)
    executor.error = RuntimeError("no")
    for number in range(MAX_FAILED_STEPS):
        if engine.fault is None:
            ask(engine, f"r{number}")
            run(engine)
    assert engine.fault is not None and "RuntimeError: no" in engine.fault
    with pytest.raises(EngineFault, match="the engine has stopped"):
        ask(engine, "late")
    with pytest.raises(EngineFault):
        engine.step()


@CASES
def test_a_step_that_succeeds_starts_the_count_again(overlap: bool, at_collect: bool) -> None:
    engine, executor = made(overlap, at_collect)
    for number in range(3 * MAX_FAILED_STEPS):
        executor.error = RuntimeError("no")
        ask(engine, f"bad{number}")
        run(engine)
        executor.error = None
        ask(engine, f"good{number}")
        run(engine)
    assert engine.fault is None
    assert engine.scheduler.counters.failed == engine.scheduler.counters.finished == 3 * MAX_FAILED_STEPS


@CASES
def test_a_lost_device_stops_the_engine_at_once(overlap: bool, at_collect: bool) -> None:
    engine, executor = made(overlap, at_collect)
    executor.error = DeviceError("illegal memory access")
    ask(engine, "r")
    run(engine)
    assert engine.fault == "the device has failed: illegal memory access"
    assert engine.scheduler.counters.failed == 1
