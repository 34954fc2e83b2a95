"""Generation: turns the engine's updates of one prompt into chunks of text; Answering: all prompts of a call."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from chairlift.core.constraint import Thinking
from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.request import FinishReason
from chairlift.core.step import PromptLogprobs, TokenLogprobs
from chairlift.serving.admission import Admitted
from chairlift.serving.backlog import Backlog, size_of
from chairlift.serving.failures import Failure, broken, from_request, timed_out, unavailable
from chairlift.serving.fleet import Fleet
from chairlift.serving.messages import REFUSED, AnswerUpdate, Submit, decode_top, encode
from chairlift.serving.metrics import Metrics
from chairlift.serving.recording import Recording, Served
from chairlift.serving.reply_jobs import AnswerPart, OutputPart, decode_entries
from chairlift.text.message import PLAIN, MessageFormat
from chairlift.text.outputs import Chunk, RequestOutput
from chairlift.text.reader import RequestReader, Update
from chairlift.text.tokenizer import Tokenizer

_FAILED = (REFUSED, FinishReason.ERROR.value, FinishReason.ABORT.value)
_AT_ONCE = 64 << 10  # bytes of chunks per write


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt, ready for the engine."""

    text: str | None
    prompt: list[int]
    params: SamplingParams
    seed: int
    eos_ids: list[int]
    bad_words: list[list[int]]
    grammar: str = ""
    thinking: Thinking | None = None  # how the answers' reasoning begins and ends, if the model reasons
    form: MessageFormat = PLAIN
    prediction: list[int] = field(default_factory=list)  # tokens that the answer may repeat


@dataclass(frozen=True, slots=True)
class CallFields:
    """Fields that all prompts of a call share: its id, and the inputs of scheduling policies."""

    id: str
    endpoint: str
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    ttft: float | None = None  # target in seconds from arrival to the first token
    salt: str = ""  # only requests with the same salt share prefixes
    session: str = ""  # for the session routing policy


class Generation:
    """The answers to one prompt."""

    def __init__(self, group: Answering, encoded: EncodedPrompt, first_choice: int, admitted: Admitted) -> None:
        self.encoded = encoded
        self._group = group
        self._first_choice = first_choice
        self._admitted = admitted
        self._key = group.client.new_key()
        params = encoded.params
        self._reader = RequestReader(
            str(self._key),
            encoded.text,
            encoded.prompt,
            params,
            group.tokenizer,
            group.arrival,
            keep_scores=group.streams,
            form=encoded.form,
        )
        self.output = self._reader.output
        self.output.thinking = encoded.thinking
        # Log-probabilities of a reply that is not streamed, still encoded: a text process decodes them.
        self._scores: list[list[bytes]] = [[] for _ in self.output.outputs]
        self._prompt_scores: list[tuple[int, bytes]] = []
        self._order = {
            id(answer): index for index, answer in enumerate(self.output.outputs)
        }  # index before a beam search sorts the answers
        self._last_token = [0.0] * len(self._scores)
        # A beam that is not among the n best costs as much as one that is.
        self._cost = -(-params.width // params.n) if params.use_beam_search else 1
        self._has_ended = False

    def submit(self) -> None:
        """Send the prompt to the engine."""
        encoded, params, call = self.encoded, self.encoded.params, self._group.call
        order = Submit(
            key=self._key,
            id=call.id,
            prompt=encoded.prompt,
            params=params.for_engine(),
            arrival=self._group.arrival,
            seed=encoded.seed,
            eos_ids=encoded.eos_ids,
            bad_words=encoded.bad_words,
            tenant=call.tenant,
            weight=call.weight,
            priority=call.priority,
            deadline=None if call.ttft is None else self._group.arrival + call.ttft,
            endpoint=call.endpoint,
            salt=call.salt,
            grammar=encoded.grammar,
            # Only what forbids tokens concerns the engine.
            thinking=encoded.thinking
            if encoded.grammar or (encoded.thinking and encoded.thinking.budget is not None)
            else None,
            prediction=encoded.prediction,
        )
        self._group.metrics.submitted(len(encoded.prompt), params.width, params.max_tokens)
        if not self._has_ended:  # the engine may have ended while the previous prompt was sent
            self._group.client.submit(order, self, call.session)

    # ---- called by the EngineClient of its engine

    def take(self, update: AnswerUpdate) -> None:
        """Read an update at once, so that a stop string ends the answer before another step is planned."""
        if update.finish_reason in _FAILED:
            message = update.error or "the engine aborted the request"
            self._fail(from_request(RequestError(message)) if update.finish_reason == REFUSED else broken(message))
            return
        is_plain = update.finish_reason is None and update.logprobs is None and update.prompt_logprobs is None
        if is_plain and update.token is not None:  # nearly every update
            text_update = Update(
                update.index, (update.token,), None, (), None, None, update.started, update.cached, update.drafts
            )
        else:
            text_update = self._text_update(update)
        chunk = self._reader.read(text_update, time.monotonic)
        if chunk is None:
            return
        self._count(update.index, len(chunk.token_ids))
        if chunk.finish_reason is not None and update.finish_reason is None:
            self._group.client.stop(self._key, update.index)
        if self._group.streams:
            answer = self.output.outputs[update.index]
            if answer.logprobs:
                answer.logprobs.clear()  # the chunk holds them: they are sent once
            chunk.index += self._first_choice
            self._group.push(chunk)
        elif update.logprobs is not None and self.encoded.params.logprobs is not None:
            self._scores[update.index].append(encode(update.logprobs))
        if self.output.finished:
            self._end(str(chunk.finish_reason))

    def _text_update(self, update: AnswerUpdate) -> Update:
        """Convert an update, and decode its log-probabilities if they are streamed."""
        scored, prompt_scores, streams = update.logprobs, None, self._group.streams
        scores: tuple[TokenLogprobs, ...] = ()
        if scored is not None:
            top = decode_top(scored.top) if streams else []
            scores = (TokenLogprobs(scored.token, scored.logprob, scored.rank, top),)
        if (packed := update.prompt_logprobs) is not None:
            if streams:
                prompt_scores = PromptLogprobs(packed.start, decode_entries(packed.entries))
            else:
                self._prompt_scores.append((packed.start, bytes(packed.entries)))
        tokens = () if update.token is None else (update.token,)
        reason = None if update.finish_reason is None else FinishReason(update.finish_reason)
        return Update(
            update.index,
            tokens,
            reason,
            scores,
            prompt_scores,
            update.error,
            update.started,
            update.cached,
            update.drafts,
        )

    def part(self) -> OutputPart:
        """Return the prompt and its answers, for a reply that is not streamed."""
        params, output = self.encoded.params, self.output
        return OutputPart(
            output.prompt,
            output.prompt_token_ids,
            [
                AnswerPart(
                    answer.index,
                    answer.text,
                    answer.token_ids,
                    answer.finish_reason,
                    answer.stop_reason,
                    None if params.logprobs is None else self._scores[self._order[id(answer)]],
                )
                for answer in output.outputs
            ],
            output.metrics.output_tokens,
            output.num_cached_tokens,
            None if params.prompt_logprobs is None else self._prompt_scores,
            (output.num_drafted_tokens, output.num_accepted_tokens),
        )

    def lose(self, message: str) -> None:
        """Fail with 503: the engine process has ended."""
        self._fail(unavailable(message))

    def fail(self, message: str) -> None:
        """Fail with 500: the request or an update could not be handled."""
        self._fail(broken(message))

    def _count(self, index: int, tokens: int) -> None:
        """Record the time between tokens; tokens of one update have 0 between them."""
        now, metrics, group = time.monotonic(), self.output.metrics, self._group
        if metrics.output_tokens == tokens:
            self._admitted.started(now)
        if last := self._last_token[index]:
            group.metrics.between_tokens(now - last)
        else:
            group.metrics.first_token(now - metrics.arrival)
        self._last_token[index] = now
        for _ in range(tokens - 1):
            group.metrics.between_tokens(0.0)
        self._admitted.count(tokens * self._cost)

    # ---- ending

    def abort(self) -> None:
        """Abort the prompt's requests in the engine, unless they have ended."""
        if not self._has_ended:
            self._group.client.abort(self._key)
            self._reader.end(FinishReason.ABORT, None, time.monotonic)
            self._end(FinishReason.ABORT.value)

    def _fail(self, failure: Failure) -> None:
        if not self._has_ended:
            self._group.client.abort(self._key)
            self._reader.end(FinishReason.ERROR, str(failure), time.monotonic)
            self._end(FinishReason.ERROR.value)
            self._group.fail(failure)

    def _end(self, reason: str) -> None:
        """Record the end in metrics, exactly once."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics = self.output.metrics
        self._group.client.forget(self._key)
        assert metrics.finished is not None
        now, first, started = metrics.finished, metrics.first_token, metrics.started
        self._admitted.started(now)
        self._group.metrics.ended(
            reason,
            e2e=now - metrics.arrival,
            output_tokens=metrics.output_tokens,
            prompt_tokens=len(self.encoded.prompt),
            queue=None if started is None else started - metrics.arrival,
            prefill=None if first is None or started is None else first - started,
            decode=None if first is None else now - first,
        )
        if self._group.recording is not None and reason != FinishReason.ERROR.value:
            self._group.recording.add(self._served())
        self._group.wake()

    def _served(self) -> Served:
        call, answers = self._group.call, self.output.outputs
        lengths = [len(answer.token_ids) for answer in answers]
        arrival, prompt = self._group.arrival, self.encoded.prompt
        return Served(arrival, prompt, lengths, call.tenant, call.endpoint, call.priority, call.salt)

    def release(self) -> None:
        """Release what admission counts for it: the client has read the answer or disconnected."""
        self._admitted.release(time.monotonic())


@dataclass(slots=True, eq=False)
class Answering:
    """All generations of one HTTP request, and the chunks that have not been sent to the client."""

    client: Fleet
    metrics: Metrics
    tokenizer: Tokenizer | None
    call: CallFields
    timeout: float | None
    streams: bool  # whether the reply is streamed
    backlog: Backlog = field(default_factory=Backlog)
    recording: Recording | None = None
    arrival: float = field(default_factory=time.monotonic)
    generations: list[Generation] = field(default_factory=list)
    failure: Failure | None = None
    _pending: deque[Chunk] = field(default_factory=deque)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, encoded: list[EncodedPrompt], admit: Callable[[list[EncodedPrompt]], list[Admitted]]) -> None:
        """Admit and submit all prompts, or none."""
        choice = 0
        for each, admitted in zip(encoded, admit(encoded), strict=True):
            self.generations.append(Generation(self, each, choice, admitted))
            choice += each.params.n
        for generation in self.generations:
            generation.submit()

    @property
    def outputs(self) -> list[RequestOutput]:
        """The answers so far."""
        return [generation.output for generation in self.generations]

    @property
    def is_done(self) -> bool:
        """Whether every answer has ended."""
        return all(generation.output.finished for generation in self.generations)

    async def finish(self) -> None:
        """Wait until every answer has ended; raise the Failure if there is one."""
        async for _ in self.pieces():
            pass

    async def pieces(self) -> AsyncIterator[list[Chunk]]:
        """Iterate over the chunks; those that arrived since the last iteration are merged. May raise a Failure."""
        deadline = None if self.timeout is None else asyncio.get_running_loop().time() + self._seconds_left()
        try:
            while True:
                if self._pending:
                    yield merged(self._take())
                    if self._pending:  # a client with many pending chunks must not delay others
                        await asyncio.sleep(0)
                elif self.failure is not None:
                    raise self.failure
                elif self.is_done:
                    return
                else:
                    self._changed.clear()
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
        except TimeoutError:
            self.metrics.refused("timeout")
            self.abort()
            raise timed_out(self.timeout or 0.0) from None
        finally:
            self.abort()

    def _seconds_left(self) -> float:
        assert self.timeout is not None
        return self.timeout - (time.monotonic() - self.arrival)

    def push(self, piece: Chunk) -> None:
        """Keep a chunk until it can be sent; fail if the backlog is full."""
        self._pending.append(piece)
        self.backlog.size += size_of(piece)
        if self.backlog.is_full:
            message = f"the client left {self.backlog.size:,} bytes unread: read faster, or lower max_tokens"
            self._drop()
            self.fail(Failure(message, 408, "timeout_error", "slow_reader"))
        self.wake()

    def _take(self) -> list[Chunk]:
        taken, size = [], 0
        while self._pending and size < _AT_ONCE:
            taken.append(self._pending.popleft())
            size += size_of(taken[-1])
        self.backlog.size -= size
        return taken

    def _drop(self) -> None:
        self.backlog.size -= sum(map(size_of, self._pending))
        self._pending.clear()

    def fail(self, failure: Failure) -> None:
        """Abort all generations and keep the first failure."""
        self.failure = self.failure or failure
        self.abort()
        self.wake()

    def abort(self) -> None:
        """Abort the generations that still run."""
        for generation in self.generations:
            generation.abort()

    def close(self) -> None:
        """Abort, drop pending chunks and end admission's count: the client has read the reply or disconnected."""
        self.abort()
        self._drop()
        self.release()

    def release(self) -> None:
        """Release what admission counts for all generations."""
        for generation in self.generations:
            generation.release()

    def wake(self) -> None:
        """Wake `pieces`: there is a chunk, a failure or an end."""
        self._changed.set()


def merged(pieces: list[Chunk]) -> list[Chunk]:
    """Join the chunks of each answer, in the order in which the answers first appear."""
    if len(pieces) == 1:
        return pieces
    found: dict[int, Chunk] = {}
    for piece in pieces:
        if piece.index in found:
            found[piece.index].join(piece)
        else:
            found[piece.index] = piece
    return list(found.values())
