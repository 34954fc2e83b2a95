"""Track: one request on its way from the engine's events to what its caller gets."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.core.plan import PromptLogprobs, TokenLogprobs
from chairlift.core.request import FinishReason, Request, Sequence
from chairlift.text.answer import AnswerReader, best, describe, readers_of
from chairlift.text.outputs import Chunk, RequestMetrics, RequestOutput
from chairlift.text.tokenizer import Tokenizer


class Track:
    """One request on its way: the readers of its answers, and its times."""

    def __init__(
        self, request: Request, text: str | None, tokenizer: Tokenizer | None, *, is_streamed: bool = False
    ) -> None:
        self.request = request
        self._is_streamed = is_streamed  # otherwise nobody takes chunks
        # Otherwise its tokens are read when it ends: on the way they mean nothing to anybody.
        self._is_watched = is_streamed or bool(request.params.stop) or request.scored is not None
        params = request.params
        self._tokenizer = tokenizer if params.detokenize else None
        self._readers = readers_of(request.prompt, params, tokenizer)
        self.output = RequestOutput(
            request_id=request.id,
            prompt=text,
            prompt_token_ids=request.prompt,
            outputs=[reader.answer for reader in self._readers],
            metrics=RequestMetrics(request.arrival),
        )
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * len(request.prompt)
        self._chunks: list[Chunk] = []

    @property
    def wants_tokens(self) -> bool:
        """Whether it must be told of tokens that end nothing; each waits for its first, whose time is known then."""
        return not self.output.finished and (self._is_watched or self.output.metrics.first_token is None)

    def read(
        self,
        now: Callable[[], float],
        sequence: Sequence,
        token: int | None,
        ended: FinishReason | None = None,
        scored: TokenLogprobs | None = None,
        prompt_scores: PromptLogprobs | None = None,
        error: str | None = None,
    ) -> bool:
        """Take in one event; True if the answer's text just met a stop string, so that the sequence must be stopped."""
        if prompt_scores is not None:
            self._read_prompt_scores(prompt_scores)
        if token is None and ended is None:
            return False  # news of the prompt alone
        if sequence.index >= len(self._readers):
            return False  # one of more beams than there are answers ends with its request
        output, index, reader = self.output, sequence.index, self._readers[sequence.index]
        was_open = not reader.has_ended()
        if was_open and not self._is_watched and not self._catch_up(reader, sequence, token):
            token = None
        new = reader.read(token, ended, scored, error)
        metrics = output.metrics
        if token is not None:
            if metrics.first_token is None:
                metrics.first_token, metrics.started = now(), sequence.started
                output.num_cached_tokens = sequence.cached
            metrics.output_tokens += was_open
        reason = reader.answer.finish_reason
        if self._is_streamed and was_open and (token is not None or reason):
            self._chunks.append(Chunk(new, [] if token is None else [token], index, reason))
        if reason is None:
            return False
        if ended in ("abort", "error") and index == 0:
            for other in self._readers:  # siblings that were never born end with it
                other.answer.finish_reason = other.answer.finish_reason or str(ended)
        if not output.finished and all(answer.finish_reason for answer in output.outputs):
            output.finished, metrics.finished = True, now()
            output.outputs = best(output.outputs, self.request.params.n)
        return was_open and ended is None

    def _catch_up(self, reader: AnswerReader, sequence: Sequence, token: int | None) -> bool:
        """Read the tokens before `token` that were not told one by one; whether `token` itself is still unread.

        The number of tokens read decides what is new, not the number of events: a token is read once, whatever tells
        of it.
        """
        unread = sequence.tokens[sequence.prompt_length + len(reader.answer.token_ids) :]
        is_new = token is not None and bool(unread)
        if is_new:
            unread.pop()
        reader.catch_up(unread)
        self.output.metrics.output_tokens += len(unread)
        return is_new

    def _read_prompt_scores(self, scores: PromptLogprobs) -> None:
        told = self.output.prompt_logprobs
        if told is not None:
            start, entries = scores
            told[start : start + len(entries)] = [describe(entry, self._tokenizer) for entry in entries]

    def fail(self, error: str, now: float) -> None:
        """End all answers that have not ended: the request failed outside the engine."""
        for reader in self._readers:
            if not reader.has_ended():
                reader.answer.finish_reason, reader.answer.error = FinishReason.ERROR.value, error
        self.output.finished, self.output.metrics.finished = True, now
        self.output.outputs = best(self.output.outputs, self.request.params.n)

    def take_chunks(self) -> list[Chunk]:
        """What has come since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks
