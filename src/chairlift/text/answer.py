"""One answer as text: from the engine's events of a sequence to what a caller reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.core.params import SamplingParams
from chairlift.core.plan import TokenLogprobs
from chairlift.core.request import FinishReason
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer


class Logprob(NamedTuple):
    """A token's log-probability, its rank among all, and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class Answer:
    """What has come so far of one of a request's n answers."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for the model's own end
    error: str | None = None


class AnswerReader:
    """Turns a sequence's events into an Answer, and says when its text has met a stop string."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        keep_scores: bool = True,
    ) -> None:
        self.answer = Answer(index)
        self._params = params
        tokenizer = tokenizer if params.detokenize else None
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_ids=prompt,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        if params.logprobs is not None and keep_scores:
            self.answer.logprobs = []
        if params.logprobs is not None or params.use_beam_search or params.width > params.n:
            self.answer.cumulative_logprob = 0.0  # what answers are chosen by is told, too

    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.answer.finish_reason is not None

    def read(
        self,
        token: int | None,
        reason: FinishReason | None = None,
        scored: TokenLogprobs | None = None,
        error: str | None = None,
    ) -> str:
        """The new text that is safe to show; after a stop string, nothing more is taken in."""
        answer = self.answer
        if answer.finish_reason is not None:
            return ""
        new = ""
        if token is not None:
            new = self._take(token, scored, reason is FinishReason.STOP)
        if answer.finish_reason is None and reason is not None:
            answer.error = error
            new += self._finish(token, reason)
        answer.text += new
        return new

    def catch_up(self, tokens: list[int]) -> None:
        """Take in tokens for which nobody waited one by one."""
        self.answer.token_ids += tokens
        if self._detokenizer is not None:
            self.answer.text += self._detokenizer.push(tokens)

    def _take(self, token: int, scored: TokenLogprobs | None, is_stop: bool) -> str:
        answer = self.answer
        answer.token_ids.append(token)
        if scored is not None:
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + scored.logprob
            if answer.logprobs is not None:
                answer.logprobs.append(describe(scored, self._tokenizer))
        if self._detokenizer is None or (is_stop and not self._params.include_stop_str_in_output):
            return ""
        new = self._detokenizer.push([token])
        if self._detokenizer.stopped is not None:
            answer.finish_reason, answer.stop_reason = FinishReason.STOP.value, self._detokenizer.stopped
        return new

    def _finish(self, token: int | None, reason: FinishReason) -> str:
        answer = self.answer
        answer.finish_reason = reason.value
        if reason is FinishReason.STOP and token in self._params.stop_token_ids:
            answer.stop_reason = token
        if self._detokenizer is None:
            return ""
        new = self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            answer.finish_reason, answer.stop_reason = FinishReason.STOP.value, self._detokenizer.stopped
        return new


def readers_of(
    prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None, *, keep_scores: bool = True
) -> list[AnswerReader]:
    """One for each answer that the engine tells of: it chooses among beams itself, and `best` among others."""
    count = params.n if params.use_beam_search else params.width
    return [AnswerReader(index, prompt, params, tokenizer, keep_scores=keep_scores) for index in range(count)]


def best(answers: list[Answer], n: int) -> list[Answer]:
    """The n likeliest of all, the best first and numbered anew; what failed goes before them, so that it is seen.

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


def describe(scored: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The chosen token and its likeliest rivals, by id."""

    def spell(token: int) -> str:
        return tokenizer.token_text(token) if tokenizer is not None else ""

    found = {token: Logprob(value, rank, spell(token)) for rank, (token, value) in enumerate(scored.top, 1)}
    found[scored.token] = Logprob(scored.logprob, scored.rank, spell(scored.token))
    return found
