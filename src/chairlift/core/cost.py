"""The cost model of a step's duration, for latency budgets, preemption by cost, and simulation."""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 0.1  # share of each step's prediction error that corrects the model
_SANE = 4.0  # times the prediction: a longer step was delayed by something else and counts as this long


@dataclass(slots=True)
class Work:
    """The work of a step, as the cost model counts it."""

    tokens: int = 0  # input tokens of the linear layers
    context: int = 0  # cached tokens that decodes read
    pairs: int = 0  # (prompt token, earlier token or itself), for attention
    samples: int = 0  # tokens that are chosen: the head computes their logits


@dataclass(slots=True)
class Cost:
    """Seconds of a step: a fixed part, the larger of reading the weights and computing the tokens, and attention.

    The coefficients start from measured or published hardware figures; `learn` corrects them with each finished step.
    """

    fixed: float = 1e-3
    weights: float = 0.0  # to read them once, however few tokens the step has
    token: float = 1e-4
    context: float = 0.0
    pair: float = 0.0
    sample: float = 0.0
    block_copy: float = 1e-4  # to move one block between the device and the host

    def seconds(self, work: Work) -> float:
        """Predict the seconds of a step with this work."""
        return (
            self.fixed
            + max(self.weights, self.token * work.tokens)
            + self.context * work.context
            + self.pair * work.pairs
            + self.sample * work.samples
        )

    def prompt_seconds(self, tokens: int, start: int = 0) -> float:
        """Predict the seconds to prefill `tokens` prompt tokens after the first `start`."""
        return self.seconds(Work(tokens, 0, pairs_of(start, tokens)))

    def tokens_within(self, seconds: float, work: Work, start: int) -> int:
        """Return how many more prompt tokens, from position `start`, fit in a step of `seconds` that has `work` now.

        >>> Cost(fixed=0.01, token=0.001).tokens_within(0.03, Work(tokens=5), start=0)
        15
        """
        left = seconds - self.fixed - self.context * work.context - self.pair * work.pairs - self.sample * work.samples
        if self.weights > left:
            return 0
        each = self.token + self.pair * start
        return max(0, int((left - self.token * work.tokens) / each + 1e-6)) if each else 0

    @property
    def knee(self) -> int:
        """The smallest step, in tokens, whose cost per token is within 25% of the largest step's."""
        if not self.token:
            return 0
        return int(max(4 * self.fixed / self.token, 1.25 * self.weights / self.token))

    def learn(self, work: Work, seconds: float) -> None:
        """Correct each coefficient by a finished step, in proportion to its part in the prediction."""
        if seconds <= 0:
            return
        expected = self.seconds(work)
        error = _RATE * (min(seconds, _SANE * expected) - expected)
        is_bound = self.weights >= self.token * work.tokens
        linear = self.weights if is_bound else self.token * work.tokens
        read, attend = self.context * work.context, self.pair * work.pairs
        squares = self.fixed**2 + linear**2 + read**2 + attend**2
        if not squares:
            return
        gain = error / squares
        # A part that made up the whole prediction takes the whole error; a part that was 0 stays as it is.
        self.fixed = max(0.0, self.fixed * (1 + gain * self.fixed))
        if is_bound:
            self.weights = max(0.0, self.weights * (1 + gain * linear))
        else:
            self.token = max(1e-12, self.token * (1 + gain * linear))
        self.context = max(0.0, self.context * (1 + gain * read))
        self.pair = max(0.0, self.pair * (1 + gain * attend))


def pairs_of(start: int, count: int) -> int:
    """Count the (token, earlier token or itself) pairs of `count` tokens from position `start`."""
    return count * start + count * (count + 1) // 2
