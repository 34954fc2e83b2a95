"""LLM and the server read the same updates of the engine to the same answers.

Random streams of updates go to the driver of LLM as the engine's outcomes, and to the server's side of a real socket as
messages: tokens, ends, log-probabilities, those of the prompt in the same step as the first token, stop strings that
the front finds, tokens that come after them, and steps that fail. LLM reads them in two ways: token by token, and only
when an answer ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_engine_client import line

from chairlift.core.params import SamplingParams
from chairlift.core.plan import Event, Outcome
from chairlift.core.request import FinishReason, Request, Sequence
from chairlift.core.step import PromptLogprobs, TokenLogprobs
from chairlift.offline.driver import Driver
from chairlift.offline.track import Track
from chairlift.serving import messages
from chairlift.serving.admission import Admission
from chairlift.serving.core_messages import as_update
from chairlift.serving.failures import Failure
from chairlift.serving.fleet import Fleet
from chairlift.serving.generation import Answering, CallFields, EncodedPrompt
from chairlift.serving.metrics import Metrics
from chairlift.serving.reply_jobs import _output
from chairlift.text.outputs import Answer, Chunk, RequestOutput
from chairlift.text.reader import RequestReader, Update
from chairlift.text.tokenizer import Tokenizer
from tiny import write_tokenizer

EOS = 1
CASES = 120


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


class Clock:
    def now(self) -> float:
        return time.monotonic()


@dataclass
class Script:
    """Plays an engine that runs one request with random tokens; `stop` ends a sequence as a front asks for it."""

    chance: random.Random
    request: Request
    clock: Clock = field(default_factory=Clock)
    outcome: Outcome = field(default_factory=Outcome)
    sequences: list[Sequence] = field(default_factory=list)
    stopped: dict[int, int] = field(default_factory=dict)  # answers that were stopped, and tokens still on their way
    ended: set[int] = field(default_factory=set)

    def submit(self, request: Request) -> None:
        self.sequences = [Sequence(request, 0, 1 << 20)]

    def step(self) -> Outcome:
        return self.outcome

    def stop(self, sequence: Sequence) -> list[Event]:
        self.stopped.setdefault(sequence.index, self.chance.randrange(3))
        return []

    def abort(self, request_id: str, error: str | None = None) -> list[Event]:
        raise AssertionError("no front has a reason to end it")

    def outcomes(self) -> Iterator[Outcome]:
        """What each step brings, until all answers have ended."""
        params = self.request.params
        fails_at = self.chance.randrange(1, 40) if self.chance.random() < 0.25 else 0
        prompt = self._prompt_events()
        for event in prompt[:-1]:
            yield Outcome(events=[event])
        events = prompt[-1:]  # the last part of the prompt is computed in the step that samples the first token
        for index in range(1, params.width):
            self.sequences.append(Sequence(self.request, 0, 1 << 20, index))
        for sequence in self.sequences:
            sequence.group.reserved, sequence.started, sequence.cached = 0, 2.5, 3
        for step in itertools.count(1):
            live = [each for each in self.sequences if each.index not in self.ended]
            if not live:
                return
            if step == fails_at:
                yield Outcome(events=[Event(each, None, FinishReason.ERROR, error="it broke") for each in live])
                return
            columns: list[tuple[Sequence, int]] = []
            for sequence in live:
                found = self._token(sequence)
                if found is not None and (found.finish_reason is None and found.logprobs is None):
                    columns.append((sequence, found.token or 0))
                elif found is not None:
                    events.append(found)
            yield Outcome([each for each, _ in columns], [token for _, token in columns], events)
            events = []

    def _token(self, sequence: Sequence) -> Event | None:
        if sequence.index in self.stopped:
            self.stopped[sequence.index] -= 1
            if self.stopped[sequence.index] < 0:
                self.ended.add(sequence.index)
                return None
        token = EOS if self.chance.random() < 0.02 else self.chance.randrange(2, 320)
        sequence.tokens.append(token)
        reason = None
        if token in self.request.stop_ids:
            reason = FinishReason.STOP
        elif len(sequence.tokens) - sequence.prompt_length >= (self.request.params.max_tokens or 1 << 20):
            reason = FinishReason.LENGTH
        if reason is not None:
            self.ended.add(sequence.index)
        scored = None if self.request.scored is None else self._score(token, self.request.scored)
        return Event(sequence, token, reason, scored)

    def _score(self, token: int, count: int) -> TokenLogprobs:
        top = [(self.chance.randrange(320), -self.chance.random()) for _ in range(count)]
        return TokenLogprobs(token, -self.chance.random(), self.chance.randrange(1, 9), top)

    def _prompt_events(self) -> list[Event]:
        count = self.request.params.prompt_logprobs
        if count is None:
            return []
        entries = [self._score(token, count) for token in self.request.prompt[1:]]
        cut = self.chance.randrange(len(entries))
        parts = [PromptLogprobs(1, entries[:cut]), PromptLogprobs(1 + cut, entries[cut:])]
        return [Event(self.sequences[0], prompt_logprobs=part) for part in parts]


def draw(chance: random.Random) -> SamplingParams:
    n = chance.choice([1, 1, 2, 3])
    return SamplingParams(
        n=n,
        best_of=chance.choice([None, None, n, n + 2]),
        max_tokens=chance.randrange(1, 40),
        min_tokens=0,
        stop=chance.sample(["e", "th", "a ", "qu", "\n", "zz"], chance.choice([0, 0, 1, 3])),
        stop_token_ids=[chance.randrange(2, 320) for _ in range(chance.choice([0, 0, 8]))],
        ignore_eos=chance.random() < 0.3,
        include_stop_str_in_output=chance.random() < 0.3,
        skip_special_tokens=chance.random() < 0.7,
        logprobs=chance.choice([None, None, 0, 2]),
        prompt_logprobs=chance.choice([None, 0, 2]),
    )


def seen(output: RequestOutput) -> list[Any]:
    """Everything that both fronts tell of a request."""
    return [
        [
            (each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason, each.logprobs)
            for each in output.outputs
        ],
        output.prompt_logprobs,
        output.num_cached_tokens,
        output.metrics.output_tokens,
    ]


def joined(chunks: list[Chunk], count: int) -> list[Any]:
    """The chunks of each answer as one."""
    found: dict[int, Chunk] = {}
    for chunk in chunks:
        if chunk.index in found:
            found[chunk.index].join(chunk)
        else:
            found[chunk.index] = replace(chunk, token_ids=list(chunk.token_ids))
    return [found.get(index) for index in range(count)]


class Local:
    """LLM's front."""

    def __init__(self, script: Script, tokenizer: Tokenizer, *, is_streamed: bool) -> None:
        self._driver = Driver(script)  # type: ignore[arg-type]
        self.track: Track = self._driver.start(script.request, None, tokenizer, is_streamed=is_streamed)

    def step(self) -> None:
        self._driver.step()


async def play(script: Script, tokenizer: Tokenizer, client: Any, engine: Any) -> tuple[list[Local], Answering, Any]:
    """Give both fronts each outcome of a script; the server's pieces, or how it failed."""
    request = script.request
    streams = request.params.width == request.params.n and script.chance.random() < 0.5
    fronts = [Local(script, tokenizer, is_streamed=each) for each in (streams, False)]
    answering = Answering(Fleet({"0": client}), Metrics("m"), tokenizer, CallFields("r", "completions"), None, streams)
    encoded = EncodedPrompt(None, request.prompt, request.params, 0, [], [])
    answering.start([encoded], lambda _: Admission(9, 999).admit(None, 1, 1, 0.0).split([1]))
    order = messages.decode_order(await engine.socket.recv())
    assert isinstance(order, messages.Submit)

    async def read() -> tuple[list[Chunk], Failure | None]:
        chunks: list[Chunk] = []
        try:
            async for pieces in answering.pieces():
                chunks += pieces
        except Failure as failure:
            return chunks, failure
        return chunks, None

    reading = asyncio.create_task(read())
    for outcome in script.outcomes():
        await engine.say(messages.StepReport([as_update(order.key, event) for event in outcome]))
        script.outcome = outcome
        for front in fronts:
            front.step()
    async with asyncio.timeout(20):
        told = await reading
    answering.release()
    return fronts, answering, told


async def orders(client: Any, engine: Any) -> set[int]:
    """The answers that the server's front has had stopped; an order of our own marks the last of its orders."""
    client.stop(0, 0)
    found: set[int] = set()
    while True:
        order = messages.decode_order(await engine.socket.recv())
        if order == messages.Stop(0, 0):
            return found
        if isinstance(order, messages.Stop):
            found.add(order.index)


def test_both_fronts_make_the_same_of_the_same_updates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    counts = dict.fromkeys(("streamed", "failed", "stopped", "ranked", "scored prompts"), 0)

    async def go() -> None:
        async with line(tmp_path) as (client, engine):
            for seed in range(CASES):
                chance = random.Random(seed)
                prompt = [chance.randrange(2, 320) for _ in range(chance.randrange(2, 9))]
                request = Request("r", prompt, draw(chance), time.monotonic(), eos_ids=frozenset({EOS}))
                script = Script(chance, request)
                (local, at_end), answering, (chunks, failure) = await play(script, tokenizer, client, engine)
                stops = await orders(client, engine)
                assert stops == set(script.stopped), seed
                outputs = [local.track.output, at_end.track.output]
                assert all(output.finished for output in [*outputs, *answering.outputs]), seed
                counts["streamed"] += answering.streams
                counts["stopped"] += bool(stops)
                counts["ranked"] += request.params.width > request.params.n
                counts["scored prompts"] += request.params.prompt_logprobs is not None
                assert seen(outputs[0]) == seen(outputs[1]), seed
                if failure is not None:
                    counts["failed"] += 1
                    assert {output.error for output in outputs} == {"it broke"}
                    assert "it broke" in str(failure)
                    continue
                assert {output.error for output in outputs} == {None}
                if answering.streams:
                    n = request.params.n
                    assert joined(chunks, n) == joined(local.track.take_chunks(), n), seed
                    assert answering.outputs[0].prompt_logprobs == outputs[0].prompt_logprobs
                    assert answering.outputs[0].num_cached_tokens == outputs[0].num_cached_tokens
                    assert not any(each.logprobs for each in answering.outputs[0].outputs), "sent, and not kept"
                else:
                    part = msgspec.msgpack.decode(
                        msgspec.msgpack.encode(answering.generations[0].part()),
                        type=type(answering.generations[0].part()),
                    )
                    assert seen(_output(part, tokenizer)) == seen(outputs[0]), seed

    asyncio.run(go())
    assert min(counts.values()) > CASES // 20, counts


def split(chance: random.Random, count: int) -> list[int]:
    """Random sizes that add up to a count."""
    cuts = sorted(chance.choices(range(count + 1), k=chance.randrange(1, 6)))
    return [end - start for start, end in itertools.pairwise([0, *cuts, count]) if end > start]


def test_several_tokens_in_one_update_are_read_as_one_by_one(tokenizer: Tokenizer) -> None:
    """With any number of tokens in an update, an answer ends at the same token with the same text and scores."""
    stops = 0
    now: Callable[[], float] = time.monotonic
    for seed in range(400):
        chance = random.Random(seed)
        params = replace(draw(chance), n=1, best_of=None, prompt_logprobs=None)
        tokens = [chance.randrange(2, 320) for _ in range(chance.randrange(1, 30))]
        last = chance.choice([FinishReason.STOP, FinishReason.LENGTH])
        scores = [TokenLogprobs(token, -chance.random(), 1, []) for token in tokens]
        answers: list[tuple[Answer, str, int]] = []
        for sizes in ([1] * len(tokens), split(chance, len(tokens)), [len(tokens)]):
            reader, start, text = RequestReader("r", None, [5], params, tokenizer, 0.0), 0, ""
            for size in sizes:
                end = start + size
                reason = last if end == len(tokens) else None
                told = tuple(scores[start:end]) if params.logprobs is not None else ()
                chunk = reader.read(Update(0, tokens[start:end], reason, told), now)
                text += chunk.text if chunk is not None else ""
                start = end
            assert reader.output.finished
            answers.append((reader.output.outputs[0], text, reader.output.metrics.output_tokens))
        assert answers[0] == answers[1] == answers[2], seed
        answer, text, count = answers[0]
        assert (text, count) == (answer.text, len(answer.token_ids))
        stops += isinstance(answer.stop_reason, str)
    assert stops > 50


@pytest.mark.parametrize("is_streamed", [False, True])
def test_each_answer_of_an_aborted_request_keeps_its_tokens(tokenizer: Tokenizer, is_streamed: bool) -> None:
    """Also those after the first, which once ended with it before their own tokens were read."""
    request = Request("r", [5, 6], SamplingParams(n=3, max_tokens=20), 0.0)
    script = Script(random.Random(1), request)
    front = Local(script, tokenizer, is_streamed=is_streamed)
    for outcome in itertools.islice(script.outcomes(), 4):
        script.outcome = outcome
        front.step()
    made = [sequence.output for sequence in script.sequences]
    script.outcome = Outcome(events=[Event(each, None, FinishReason.ABORT) for each in script.sequences])
    front.step()
    output = front.track.output
    assert output.finished and [answer.finish_reason for answer in output.outputs] == ["abort"] * 3
    assert [answer.token_ids for answer in output.outputs] == made and all(map(len, made))
