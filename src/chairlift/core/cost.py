"""The cost model of a step's duration, for latency budgets, preemption by cost, and simulation."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import hypot, inf, sqrt

_RATE = 0.1  # share of each step's prediction error that corrects the model
_SANE = 4.0  # times the prediction: a longer step was delayed by something else and counts as this long


@dataclass(slots=True)
class Work:
    """The work of a step, as the cost model counts it."""

    tokens: int = 0  # input tokens of the linear layers
    context: int = 0  # cached tokens that decodes read
    pairs: int = 0  # (prompt token, earlier token or itself), for attention
    samples: int = 0  # tokens that are chosen: the head computes their logits
    prompts: int = 0  # slices of prompts


@dataclass(slots=True)
class Cost:
    """Seconds of a step: a fixed part, the linear layers, attention and sampling.

    The linear layers take the root of the sum of squares of reading the weights and computing the tokens: the larger of
    both where they differ, and more where they are equal, since kernels overlap the two only in part.

    The coefficients start from measured or published hardware figures; `learn` corrects them with each finished step.
    A measured `curve` gives the seconds of the linear layers by tokens, where kernels for few rows make the root wrong.
    Only simulations have one: it is not corrected, and budgets are computed from the root.
    """

    fixed: float = 1e-3
    weights: float = 0.0  # to read them once, however few tokens the step has
    token: float = 1e-4
    context: float = 0.0
    pair: float = 0.0
    sample: float = 0.0
    prompt: float = 0.0  # of each prompt slice, beside its tokens
    block_copy: float = 1e-4  # to move one block between the device and the host
    curve: tuple[tuple[float, float], ...] = ()  # (tokens, seconds), by tokens; linear between two

    def seconds(self, work: Work) -> float:
        """Predict the seconds of a step with this work."""
        linear = self._measured(work.tokens) if self.curve else hypot(self.weights, self.token * work.tokens)
        return self._others(work) + linear

    def _measured(self, tokens: int) -> float:
        """Return the curve's seconds; beyond its end, each token takes as long as in the largest steps."""
        curve = self.curve
        place = bisect_right(curve, (tokens, inf))
        if place == len(curve):
            last, seconds = curve[-1]
            return seconds + self.token * (tokens - last)
        above, high = curve[place]
        below, low = curve[place - 1] if place else curve[0]
        return low + (high - low) * (tokens - below) / (above - below) if above > below else high

    def _others(self, work: Work) -> float:
        """Predict the seconds of all but the linear layers."""
        attention = self.context * work.context + self.pair * work.pairs
        return self.fixed + attention + self.sample * work.samples + self.prompt * work.prompts

    def prompt_seconds(self, tokens: int, start: int = 0) -> float:
        """Predict the seconds to prefill `tokens` prompt tokens after the first `start`."""
        return self.seconds(Work(tokens, 0, pairs_of(start, tokens), prompts=1))

    def tokens_within(self, seconds: float, work: Work, start: int) -> int:
        """Return how many more prompt tokens, from position `start`, fit in a step of `seconds` that has `work` now.

        >>> Cost(fixed=0.01, token=0.001).tokens_within(0.03, Work(tokens=5), start=0)
        15
        """
        left, attend = seconds - self._others(work), self.pair * start
        excess = self.weights**2 + (self.token * work.tokens) ** 2 - left**2
        if left <= 0 or excess >= 0 or not (self.token or attend):
            return 0
        # The root of hypot(weights, token * (tokens + more)) = left - attend * more, in a form that never cancels.
        half = self.token**2 * work.tokens + left * attend
        return int(-excess / (half + sqrt(half**2 - (self.token**2 - attend**2) * excess)) + 1e-6)

    @property
    def knee(self) -> int:
        """The smallest step, in tokens, with a cost per token within 25% of the largest step's."""
        if not self.token:
            return 0
        over = 1.25**2 - 1
        return int((1.25 * self.fixed + sqrt(self.fixed**2 + over * self.weights**2)) / over / self.token)

    def learn(self, work: Work, seconds: float) -> None:
        """Correct each coefficient by a finished step, in proportion to its part in the prediction."""
        if seconds <= 0:
            return
        expected = self.seconds(work)
        error = _RATE * (min(seconds, _SANE * expected) - expected)
        linear = hypot(self.weights, self.token * work.tokens) or 1.0
        parts = {
            "fixed": self.fixed,
            "weights": self.weights**2 / linear,
            "token": (self.token * work.tokens) ** 2 / linear,
            "context": self.context * work.context,
            "pair": self.pair * work.pairs,
            "sample": self.sample * work.samples,
            "prompt": self.prompt * work.prompts,
        }
        squares = sum(part**2 for part in parts.values())
        if not squares:
            return
        gain = error / squares
        # A part that made up the whole prediction takes the whole error; a part that was 0 stays as it is.
        for name, part in parts.items():
            setattr(self, name, max(0.0, getattr(self, name) * (1 + gain * part)))
        self.token = max(1e-12, self.token)


def pairs_of(start: int, count: int) -> int:
    """Count the (token, earlier token or itself) pairs of `count` tokens from position `start`."""
    return count * start + count * (count + 1) // 2
