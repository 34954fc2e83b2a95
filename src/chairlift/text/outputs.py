"""The results that a caller reads, with vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.core.constraint import Thinking
from chairlift.text.message import PLAIN, Message, MessageFormat, read_message


class Logprob(NamedTuple):
    """A token's log-probability, its rank in the vocabulary, and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class Answer:
    """One of a request's n answers, complete or in progress."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for eos
    error: str | None = None


CompletionOutput = Answer


@dataclass(slots=True)
class Chunk:
    """The new part of one answer."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token, if requested

    def join(self, later: Chunk) -> None:
        """Append the chunk that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """When a request arrived, started and ended, in seconds of one clock."""

    arrival: float
    started: float | None = None  # when it first entered the batch
    first_token: float | None = None
    finished: float | None = None
    output_tokens: int = 0  # of all its answers, including those that best_of drops

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.first_token is None or self.finished is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    form: MessageFormat = PLAIN  # how a conversation's answers are divided
    thinking: Thinking | None = None  # how its answers' reasoning begins and ends, if the model reasons
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at admission; set with the first token
    num_drafted_tokens: int = 0  # draft tokens that speculation checked, and those that were accepted
    num_accepted_tokens: int = 0

    @property
    def messages(self) -> list[Message]:
        """Each answer's content, reasoning and tool calls."""
        return [read_message(self.form, answer.text) for answer in self.outputs]

    @property
    def error(self) -> str | None:
        """Why there is no answer: the request was rejected, or it failed."""
        return next((answer.error for answer in self.outputs if answer.error), None)

    @staticmethod
    def refused(request_id: str, prompt: str | None, now: float, error: str) -> RequestOutput:
        """Return the output of a prompt that was rejected."""
        answer = CompletionOutput(finish_reason="error", error=error)
        return RequestOutput(request_id, prompt, [], [answer], RequestMetrics(now, finished=now), finished=True)


def best(answers: list[Answer], n: int) -> list[Answer]:
    """Return the n likeliest answers, the likeliest first and renumbered; failed answers precede all others.

    >>> found = best([Answer(0, "a", cumulative_logprob=-3.0), Answer(1, "b", cumulative_logprob=-2.0)], 1)
    >>> found[0].text, found[0].index
    ('b', 0)
    """
    if len(answers) == n:
        return answers
    ranked = sorted(answers, key=lambda answer: (answer.error is None, -(answer.cumulative_logprob or 0.0)))
    for index, answer in enumerate(ranked[:n]):
        answer.index = index
    return ranked[:n]
