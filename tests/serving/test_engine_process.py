"""The engine's loop: what it sends, and what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import fake_engine
import zmq

from chairlift.core.params import SamplingParams
from chairlift.core.plan import Outcome
from chairlift.core.request import Request
from chairlift.engine.engine import Clock
from chairlift.serving import messages
from chairlift.serving.beat import Beat
from chairlift.serving.engine_process import EngineLoop, Job


def test_steps_that_compute_nothing_send_nothing(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/http"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as http:
        http.setsockopt(zmq.LINGER, 0)
        http.bind(address)
        job = Job("m", {}, [address], Beat().descriptor, os.getppid())
        engine, hello, slowest, *_ = fake_engine.build(job)
        spins = 0

        def spin() -> Outcome:
            nonlocal spins
            spins += 1
            if spins > 5000:
                engine.fault = "enough"
            return Outcome()

        engine.step = spin  # type: ignore[method-assign]
        loop = EngineLoop(engine, hello, job, slowest)
        http.send(messages.encode(order()))
        loop.run()
        reports = []
        while http.poll(200):
            reports.append(messages.decode_report(http.recv()))
    assert spins > 5000
    assert sum(isinstance(report, messages.StepReport) for report in reports) < 20


def test_an_engine_whose_step_hung_stays_silent_until_its_process_ends(tmp_path: Path) -> None:
    """With one more heartbeat, /health would be 200 although no engine runs."""
    time = 100.0
    beat = Beat()
    job = Job("m", {}, [f"ipc://{tmp_path}/http"], beat.descriptor, os.getppid())
    engine, hello, slowest, *_ = fake_engine.build(job)

    class Steps(Clock):
        def now(self) -> float:
            return time

    def hang() -> Outcome:
        nonlocal time
        time += 10.0
        engine.fault = "a rank has not answered"
        return Outcome()

    engine.clock, engine.step = Steps(), hang  # type: ignore[method-assign]
    loop = EngineLoop(engine, hello, job, slowest)
    engine.submit(Request("0.1.r", [5], SamplingParams(max_tokens=4)))
    loop.run()
    assert time == 110.0
    assert beat.silence(time) == 10.0 > beat.patience


def order() -> messages.Submit:
    return messages.Submit(1, "r", [5], SamplingParams(max_tokens=4))
