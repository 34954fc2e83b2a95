"""An engine process with an executor that only pretends: real scheduler, real sockets, steps as long as told.

The environment says how: FAKE_STEP (seconds a step), FAKE_SEQUENCES, FAKE_BLOCKS (of the cache and of host memory),
FAKE_LENGTH (of the context), FAKE_VOCABULARY, FAKE_HANG (the step that never ends), FAKE_ABSENT (a file: the engine
starts when it is gone), FAKE_FAULT (a file: while it exists every step fails, with the error that it names).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.errors import DeviceError
from chairlift.core.limits import Limits
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.settings import Settings
from chairlift.core.step import Candidates, Sampling, Step, StepResult, TokenLogprobs
from chairlift.engine.engine import Engine
from chairlift.serving.engine_process import Job, Started, main
from chairlift.serving.messages import Hello

STEP = float(os.environ.get("FAKE_STEP", "0.005"))
SEQUENCES = int(os.environ.get("FAKE_SEQUENCES", "64"))
HANG = int(os.environ.get("FAKE_HANG", "0"))
ABSENT = Path(os.environ.get("FAKE_ABSENT", "/nonexistent"))
FAULT = Path(os.environ.get("FAKE_FAULT", "/nonexistent"))
ERRORS = {"device": DeviceError("the device fell off the bus"), "step": RuntimeError("this step cannot be computed")}
LENGTH = int(os.environ.get("FAKE_LENGTH", "512"))
VOCABULARY = int(os.environ.get("FAKE_VOCABULARY", "320"))
BLOCK = 16
BLOCKS = int(os.environ.get("FAKE_BLOCKS", SEQUENCES * LENGTH // BLOCK))


class Clock:
    def now(self) -> float:
        return time.monotonic()


class Pretender:
    """Tokens that follow from position alone: text, never an end; all are as likely as the others."""

    def __init__(self) -> None:
        self._steps = 0
        self._samplings: dict[int, Sampling] = {}

    def launch(self, step: Step) -> StepResult:
        self._steps += 1
        self._samplings |= {each.row: each.sampling for each in step.newcomers}
        time.sleep(1e9 if HANG and self._steps == HANG else STEP)
        if FAULT.exists():
            raise ERRORS[FAULT.read_text()]
        positions = [start + i + 1 for start, count in zip(step.starts, step.counts, strict=True) for i in range(count)]
        tokens = [100 + positions[at] % 100 for at in step.sampled_at]
        return StepResult(tokens, list(map(self._score, step.sample_rows, tokens)))

    def _score(self, row: int, token: int) -> TokenLogprobs | Candidates | None:
        sampling = self._samplings[row]
        if sampling.alternatives is None:
            return None
        top = [((token + i) % VOCABULARY, -1.0) for i in range(sampling.alternatives)]
        if not sampling.params.use_beam_search:
            return TokenLogprobs(token, -1.0, 1, top)
        count = sampling.params.width + len(sampling.stop_ids)
        return Candidates([(token + i) % VOCABULARY for i in range(count)], [-1.0] * count, top)

    def collect(self, launched: StepResult) -> StepResult:
        return launched


def build(job: Job) -> Started:
    while ABSENT.exists():
        time.sleep(0.05)
    limits = Limits(SEQUENCES, max(512, SEQUENCES), LENGTH, VOCABULARY)
    pool, host = BlockPool(BLOCKS, BLOCK), BlockPool(BLOCKS, BLOCK)
    settings = Settings.of(**job.settings)
    known = PrefixCache(pool) if settings.cache.prefix_cache else None
    scheduler = assemble_scheduler(settings.scheduling, limits, pool, host, Cost(), known)
    hello = Hello(
        model=job.model,
        device="none",
        dtype="none",
        max_sequences=SEQUENCES,
        step_tokens=limits.step_tokens,
        max_length=LENGTH,
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        kv_tokens=pool.total * BLOCK,
        capacity=f"{pool.total * BLOCK:,} tokens",
        eos_ids=[1],
    )
    return Started(Engine(scheduler, Pretender(), Clock()), hello, 0.0)


if __name__ == "__main__":
    main(build)
