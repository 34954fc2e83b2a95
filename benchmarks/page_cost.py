"""What the live page costs: the engine's time for recording, and the frames that a browser draws.

    python benchmarks/page_cost.py            # the recorder, and a browser if there is one

256 sequences run, 200 steps a second, ten records a second. The recorder's time is measured around its own calls, in
CPU time, and the share is that of a second. The browser plays a simulated run of as many sequences and steps.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time  # of this thread alone: other load does not count
from typing import Any

import msgspec

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import Step, StepResult
from chairlift.engine.engine import Engine
from chairlift.engine.recorder import Recorder

ROWS, STEPS_S, RECORDS_S = 256, 200, 10
STEPS, REPEATS = 1000, 5
TESTS = Path(__file__).parents[1] / "tests"


class Instant:
    """An executor that answers at once."""

    def launch(self, step: Step) -> StepResult:
        return StepResult([1] * len(step.sample_rows))

    def choose(self, launched: StepResult, masks: list[bytes | None]) -> None: ...

    def collect(self, launched: StepResult) -> StepResult:
        return launched


class Clock:
    now = staticmethod(time.monotonic)


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        began = thread_time()
        found = call(*arguments)
        times.append(thread_time() - began)
        return found

    return run


def recorder_cost(*, lasting: bool, waiting: int) -> dict[str, float]:
    """Return the microseconds of a step, of a record and of a look, and their share of a second."""
    limits, pool = Limits(ROWS, 8192, 4000, 8), BlockPool(ROWS * 260, 16)
    engine = Engine(Scheduler(limits, pool, prefix_cache=PrefixCache(pool)), Instant(), Clock(), overlap=True)
    for number in range(ROWS + waiting):
        params = SamplingParams(max_tokens=3000 if lasting else 50 + number * 37 % 200, ignore_eos=True)
        engine.submit(Request(str(number), [1] * (100 + number % 16), params, tenant=f"tenant-{number % 5}"))
    recorder = Recorder(engine)
    steps: list[float] = []
    records: list[float] = []
    looks: list[float] = []
    assert engine.on_applied is not None
    engine.on_applied = timed(engine.on_applied, steps)
    for _ in range(60):
        engine.step()
    steps.clear()
    size = 0
    for number in range(STEPS):
        engine.step()
        if number % (STEPS_S // RECORDS_S) == 0:
            began = thread_time()
            record = recorder.take()
            raw = msgspec.json.encode(record)
            (looks if record and "look" in record else records).append(thread_time() - began)
            size += len(raw)
    empty: list[float] = []
    for _ in range(1000):
        timed(lambda: None, empty)()
    us = {"step_us": 1e6 * (median(steps) - median(empty)), "record_us": 1e6 * median(records)}
    us["look_us"] = 1e6 * median(looks)
    # A look is repeated so rarely that it takes 0.2% at most (engine/recorder.py).
    share = (us["step_us"] * STEPS_S + us["record_us"] * RECORDS_S) / 1e6 + min(0.002, 2 * us["look_us"] / 1e6)
    return {**us, "share": share, "bytes_s": size / STEPS * STEPS_S}


def browser_frames() -> dict[str, float] | None:
    """Return the steps and frames a second of a page that plays 256 sequences; None without a browser."""
    sys.path[:0] = [str(TESTS / "ui")]
    from browser import CHROMIUM, chromium, visiting

    if CHROMIUM is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "run.jsonl")
        lengths = ("--requests", "3000", "--prompt-tokens", "64..256", "--output-tokens", "64..512")
        command = [sys.executable, "-m", "chairlift", "simulate", "uniform", *lengths, "--rate", "inf"]
        subprocess.run([*command, "--record-view", file], check=True, capture_output=True)
        shown = [sys.executable, "-m", "chairlift", "view", file, "--port", "0"]
        with subprocess.Popen(shown, stderr=subprocess.PIPE, text=True) as view, chromium() as browser:
            assert view.stderr is not None
            url = next(word for line in view.stderr for word in line.split() if word.startswith("http"))
            with visiting(browser, url) as visit:
                visit.until("player.length > 0")
                rate = f"{STEPS_S} / (histories[0].end / (player.length / 1e6))"
                visit.known(f"[player.speed = {rate}, player.seek(histories, 0.1)]")
                visit.until("histories[0].column(histories[0].cursor - 1).rows.length > 200")
                frames, steps, began = visit.known("[chairlift.frames, histories[0].cursor, performance.now()]")
                visit.page.wait_for_timeout(8000)
                more, further, ended = visit.known("[chairlift.frames, histories[0].cursor, performance.now()]")
            view.terminate()
    seconds = (ended - began) / 1000
    return {"frames_s": (more - frames) / seconds, "steps_s": (further - steps) / seconds}


def main() -> None:
    """Print both."""
    for name, lasting in (("decodes alone", True), ("about two requests end and begin in each step", False)):
        # The fastest of several: on a machine with other load, the others are slower for that alone.
        found = min(
            (recorder_cost(lasting=lasting, waiting=1000) for _ in range(REPEATS)), key=lambda each: each["share"]
        )
        print(
            f"{ROWS} sequences, {name}: {found['step_us']:.1f} us a step, {found['record_us']:.0f} us a record, "
            f"{found['look_us']:.0f} us a look; {found['share']:.2%} of the time at {STEPS_S} steps/s, "
            f"{found['bytes_s'] / 1000:.0f} kB/s"
        )
    frames = browser_frames()
    print(
        "no browser"
        if frames is None
        else f"the browser drew {frames['frames_s']:.0f} frames/s at {frames['steps_s']:.0f} steps/s"
    )


if __name__ == "__main__":
    main()
