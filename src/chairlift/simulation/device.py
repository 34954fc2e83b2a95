"""A simulated device: an executor that computes nothing, and a clock that moves on by each step's predicted time."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.core.cost import Cost, Work, pairs_of
from chairlift.core.step import Bits, Sampling, Step, StepResult

IDLE = 2e-3  # seconds without a step after which the next one takes `wake` longer: caches and threads are cold
STOP = 1  # the token that ends an answer; all others are 0


class VirtualClock:
    """A clock that stands still until it is set."""

    __slots__ = ("_now",)

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    def reach(self, moment: float) -> None:
        """Advance to a moment; one that has passed changes nothing."""
        self._now = max(self._now, moment)


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device: when it ends, and its tokens."""

    end: float
    tokens: list[int]


class SimulatedDevice:
    """Runs steps one after the other, each as long as the cost model predicts.

    An answer's length is its request's seed: at that length a row gets the stop token, as if the model had ended there.
    The length is the device's knowledge alone, so a policy that needs it must predict it.
    """

    def __init__(self, cost: Cost, clock: VirtualClock, rows: int, wake: float = 0.0) -> None:
        self._cost = cost
        self._wake = wake
        self._clock = clock
        self.free_at = 0.0  # when the last step ends
        self._last = [0] * rows  # position of each row's last token
        self.busy = 0.0  # seconds of all steps

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step when the step before it ends."""
        for row, _, _, _, sampling in step.newcomers:
            self._last[row] = _last_position(sampling)
        seconds = self._cost.seconds(work_of(step)) if step.tokens else 0.0  # a step may only move blocks
        moves = step.saved, step.restored, step.spilled, step.loaded, step.received
        if any(moves):
            seconds += sum(map(len, moves)) * self._cost.block_copy
        start = self._clock.now()
        if start > self.free_at + IDLE:
            seconds += self._wake
        elif start < self.free_at:
            start = self.free_at
        self.free_at = start + seconds
        self.busy += seconds
        return LaunchedStep(self.free_at, self._choose(step))

    def _choose(self, step: Step) -> list[int]:
        """Return the token of each sample."""
        last, rows = self._last, step.sample_rows
        if step.tokens == len(rows) and rows is step.rows:  # decodes alone: a slice is a sample
            return [STOP if start + 1 >= last[row] else 0 for row, start in zip(rows, step.starts, strict=True)]
        ends = []  # position behind each token of the flat batch, only where a sample is
        places = iter(step.sampled_at)
        wanted = next(places, None)
        first = 0
        for start, count in zip(step.starts, step.counts, strict=True):
            while wanted is not None and wanted < first + count:
                ends.append(start + wanted - first + 1)
                wanted = next(places, None)
            first += count
        return [STOP if end >= last[row] else 0 for row, end in zip(rows, ends, strict=True)]

    def choose(self, launched: LaunchedStep, masks: list[Bits | None]) -> None:
        """Do nothing: simulated answers have no grammar."""

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Advance the clock to the step's end."""
        self._clock.reach(launched.end)
        return StepResult(launched.tokens)


def work_of(step: Step) -> Work:
    """Return the work of a step from its numbers."""
    decodes = len(step.counts) if step.tokens == len(step.counts) else -1
    if decodes >= 0:
        return Work(step.tokens, sum(step.starts), 0, len(step.sample_rows))
    context = pairs = prompts = 0
    for start, count in zip(step.starts, step.counts, strict=True):
        if count == 1:
            context += start
        else:
            pairs += pairs_of(start, count)
            prompts += 1
    return Work(step.tokens, context, pairs, len(step.sample_rows), prompts)


def _last_position(sampling: Sampling) -> int:
    return sampling.prompt_length + sampling.seed - 1
