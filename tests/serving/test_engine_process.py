"""The engine's loop: what it sends, and what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import fake_engine
import zmq

from chairlift.core.plan import Outcome
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
        engine, hello, slowest = fake_engine.build(job)
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
    assert sum(isinstance(report, messages.Batch) for report in reports) < 20


def order() -> messages.Submit:
    values = {"key": 1, "id": "r", "prompt": [5], "arrival": 0.0, "seed": 0, "max_tokens": 4, "min_tokens": 0, "n": 1}
    values |= {"best_of": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    values |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}, "allowed_token_ids": None}
    values |= {"stop_ids": [], "bad_words": [], "logprobs": None, "prompt_logprobs": None, "tenant": "", "weight": 1.0}
    return messages.Submit(**values, priority=0, deadline=None, endpoint="", salt="")
