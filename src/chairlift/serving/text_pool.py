"""TextPool: an HTTP process's text processes. The event loop never tokenizes, renders or writes anything long.

Jobs go by their size into one of two lanes with processes of their own, so that a chat never waits for a book. In a
lane the shortest job is next. What waits is bounded in bytes; a job whose client has left is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
from asyncio import IncompleteReadError
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass

from chairlift.core.errors import RequestError
from chairlift.serving.failures import Failure, unavailable
from chairlift.serving.text_jobs import Encoded, Job
from chairlift.serving.text_process import End, OutOfMemory, Refused, Setup, Written, decode_end, encode
from chairlift.text.confined import OUT_OF_MEMORY, TIMED_OUT, command, environment
from chairlift.text.frames import LENGTH_BYTES, length_of
from chairlift.text.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

SHORT = 32_000  # bytes of a job that takes some tens of milliseconds
SECONDS, LONG_SECONDS = 5.0, 20.0  # a short job that takes so long is a chat template that does not end
MEMORY = 1 << 30  # bytes for one job: a million tokens of English take half
_MOST_WAITING = 32 << 20  # bytes in a lane: four bodies of the largest size, or thousands of chats
_EACH = 1024  # bytes that a waiting job takes beside its own
_LONG_PROCESSES = max(1, min(4, (os.cpu_count() or 1) // 4))

Result = Encoded | list[bytes]


class TextPool:
    """The text processes of one HTTP process."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        # A file without a name: every process reads the tokenizer from it, and it is gone with the last of them.
        self._setup = tempfile.TemporaryFile()  # noqa: SIM115
        self._setup.write(encode(Setup.of(tokenizer)))
        self._setup.flush()
        file = self._setup.fileno()
        self._short = Lane(file, SECONDS, processes=1)
        self._long = Lane(file, LONG_SECONDS, processes=_LONG_PROCESSES)

    def start(self) -> None:
        """Start the process that short jobs need, before one comes; others start when there is work for them."""
        self._short.start()

    async def do(self, job: Job) -> Result:
        """A job's result: numbers, or pieces of JSON. A RequestError or a Failure says why there is none."""
        raw = encode(job)
        return await (self._short if len(raw) <= SHORT else self._long).do(raw)

    async def close(self) -> None:
        """End the processes."""
        await self._short.close()
        await self._long.close()
        self._setup.close()


@dataclass(slots=True, order=True)
class _Order:
    size: int
    number: int  # the earlier of two of one size goes first
    raw: bytes
    result: asyncio.Future[Result]


class Lane:
    """Text processes with one queue; each is driven by a task, and replaced when it ends."""

    def __init__(self, file: int, seconds: float, processes: int) -> None:
        self._file = file
        self._seconds = seconds
        self._most = processes
        self._numbers = itertools.count()
        self._queue: asyncio.PriorityQueue[_Order] = asyncio.PriorityQueue()
        self._waiting = 0  # bytes
        self._idle = 0  # tasks
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Have one more process."""
        self._tasks.append(asyncio.create_task(self._run()))

    async def do(self, raw: bytes) -> Result:
        """Do a job, once the shorter ones before it are done."""
        cost = len(raw) + _EACH
        if self._waiting + cost > _MOST_WAITING:
            waiting = f"{self._queue.qsize()} texts of {self._waiting >> 20} MiB in all are waiting to be read"
            raise Failure(
                f"{waiting}: try again in a moment", 429, "rate_limit_error", "text_queue_full", retry_after=2.0
            )
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if not self._idle and len(self._tasks) < self._most:
            self.start()
        self._waiting += cost
        order = _Order(len(raw), next(self._numbers), raw, result)
        try:
            self._queue.put_nowait(order)
            return await result
        finally:
            self._waiting -= cost
            order.raw = b""  # where the client has left, the order stays in the queue

    async def close(self) -> None:
        """End the processes; jobs under way fail."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        worker: Worker | None = None
        try:
            with suppress(OSError):  # the first job tries again, and tells its client
                worker = await Worker.start(self._file, self._seconds)
            while True:
                self._idle += 1
                try:
                    order = await self._queue.get()
                finally:
                    self._idle -= 1
                if not order.result.done():  # else its client has left
                    worker = await self._serve(worker, order)
        finally:
            if worker is not None:
                await worker.end()

    async def _serve(self, worker: Worker | None, order: _Order) -> Worker | None:
        """Do one job; a process that ended for no fault of the job's is replaced, and the job done again, once."""
        failure: Exception = unavailable("the process that reads text has ended twice: try again in a moment")
        try:
            for _ in range(2):
                if order.result.done():
                    break
                worker = worker or await Worker.start(self._file, self._seconds)
                try:
                    end, pieces = await worker.ask(order.raw)
                except Ended as ended:
                    log.error("a text process ended with code %s", ended.code)
                    worker = None
                    if ended.code in (TIMED_OUT, OUT_OF_MEMORY):
                        failure = too_slow(self._seconds) if ended.code == TIMED_OUT else too_large()
                        break
                else:
                    _settle(order.result, end, pieces)
                    if end.is_last:
                        await worker.end()
                    return None if end.is_last else worker
        except OSError as error:  # no process can be started, or no pipe made
            failure = unavailable(f"no process can be started to read text: {error.strerror or error}")
        except asyncio.CancelledError:
            order.result.cancel()
            raise
        if not order.result.done():
            order.result.set_exception(failure)
        return worker


def _settle(result: asyncio.Future[Result], end: End, pieces: list[bytes]) -> None:
    if result.done():
        return
    match end.result:
        case Encoded() as encoded:
            result.set_result(encoded)
        case Written():
            result.set_result(pieces)
        case Refused(message):
            result.set_exception(RequestError(message))
        case OutOfMemory():
            result.set_exception(too_large())


def too_slow(seconds: float) -> RequestError:
    """Say that a job was stopped because of its time."""
    return RequestError(
        f"the text takes longer than {seconds:g} s to be read: send less; where short texts fail, too, the model's "
        "chat template does not end"
    )


def too_large() -> RequestError:
    """Say that a job was stopped because of its memory."""
    return RequestError(
        f"the text takes more than {MEMORY >> 20} MiB of memory to be read: send less; where short texts fail, too, "
        "the model's chat template makes too much of it"
    )


class Ended(Exception):  # noqa: N818
    """A text process is gone."""

    def __init__(self, code: int) -> None:
        self.code = code


class Worker:
    """One text process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    @staticmethod
    async def start(file: int, seconds: float) -> Worker:
        """Start one; it reads its tokenizer while its first job waits in the pipe."""
        arguments = (str(file), str(seconds), str(MEMORY))
        return Worker(
            await asyncio.create_subprocess_exec(
                *command("chairlift.serving.text_process", *arguments),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(file,),
                env=environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for the server, which ends it in order
            )
        )

    async def ask(self, raw: bytes) -> tuple[End, list[bytes]]:
        """Have a job done: the end of its result, and the pieces of it that came before."""
        try:
            self._stdin.write(length_of(raw))
            self._stdin.write(raw)
            await self._stdin.drain()
            pieces = []
            while piece := await self._frame():
                pieces.append(piece)
            return decode_end(await self._frame()), pieces
        except (IncompleteReadError, ConnectionError):
            raise Ended(await self._process.wait()) from None

    async def end(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
        await self._process.wait()

    async def _frame(self) -> bytes:
        head = await self._stdout.readexactly(LENGTH_BYTES)
        return await self._stdout.readexactly(int.from_bytes(head, "big"))
