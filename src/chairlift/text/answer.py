"""AnswerReader: the tokens of one sequence as the text of one answer."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.params import SamplingParams
from chairlift.core.request import FinishReason
from chairlift.core.step import TokenLogprobs
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.outputs import Answer, Chunk, Logprob
from chairlift.text.tokenizer import Tokenizer


class AnswerReader:
    """Builds an Answer from a sequence's tokens, and ends it at a stop string."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        keep_scores: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self.answer = Answer(index)
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = None
        if self._tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                prompt_ids=prompt,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                kept=kept,
            )
        if params.logprobs is not None and keep_scores:
            self.answer.logprobs = []
        if params.logprobs is not None or params.use_beam_search or params.width > params.n:
            self.answer.cumulative_logprob = 0.0  # beams and best_of are ranked by it

    def read(
        self,
        tokens: Sequence[int],
        reason: FinishReason | None = None,
        scores: Sequence[TokenLogprobs] = (),
        error: str | None = None,
    ) -> Chunk | None:
        """Read the next tokens, and the sequence's end if it has ended; return None if the answer had ended before.

        A stop string ends the answer with the token that completes it: later tokens are dropped. `scores` has one entry
        per token, or none.
        """
        answer, detokenizer = self.answer, self._detokenizer
        if answer.finish_reason is not None:
            return None
        text = ""
        if detokenizer is not None and tokens:
            # A stop token or eos is a token of the answer, but not part of its text.
            is_cut = reason is FinishReason.STOP and not self._params.include_stop_str_in_output
            text = detokenizer.push(tokens[:-1] if is_cut else tokens)
            if detokenizer.stop_tokens is not None:
                tokens = tokens[: detokenizer.stop_tokens - len(answer.token_ids)]
        answer.token_ids += tokens
        logprobs = self._score(scores[: len(tokens)]) if scores else None
        if reason is not None or (detokenizer is not None and detokenizer.stop_tokens is not None):
            text += self._end(tokens, reason, error)
        answer.text += text
        return Chunk(text, list(tokens), answer.index, answer.finish_reason, answer.stop_reason, logprobs)

    def end(self, reason: FinishReason, error: str | None) -> None:
        """End the answer as it is, unless it has ended."""
        if self.answer.finish_reason is None:
            self.answer.finish_reason, self.answer.error = reason.value, error

    def _score(self, scores: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]] | None:
        answer = self.answer
        answer.cumulative_logprob = sum((scored.logprob for scored in scores), answer.cumulative_logprob or 0.0)
        if answer.logprobs is None:
            return None
        found = [describe(scored, self._tokenizer) for scored in scores]
        answer.logprobs += found
        return found

    def _end(self, tokens: Sequence[int], reason: FinishReason | None, error: str | None) -> str:
        """Record the finish reason; return the text that was held back until now."""
        answer, detokenizer = self.answer, self._detokenizer
        text = "" if detokenizer is None else detokenizer.finish()
        if detokenizer is not None and detokenizer.stopped is not None and error is None:
            answer.finish_reason, answer.stop_reason = FinishReason.STOP.value, detokenizer.stopped
        elif reason is not None:
            is_complete = reason is FinishReason.COMPLETE
            answer.finish_reason, answer.error = (FinishReason.STOP if is_complete else reason).value, error
            if reason is FinishReason.STOP and tokens and tokens[-1] in self._params.stop_token_ids:
                answer.stop_reason = tokens[-1]
        return text


def describe(scored: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the log-probabilities of the chosen token and of its likeliest alternatives, by token id."""

    def spell(token: int) -> str:
        return tokenizer.token_text(token) if tokenizer is not None else ""

    found = {token: Logprob(value, rank, spell(token)) for rank, (token, value) in enumerate(scored.top, 1)}
    found[scored.token] = Logprob(scored.logprob, scored.rank, spell(scored.token))
    return found
