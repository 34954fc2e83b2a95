"""RequestReader: builds a request's answers from the engine's updates, for LLM, AsyncEngine and the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from chairlift.core.params import SamplingParams
from chairlift.core.request import FinishReason
from chairlift.core.step import PromptLogprobs, TokenLogprobs
from chairlift.text.answer import AnswerReader, describe
from chairlift.text.message import PLAIN, MessageFormat
from chairlift.text.outputs import Chunk, RequestMetrics, RequestOutput, best
from chairlift.text.tokenizer import Tokenizer


class Update(NamedTuple):
    """The engine's report on one sequence: any number of new tokens, and its end."""

    answer: int  # index of the answer
    tokens: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    scores: Sequence[TokenLogprobs] = ()  # one per token, or none
    prompt_scores: PromptLogprobs | None = None
    error: str | None = None
    started: float | None = None  # when the sequence first entered the batch; read with the request's first token
    cached: int = 0  # prompt tokens found in the prefix cache then
    drafts: tuple[int, int] | None = None  # of this answer: draft tokens checked and accepted so far


class RequestReader:
    """Builds the RequestOutput of one request from its updates."""

    def __init__(
        self,
        request_id: str,
        text: str | None,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        arrival: float,
        *,
        keep_scores: bool = True,  # otherwise log-probabilities are only summed: the caller keeps them itself
        form: MessageFormat = PLAIN,
    ) -> None:
        self._n = params.n
        self._drafts: dict[int, tuple[int, int]] = {}  # by answer
        self._tokenizer = tokenizer if params.detokenize else None
        # The engine ranks beams itself and reports the n best; other answers are ranked here, by `best`.
        count = params.n if params.use_beam_search else params.width
        kept = frozenset[int]() if tokenizer is None else form.kept_ids(tokenizer)
        self._readers = [
            AnswerReader(index, prompt, params, tokenizer, keep_scores=keep_scores, kept=kept) for index in range(count)
        ]
        self.output = RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=prompt,
            outputs=[reader.answer for reader in self._readers],
            metrics=RequestMetrics(arrival),
            form=form,
        )
        if params.prompt_logprobs is not None and keep_scores:
            self.output.prompt_logprobs = [None] * len(prompt)

    def read(self, update: Update, now: Callable[[], float]) -> Chunk | None:
        """Read one update; return the chunk that it adds to its answer, or None if it adds nothing.

        After a stop string the chunk has a finish_reason though the update has none: the caller must then have the
        engine stop the sequence.
        """
        if update.prompt_scores is not None:
            self._read_prompt_scores(update.prompt_scores)
        reason = update.finish_reason
        if (not update.tokens and reason is None) or update.answer >= len(self._readers):
            return None  # an update of the prompt alone, or of a beam outside the n best
        if update.drafts is not None:
            self._count_drafts(update.answer, update.drafts)
        chunk = self._readers[update.answer].read(update.tokens, reason, update.scores, update.error)
        if chunk is None:
            return None  # tokens computed before the engine stopped the sequence
        metrics = self.output.metrics
        if chunk.token_ids:
            if metrics.first_token is None:
                metrics.first_token, metrics.started = now(), update.started
                self.output.num_cached_tokens = update.cached
            metrics.output_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._finish(now)
        return chunk

    def _count_drafts(self, answer: int, drafts: tuple[int, int]) -> None:
        known = self._drafts.get(answer, (0, 0))
        self._drafts[answer] = drafts
        self.output.num_drafted_tokens += drafts[0] - known[0]
        self.output.num_accepted_tokens += drafts[1] - known[1]

    def unread(self, index: int, tokens: list[int], prompt_length: int) -> list[int]:
        """Return the output tokens of a sequence that have not been read yet; `tokens` includes the prompt."""
        if index >= len(self._readers):
            return []
        return tokens[prompt_length + len(self._readers[index].answer.token_ids) :]

    def end(self, reason: FinishReason, error: str | None, now: Callable[[], float]) -> None:
        """End all answers that have not ended."""
        for reader in self._readers:
            reader.end(reason, error)
        self._finish(now)

    def _finish(self, now: Callable[[], float]) -> None:
        """Rank the answers once all have ended."""
        output = self.output
        if not output.finished and all(answer.finish_reason for answer in output.outputs):
            output.finished, output.metrics.finished = True, now()
            output.outputs = best(output.outputs, self._n)

    def _read_prompt_scores(self, scores: PromptLogprobs) -> None:
        found = self.output.prompt_logprobs
        if found is not None:
            start, entries = scores
            found[start : start + len(entries)] = [describe(entry, self._tokenizer) for entry in entries]
