"""AsyncEngine: many streams at once give the answers of LLM, and every stream ends, whatever ends it."""

from __future__ import annotations

import asyncio
import doctest
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import chairlift.offline.async_engine
from chairlift import LLM, AsyncEngine, SamplingParams
from chairlift.core.errors import ContextLengthError, DeviceError, EngineFault, RequestError
from chairlift.core.step import Step
from chairlift.offline.stream import Stream
from chairlift.text.outputs import Answer, RequestOutput

SETTINGS: dict[str, Any] = {"progress": False, "max_length": 256, "kv_tokens": 2048, "max_sequences": 8}
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
CASES: list[tuple[Any, SamplingParams]] = [
    (prompt, params)
    for prompt in ("The chairlift never stops", [5, 6, 7], "each chair that comes by empty " * 3)
    for params in (
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=15, n=3),
        SamplingParams(temperature=0.8, seed=4, max_tokens=15, n=2, best_of=4),
        SamplingParams(temperature=0, max_tokens=40, stop=["a", "e"], prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=10, logprobs=2, detokenize=False),
        SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6),
    )
]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(str(tiny_model), window=6, **SETTINGS)
    yield engine
    asyncio.run(engine.close())
    scheduler = engine.engine.scheduler
    scheduler.check()
    assert scheduler.pool.owned == 0 and not scheduler.has_work
    assert not [each for each in threading.enumerate() if each.name == "chairlift-engine"]


async def read(stream: Stream) -> list[Answer]:
    """The answers of a stream, put together from its chunks."""
    answers: dict[int, Answer] = {}
    async for chunk in stream:
        answer = answers.setdefault(chunk.index, Answer(chunk.index))
        assert answer.finish_reason is None, "nothing comes after an answer's end"
        answer.text += chunk.text
        answer.token_ids += chunk.token_ids
        answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
        if chunk.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + chunk.logprobs
    return [answers[index] for index in sorted(answers)]


def told(answers: list[Answer]) -> list[Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
    return [[getattr(answer, name) for name in names] for answer in answers]


def slow_down(engine: AsyncEngine) -> None:
    """Have 200 steps take half a second at least: longer than a test needs to end a request."""
    engine.engine.on_step = lambda *_: time.sleep(0.0025)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_concurrent_streams_are_the_answers_of_llm_token_for_token(engine: AsyncEngine, tiny_model: Path) -> None:
    live: list[int] = []
    scheduler = engine.engine.scheduler
    engine.engine.on_step = lambda *_: live.append(len(scheduler._live))
    streams: list[Stream] = []

    async def one(prompt: Any, params: SamplingParams) -> list[Answer]:
        streams.append(await engine.submit(prompt, params))
        return await read(streams[-1])

    async def go() -> list[list[Answer]]:
        return await asyncio.gather(*(one(*case) for case in CASES))

    found = asyncio.run(go())
    expected = LLM(str(tiny_model), **SETTINGS).generate([case[0] for case in CASES], [case[1] for case in CASES])
    for answers, output, case in zip(found, expected, CASES, strict=True):
        assert told(answers) == told(output.outputs), case
    outputs = {stream.id: stream.output for stream in streams}
    assert all(output is not None and output.finished for output in outputs.values())
    assert max(live) <= 6, "no more requests than the window has room for are under way"
    assert max(live) >= 4, "and they run side by side"


def test_a_stream_that_is_read_late_has_lost_nothing(engine: AsyncEngine) -> None:
    async def go() -> tuple[list[Answer], int, RequestOutput | None]:
        stream = await engine.submit("one", SamplingParams(max_tokens=50, ignore_eos=True, n=2))
        await until(lambda: stream.output is not None and stream.output.finished)
        waiting = len(stream._chunks)
        return await read(stream), waiting, stream.output

    answers, waiting, output = asyncio.run(go())
    assert waiting >= 100
    assert output is not None and told(answers) == told(output.outputs)


def test_an_aborted_request_frees_its_blocks_and_the_others_go_on(engine: AsyncEngine) -> None:
    async def go() -> None:
        slow_down(engine)
        first, second = [await engine.submit(prompt, LONG, request_id=prompt) for prompt in ("first", "second")]
        await anext(first)
        await anext(second)
        engine.abort("first")
        engine.abort("first")
        engine.abort("never submitted")
        [answer] = await read(first)
        assert answer.finish_reason == "abort"
        assert len(answer.token_ids) < 199
        assert first.output is not None and len(first.output.outputs[0].token_ids) < 200
        [other] = await read(second)
        assert other.finish_reason == "length"
        await until(lambda: engine.engine.scheduler.pool.owned == 0)
        assert engine.engine.scheduler.counters.aborted == 1

    asyncio.run(go())


def test_leaving_a_stream_or_cancelling_its_reader_ends_the_request(engine: AsyncEngine) -> None:
    async def consume() -> None:
        async with await engine.submit("one", LONG) as stream:
            async for _ in stream:
                await asyncio.sleep(30)

    async def go() -> None:
        slow_down(engine)
        async with await engine.submit("one", LONG) as stream:
            await anext(stream)
        reading = asyncio.create_task(consume())
        await until(lambda: len(engine._streams) and engine.engine.scheduler.counters.aborted == 1)
        reading.cancel()
        await until(lambda: engine.engine.scheduler.counters.aborted == 2)
        await until(lambda: engine.engine.scheduler.pool.owned == 0)

    asyncio.run(go())


class Breaking:
    """The real executor, until a step with which it breaks."""

    def __init__(self, executor: Any, error: Exception, at: int) -> None:
        self._executor, self._error, self._left = executor, error, at

    def launch(self, plan: Step) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._executor.launch(plan)

    def collect(self, launched: Any) -> Any:
        return self._executor.collect(launched)


def test_a_lost_device_ends_every_stream_with_an_error(engine: AsyncEngine) -> None:
    """Those that run, those that wait for the batch and those that wait for room in the window."""
    engine.engine._executor = Breaking(engine.engine._executor, DeviceError("it fell off the bus"), 8)

    async def one(params: SamplingParams) -> Exception:
        try:
            await read(await engine.submit("one", params))
        except Exception as error:
            return error
        raise AssertionError("a stream ended as if all were well")

    async def go() -> list[Exception]:
        wide = SamplingParams(max_tokens=200, ignore_eos=True, n=5)  # of which the batch holds one
        errors = await asyncio.gather(*(one(wide) for _ in range(9)))
        return [*errors, await one(LONG)]

    errors = asyncio.run(go())
    assert {type(error) for error in errors} == {EngineFault}
    assert all("it fell off the bus" in str(error) for error in errors)


def test_a_failed_step_ends_its_own_requests_and_the_engine_goes_on(engine: AsyncEngine) -> None:
    engine.engine._executor = Breaking(engine.engine._executor, RuntimeError("this step cannot be computed"), 5)

    async def go() -> None:
        stream = await engine.submit("one", LONG)
        with pytest.raises(RequestError, match="this step cannot be computed"):
            await read(stream)
        [answer] = await read(await engine.submit("one", SamplingParams(max_tokens=4, ignore_eos=True)))
        assert len(answer.token_ids) == 4

    asyncio.run(go())


def test_closing_ends_the_streams_that_are_open(engine: AsyncEngine) -> None:
    async def go() -> None:
        slow_down(engine)
        streams = [await engine.submit("one", LONG) for _ in range(6)]
        late = asyncio.create_task(engine.submit("one", LONG))  # for which the window has no room
        await anext(streams[0])
        await engine.close()
        for stream in streams:
            assert [answer.finish_reason for answer in await read(stream)] == ["abort"]
        for refused in (late, engine.submit("one", LONG)):
            with pytest.raises(RequestError, match="closed"):
                await refused
        await engine.close()

    asyncio.run(go())


def test_a_bad_request_is_an_error_of_submit_and_of_nothing_else(engine: AsyncEngine) -> None:
    async def go() -> None:
        running = await engine.submit("one", LONG, request_id="mine")
        for bad, error, match in (
            ([], RequestError, "the prompt is empty"),
            ("", RequestError, "the prompt is empty"),
            ([5] * 300, ContextLengthError, "300 tokens"),
            ([5, 10**6], RequestError, "token id 1000000"),
            ({"text": "one"}, RequestError, "mapping"),
        ):
            with pytest.raises(error, match=match):
                await engine.submit(bad, LONG)
        with pytest.raises(RequestError, match="in use"):
            await engine.submit("one", LONG, request_id="mine")
        with pytest.raises(RequestError, match="SamplingParams"):
            await engine.submit("one", {"temperature": 0})  # type: ignore[arg-type]
        assert [answer.finish_reason for answer in await read(running)] == ["length"]

    asyncio.run(go())


def test_a_logits_processor_that_fails_ends_its_own_stream(engine: AsyncEngine) -> None:
    def broken(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 3:
            raise ValueError("not today")
        return logits

    async def go() -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True, logits_processors=[broken])
        failing, other = await engine.submit("one", params), await engine.submit("two", LONG)
        with pytest.raises(RequestError, match="not today"):
            await read(failing)
        assert [answer.finish_reason for answer in await read(other)] == ["length"]

    asyncio.run(go())


def test_requests_of_an_event_loop_that_is_gone_are_aborted_and_another_loop_is_served(engine: AsyncEngine) -> None:
    async def leave() -> None:
        for _ in range(6):
            await engine.submit("one", LONG)

    async def go() -> int:
        [answer] = await read(await engine.submit("one", SamplingParams(max_tokens=4, ignore_eos=True)))
        await until(lambda: engine.engine.scheduler.counters.aborted == 6)
        return len(answer.token_ids)

    slow_down(engine)
    asyncio.run(leave())
    assert asyncio.run(go()) == 4


def test_the_example_of_its_documentation_runs() -> None:
    found = doctest.testmod(chairlift.offline.async_engine)
    assert found.attempted > 1 and found.failed == 0
