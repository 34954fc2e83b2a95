"""Text processes: they give what this process would, within limits, and lose nothing but the job that broke them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chairlift.core.errors import RequestError
from chairlift.core.step import TokenLogprobs
from chairlift.serving import text_pool
from chairlift.serving.failures import Failure
from chairlift.serving.messages import encode
from chairlift.serving.reply_jobs import AnswerPart, OutputPart, Reply
from chairlift.serving.text_jobs import Chat, Detokenize, Encode, Encoded, Job, Room, Tokenize, perform
from chairlift.serving.text_pool import TextPool
from chairlift.serving.text_process import PIECE
from chairlift.text.tokenizer import Tokenizer
from mostly_long import mostly_long

T = TypeVar("T")
ROOM = Room(10_000)
TALK = [{"role": "user", "content": "Hello 🚡"}]
CALL = {"function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
SLOW = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def with_pool(tokenizer: Tokenizer, use: Callable[[TextPool], Awaitable[T]]) -> T:
    async def run() -> T:
        pool = TextPool(tokenizer)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.5, 3, [(token + other, -float(other)) for other in range(20)])


def reply(tokens: int, **more: Any) -> Reply:
    ids = [100 + number % 100 for number in range(tokens)]
    answers = [
        AnswerPart(index, "text", ids, "length", None, [encode(scored(token)) for token in ids]) for index in range(2)
    ]
    prompt_scores = [(1, encode([scored(token) for token in ids[1:]]))]
    return Reply("cmpl-1", "m", False, 20, [OutputPart("a prompt", ids, answers, 2 * tokens, 3, prompt_scores)], **more)


JOBS: dict[str, Job] = {
    "a text": Encode(["Hello, wörld 🚡 <|end|>"], ROOM),
    "texts and bad words": Encode(["one", "two", " "], ROOM, False, ["chairlift", "queue"]),
    "a long text": Encode(["each chair that comes by empty " * 2000], Room(100_000)),
    "a text that is too long": Encode(["each chair " * 2000], Room(100)),
    "the end of a text": Encode(["each chair that comes by " * 400], Room(100, 7)),
    "a text that cannot fit": Encode(["x" * 100_000], Room(100)),
    "a conversation": Chat(TALK, {"add_generation_prompt": False}, ROOM, ["chairlift"]),
    "a tool call": Chat([*TALK, {"role": "assistant", "content": None, "tool_calls": [CALL]}], {}, ROOM),
    "tokens": Tokenize(Encode(["Hello 🚡"], ROOM), 512, with_strings=True),
    "tokens of a conversation": Tokenize(Chat(TALK, {}, ROOM), 512),
    "a text of tokens": Detokenize([100, 101, 102] * 5000),
    "a reply": reply(3),
    "a long reply": reply(1000, token_ids=True),
    "an echo": reply(50, echo=True, no_output=True),
}


@pytest.mark.parametrize("name", mostly_long(JOBS, 5))
def test_a_job_has_the_result_that_it_has_in_this_process(tokenizer: Tokenizer, name: str) -> None:
    found = with_pool(tokenizer, lambda pool: pool.do(JOBS[name]))
    here = perform(JOBS[name], tokenizer)
    if isinstance(found, list):
        assert isinstance(here, bytes)
        assert b"".join(found).partition(b'"created":')[0] == here.partition(b'"created":')[0]
        assert len(b"".join(found)) == len(here)
        assert max(map(len, found)) <= PIECE
    else:
        assert found == here


def test_a_text_is_too_long_by_its_size_only_if_it_is_too_long(tokenizer: Tokenizer) -> None:
    """The estimate is never above the count: whatever fits the context is tokenized."""
    longest = max(tokenizer.backend.get_vocab(), key=len)
    for text in (longest.replace("Ġ", " ") * 300, "🚡" * 300, "<|begin|>" * 300, "x y z " * 300, "中文é" * 300):
        count = len(tokenizer.encode(text))
        encoded = perform(Encode([text], Room(count)), tokenizer)
        assert isinstance(encoded, Encoded) and len(encoded.prompts[0].ids) == count
        encoded = perform(Encode([text], Room(count // 20)), tokenizer)
        assert isinstance(encoded, Encoded)
        [prompt] = encoded.prompts
        assert prompt.ids == [] and prompt.count <= count
        assert prompt.is_estimate or prompt.count == count


def test_the_end_of_a_text_is_that_of_the_whole_text(tokenizer: Tokenizer) -> None:
    text = "".join(f"{number} chairs come by empty. " for number in range(20_000))
    room = Room(100, 60)
    assert len(text) > 10 * room.most * tokenizer.longest_token
    encoded = perform(Encode([text], room), tokenizer)
    assert isinstance(encoded, Encoded)
    assert encoded.prompts[0].ids == tokenizer.encode(text)[-60:]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (Chat([{"role": 3}], {}, ROOM), "message 0 must be an object"),
        (Chat([*TALK, {"role": "user", "content": [{"type": "image"}]}], {}, ROOM), "message 1 has a part of type"),
        (Tokenize(Encode(["x" * 100_000], ROOM), 512), "the model's context holds 512"),
    ],
)
def test_what_is_wrong_with_a_text_is_told_as_in_this_process(tokenizer: Tokenizer, job: Job, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        with_pool(tokenizer, lambda pool: pool.do(job))
    with pytest.raises(RequestError, match=why):
        perform(job, tokenizer)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer.backend, bos_token_id=0, eos_token_id=1, chat_template=template)


@pytest.mark.parametrize(
    ("template", "why"),
    [(SLOW, "takes longer than 1 s"), ("{{ '%2000000000d' % 1 }}", "takes more than 1024 MiB of memory")],
)
def test_a_job_that_is_too_slow_or_too_large_ends_and_others_are_done(
    tokenizer: Tokenizer, template: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "SECONDS", 1.0)

    async def use(pool: TextPool) -> None:
        bad = asyncio.create_task(pool.do(Chat(TALK, {}, ROOM)))
        good = asyncio.create_task(pool.do(JOBS["a text"]))
        with pytest.raises(RequestError, match=why):
            await bad
        assert await good == perform(JOBS["a text"], tokenizer)

    with_pool(with_template(tokenizer, template), use)


def test_a_text_that_takes_more_memory_than_it_may_loses_its_process_and_nothing_else(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is Rust, which aborts when it cannot have memory."""
    monkeypatch.setattr(text_pool, "MEMORY", 64 << 20)

    async def use(pool: TextPool) -> None:
        with pytest.raises(RequestError, match="takes more than 64 MiB of memory"):
            await pool.do(Encode(["x y z " * 1_000_000], Room(1 << 30)))
        assert await pool.do(JOBS["a long text"]) == perform(JOBS["a long text"], tokenizer)

    with_pool(tokenizer, use)


def children() -> list[int]:
    """The text processes of this process."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, parent, args in lines if int(parent) == os.getpid() and "text_process" in args]


def test_a_process_that_was_killed_is_replaced_and_its_job_is_done_again_once(
    tokenizer: Tokenizer,
) -> None:
    async def until_killed(kills: int, waits: asyncio.Task[Any]) -> None:
        killed: set[int] = set()
        while len(killed) < kills and not waits.done():
            await asyncio.sleep(0.01)
            for pid in set(children()) - killed:
                await asyncio.sleep(0.2)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    async def use(pool: TextPool) -> None:
        job = Encode(["each chair that comes by empty " * 20_000], Room(1 << 20))
        once = asyncio.create_task(pool.do(job))
        await until_killed(1, once)
        assert await once == perform(job, tokenizer)
        assert len(children()) == 1
        for pid in children():
            os.kill(pid, signal.SIGKILL)  # while it has nothing to do
        assert await pool.do(JOBS["a long text"]) == perform(JOBS["a long text"], tokenizer)

    with_pool(tokenizer, use)

    async def use_again(pool: TextPool) -> None:
        twice = asyncio.create_task(pool.do(Chat(TALK, {}, ROOM)))
        await until_killed(2, twice)
        with pytest.raises(Failure, match="has ended twice") as caught:
            await twice
        assert caught.value.status == 503

    with_pool(with_template(tokenizer, SLOW), use_again)


def test_a_short_job_waits_for_no_long_one(tokenizer: Tokenizer) -> None:
    async def use(pool: TextPool) -> None:
        long = [asyncio.create_task(pool.do(Encode(["x y z " * 50_000], Room(1 << 30)))) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.do(JOBS["a conversation"])
        assert not any(task.done() for task in long)
        await asyncio.gather(*long)

    with_pool(tokenizer, use)


def test_the_shortest_of_those_that_wait_is_next(tokenizer: Tokenizer) -> None:
    async def use(pool: TextPool) -> list[int]:
        done: list[int] = []

        async def one(size: int) -> None:
            await pool.do(Encode(["x" * size], Room(1 << 30)))
            done.append(size)

        await asyncio.gather(*map(one, (5000, 4000, 3000, 100, 2000)))
        return done

    assert with_pool(tokenizer, use) == [100, 2000, 3000, 4000, 5000]


def test_what_waits_is_bounded_and_is_dropped_when_its_client_leaves(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_MOST_WAITING", 500_000)
    job = Encode(["x y z " * 30_000], Room(1 << 30))

    async def use(pool: TextPool) -> None:
        waiting = [asyncio.create_task(pool.do(job)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Failure, match="2 texts of 0 MiB in all are waiting") as caught:
            await pool.do(job)
        assert (caught.value.status, caught.value.code) == (429, "text_queue_full")
        assert await pool.do(JOBS["a text"]) == perform(JOBS["a text"], tokenizer), (
            "short ones have a queue of their own"
        )
        waiting[1].cancel()
        await asyncio.sleep(0)
        again = asyncio.create_task(pool.do(job))
        await asyncio.gather(waiting[0], again)
        assert pool._long._waiting == 0

    with_pool(tokenizer, use)


@pytest.mark.long
def test_a_process_that_has_grown_is_replaced(tokenizer: Tokenizer) -> None:
    async def use(pool: TextPool) -> tuple[list[int], list[int]]:
        await pool.do(Encode(["x y z " * 300_000], Room(1 << 30)))
        before = children()
        await pool.do(Encode(["x y z " * 10_000], Room(1 << 30)))
        return before, children()

    before, after = with_pool(tokenizer, use)
    assert len(after) == 1 and not set(before) & set(after)


def test_a_pool_whose_process_cannot_be_started_says_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pool, "command", lambda *_: ["/nonexistent/python"])
    with pytest.raises(Failure, match="a text process cannot be started: No such file"):
        with_pool(tokenizer, lambda pool: pool.do(JOBS["a text"]))


@pytest.mark.long
def test_the_processes_end_with_one_that_was_killed(tiny_model: Path) -> None:
    source = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom chairlift.text.tokenizer import Tokenizer\n"
        "from chairlift.serving.text_pool import TextPool\nfrom chairlift.serving.text_jobs import *\n"
        "async def main():\n"
        "    pool = TextPool(Tokenizer.from_folder(Path(sys.argv[1])))\n"
        "    await pool.do(Encode(['x'], Room(9)))\n"
        "    print(pool._short._tasks, flush=True)\n"
        "    await pool.do(Encode(['x y z ' * 400_000], Room(1 << 30)))\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(tiny_model)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        time.sleep(1)
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        found = [int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == parent.pid]
        assert len(found) == 2
        parent.kill()
    deadline = time.monotonic() + 40
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in found):
        assert time.monotonic() < deadline, "they have outlived their parent"
        time.sleep(0.1)


def test_a_text_process_imports_neither_torch_nor_numpy_nor_a_web_framework() -> None:
    """It starts in tens of milliseconds, and has little that a text could reach."""
    source = "import sys, chairlift.serving.text_process\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "starlette", "uvicorn", "zmq", "asyncio"} & set(found)
