"""An engine process with a scheduler that makes no progress: the request fails, and the HTTP process is not flooded."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from test_engine_client import order

from chairlift.core.batching import GateView
from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import Step, StepResult
from chairlift.engine.engine import MAX_IDLE_PLANS, Engine
from chairlift.serving import messages
from chairlift.serving.beat import Beat
from chairlift.serving.engine_process import EngineLoop, Job
from chairlift.serving.messages import Hello, StepReport


class Shut:
    """A gate that says it is about to open and never does: a scheduler with such a defect plans nothing for ever."""

    closes = True

    def is_open(self, view: GateView, now: float) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause(self, view: GateView, now: float) -> float:
        return 0.0


class Idle:
    """An executor that is never asked."""

    def launch(self, step: Step) -> Any:
        raise AssertionError("nothing is planned")

    def collect(self, launched: Any) -> StepResult:
        raise AssertionError("nothing is planned")


class Clock:
    def now(self) -> float:
        return time.monotonic()


def test_a_stuck_request_fails_and_few_messages_are_sent(tmp_path: Path) -> None:
    scheduler = Scheduler(Limits(4, 16, 32, 64), BlockPool(16, 4), gate=Shut())
    engine = Engine(scheduler, Idle(), Clock(), overlap=True)
    context: zmq.Context[Any] = zmq.Context()
    server = context.socket(zmq.DEALER)
    server.bind(f"ipc://{tmp_path}/line")
    job = Job("m", {}, [f"ipc://{tmp_path}/line"], Beat().descriptor, os.getppid())
    loop = EngineLoop(engine, Hello("m", "", "", 4, 16, 32, 64, 4, 64, "", []), job, 0.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    failed, reports = {}, 0
    try:
        for key in range(5):
            server.send(messages.encode(order(key)))
        while len(failed) < 5 and reports < 1000:
            assert server.poll(10_000)
            report = messages.decode_report(server.recv())
            reports += 1
            failed |= {update.key: update.error for update in report.updates} if isinstance(report, StepReport) else {}
    finally:
        engine.fault = "the test is over"
        thread.join(10)
        server.close(0)
        context.term()
    assert sorted(failed) == list(range(5))
    assert all(error is not None and f"{MAX_IDLE_PLANS} steps in a row" in error for error in failed.values())
    # A greeting, statistics when a request has come or gone, and each one's end.
    assert reports <= 20
