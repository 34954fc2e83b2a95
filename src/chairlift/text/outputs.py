"""What a caller gets back, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.text.answer import Answer, Logprob

CompletionOutput = Answer


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one clock."""

    arrival: float
    started: float | None = None  # took its seat in the batch
    first_token: float | None = None
    finished: float | None = None
    output_tokens: int = 0  # of all its answers, those that best_of left out included

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
    num_cached_tokens: int = 0  # of the prompt: what the prefix cache had when it took its seat; known with a token

    @property
    def error(self) -> str | None:
        """Why there is no answer: the request was refused, or it failed."""
        return next((answer.error for answer in self.outputs if answer.error), None)

    @staticmethod
    def refused(request_id: str, prompt: str | None, now: float, error: str) -> RequestOutput:
        """What stands in the place of an answer to a prompt that could not be taken."""
        answer = CompletionOutput(finish_reason="error", error=error)
        return RequestOutput(request_id, prompt, [], [answer], RequestMetrics(now, finished=now), finished=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of a streamed answer."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
