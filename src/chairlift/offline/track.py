"""Track: one request in this process, from the engine's events to the chunks and the output that its caller reads."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.core.request import FinishReason, Request, Sequence
from chairlift.core.step import PromptLogprobs, TokenLogprobs
from chairlift.text.message import PLAIN, MessageFormat
from chairlift.text.outputs import Chunk
from chairlift.text.reader import RequestReader, Update
from chairlift.text.tokenizer import Tokenizer

_CUT_SHORT = (FinishReason.ABORT, FinishReason.ERROR)


class Track:
    """Builds the chunks and the output of one request."""

    def __init__(
        self,
        request: Request,
        text: str | None,
        tokenizer: Tokenizer | None,
        *,
        is_streamed: bool = False,
        form: MessageFormat = PLAIN,
    ) -> None:
        self.request = request
        self._is_streamed = is_streamed
        # Other requests are read when they end: until then no caller needs their tokens.
        self._reads_each_token = is_streamed or bool(request.params.stop) or request.scored is not None
        self._reader = RequestReader(
            request.id, text, request.prompt, request.params, tokenizer, request.arrival, form=form
        )
        self.output = self._reader.output
        self._chunks: list[Chunk] = []

    @property
    def wants_tokens(self) -> bool:
        """Whether to call `read` for tokens that end no answer; the time of the first is always needed."""
        output = self.output
        return not output.finished and (self._reads_each_token or output.metrics.first_token is None)

    def read(
        self,
        now: Callable[[], float],
        sequence: Sequence,
        tokens: list[int] | tuple[int, ...],
        reason: FinishReason | None = None,
        scores: tuple[TokenLogprobs, ...] = (),
        prompt_scores: PromptLogprobs | None = None,
        error: str | None = None,
    ) -> bool:
        """Read an event of a sequence; return whether its text has a stop string, so that the engine must stop it."""
        if not self._reads_each_token and (tokens or reason is not None):
            if reason is None and sequence.is_done:
                return False  # a step brought several tokens: the event of its last one, with the reason, follows
            # All tokens since the last event that was read here, not only this event's: each is read once.
            tokens = self._reader.unread(sequence.index, sequence.tokens, sequence.prompt_length)
        drafts = (sequence.drafted, sequence.accepted) if sequence.drafted else None
        admitted = sequence.started, sequence.cached
        update = Update(sequence.index, tokens, reason, scores, prompt_scores, error, *admitted, drafts)
        chunk = self._reader.read(update, now)
        if reason in _CUT_SHORT and (not sequence.is_forked or sequence.is_search):
            self._reader.end(reason, error, now)  # the other answers have no sequences of their own to report
        if chunk is None:
            return False
        if self._is_streamed:
            self._chunks.append(chunk)
        return chunk.finish_reason is not None and reason is None

    def fail(self, error: str, now: Callable[[], float]) -> None:
        """End all answers that have not ended: the request failed outside the engine."""
        self._reader.end(FinishReason.ERROR, error, now)

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks
