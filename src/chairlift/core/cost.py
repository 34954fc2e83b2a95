"""How long a step takes: the model behind latency budgets, preemption by cost, and simulation."""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 0.1  # of the error of each step is taken as news
_SANE = 4.0  # a step that took so many times what was expected was held up by something else


@dataclass(slots=True)
class Work:
    """What a step does, in numbers."""

    tokens: int = 0  # through the linear layers
    context: int = 0  # cached tokens that decodes read
    pairs: int = 0  # of a prompt's token and one before it


@dataclass(slots=True)
class Cost:
    """Seconds of a step: a fixed part, the weights' bytes or the tokens' arithmetic, and attention.

    The figures start from what the hardware was measured or is said to do; `learn` corrects them by each step that ran.
    """

    fixed: float = 1e-3
    weights: float = 0.0  # to read them once, however few tokens there are
    token: float = 1e-4
    context: float = 0.0
    pair: float = 0.0
    block_copy: float = 1e-4  # to move one block between the device and the host

    def seconds(self, work: Work) -> float:
        """How long a step with this work takes."""
        return (
            self.fixed
            + max(self.weights, self.token * work.tokens)
            + self.context * work.context
            + self.pair * work.pairs
        )

    def prompt_seconds(self, tokens: int, start: int = 0) -> float:
        """To compute so many tokens of a prompt behind `start` others."""
        return self.seconds(Work(tokens, 0, pairs_of(start, tokens)))

    def tokens_within(self, seconds: float, work: Work, start: int) -> int:
        """How many tokens of a prompt, behind `start` others of it, fit a step that has this work and may take so long.

        >>> Cost(fixed=0.01, token=0.001).tokens_within(0.03, Work(tokens=5), start=0)
        15
        """
        left = seconds - self.fixed - self.context * work.context - self.pair * work.pairs
        if self.weights > left:
            return 0
        each = self.token + self.pair * start
        return max(0, int((left - self.token * work.tokens) / each + 1e-6)) if each else 0

    @property
    def knee(self) -> int:
        """The step size whose tokens cost at most a quarter more than in the largest step."""
        if not self.token:
            return 0
        return int(max(4 * self.fixed / self.token, 1.25 * self.weights / self.token))

    def learn(self, work: Work, seconds: float) -> None:
        """A step with this work took so long: each part is corrected in proportion to what it had in the prediction."""
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
        # One that contributed all takes all of the error; a part that was not there learns nothing.
        self.fixed = max(0.0, self.fixed * (1 + gain * self.fixed))
        if is_bound:
            self.weights = max(0.0, self.weights * (1 + gain * linear))
        else:
            self.token = max(1e-12, self.token * (1 + gain * linear))
        self.context = max(0.0, self.context * (1 + gain * read))
        self.pair = max(0.0, self.pair * (1 + gain * attend))


def pairs_of(start: int, count: int) -> int:
    """How many (token, earlier token or itself) pairs `count` tokens behind `start` others make."""
    return count * start + count * (count + 1) // 2
