"""TextPool: the text processes of an HTTP process, which keep long text work off its event loop.

Short and long jobs have separate lanes with their own processes, so that a short chat never waits for a long text. A
lane runs its shortest job first. Waiting jobs are bounded in bytes; a job is dropped if its client disconnects.
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
from chairlift.serving.text_jobs import CheckGrammar, Encoded, Job
from chairlift.serving.text_process import End, OutOfMemory, Refused, Setup, Written, decode_end, encode
from chairlift.text.confined import OUT_OF_MEMORY, TIMED_OUT, command, environment
from chairlift.text.frames import LENGTH_BYTES, length_of
from chairlift.text.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

GRAMMAR_SECONDS = 2.0  # typical schemas take milliseconds
SHORT = 32_000  # bytes of a job that takes some tens of milliseconds
SECONDS, LONG_SECONDS = 5.0, 20.0  # limits of a job; a short one that exceeds its limit has an endless chat template
MEMORY = 1 << 30  # bytes for one job: a million tokens of English use half of it
_MOST_WAITING = 32 << 20  # bytes per lane: four bodies of the largest size, or thousands of chats
_EACH = 1024  # bytes of overhead per waiting job
_NICE = 10  # of checks of grammars: the steps of other requests come first
_LONG_PROCESSES = max(1, min(4, (os.cpu_count() or 1) // 4))

Result = Encoded | list[bytes]


class TextPool:
    """The text processes of one HTTP process."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        # An unnamed file, from which every text process reads the tokenizer.
        self._setup = tempfile.TemporaryFile()  # noqa: SIM115
        self._setup.write(encode(Setup.of(tokenizer)))
        self._setup.flush()
        file = self._setup.fileno()
        self._short = Lane(file, SECONDS, processes=1)
        self._long = Lane(file, LONG_SECONDS, processes=_LONG_PROCESSES)
        self._grammars = Lane(file, GRAMMAR_SECONDS, processes=1, nice=_NICE)  # apart: no conversation waits for one

    def start(self) -> None:
        """Start the process for short jobs; the others start on demand."""
        self._short.start()

    async def do(self, job: Job) -> Result:
        """Run a job; return token ids or pieces of JSON, or raise a RequestError or a Failure."""
        raw = encode(job)
        if isinstance(job, CheckGrammar):
            return await self._grammars.do(raw)
        return await (self._short if len(raw) <= SHORT else self._long).do(raw)

    async def close(self) -> None:
        """End the processes."""
        await self._short.close()
        await self._long.close()
        await self._grammars.close()
        self._setup.close()


@dataclass(slots=True, order=True)
class _Order:
    size: int
    number: int  # order of arrival among jobs of one size
    raw: bytes
    result: asyncio.Future[Result]


class Lane:
    """Text processes with one queue; a task drives each process and replaces it when it ends."""

    def __init__(self, file: int, seconds: float, processes: int, nice: int = 0) -> None:
        self._file = file
        self._seconds = seconds
        self._nice = nice
        self._most = processes
        self._numbers = itertools.count()
        self._queue: asyncio.PriorityQueue[_Order] = asyncio.PriorityQueue()
        self._waiting = 0  # bytes
        self._idle = 0  # tasks
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start one more process."""
        self._tasks.append(asyncio.create_task(self._run()))

    async def do(self, raw: bytes) -> Result:
        """Run a job after the shorter ones in the queue."""
        cost = len(raw) + _EACH
        if self._waiting + cost > _MOST_WAITING:
            waiting = f"{self._queue.qsize()} texts of {self._waiting >> 20} MiB in all are waiting to be processed"
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
            order.raw = b""  # after a disconnect the order stays in the queue, without its bytes

    async def close(self) -> None:
        """End the processes and cancel their jobs."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        worker: Worker | None = None
        try:
            with suppress(OSError):  # the first job tries again, and reports the error
                worker = await Worker.start(self._file, self._seconds, self._nice)
            while True:
                self._idle += 1
                try:
                    order = await self._queue.get()
                finally:
                    self._idle -= 1
                if not order.result.done():  # else its client has disconnected
                    worker = await self._serve(worker, order)
        finally:
            if worker is not None:
                await worker.end()

    async def _serve(self, worker: Worker | None, order: _Order) -> Worker | None:
        """Run one job; if the process ends for another reason than the job's limits, replace it and retry once."""
        failure: Exception = unavailable("the text process has ended twice: try again in a moment")
        try:
            for _ in range(2):
                if order.result.done():
                    break
                worker = worker or await Worker.start(self._file, self._seconds, self._nice)
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
        except OSError as error:  # a process or a pipe could not be created
            failure = unavailable(f"a text process cannot be started: {error.strerror or error}")
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
    """Return the error of a job that exceeded its time limit."""
    return RequestError(
        f"the text takes longer than {seconds:g} s to process: send less; if short texts fail too, the model's "
        "chat template does not end"
    )


def too_large() -> RequestError:
    """Return the error of a job that exceeded its memory limit."""
    return RequestError(
        f"the text takes more than {MEMORY >> 20} MiB of memory to process: send less; if short texts fail too, "
        "the model's chat template uses too much of it"
    )


class Ended(Exception):  # noqa: N818
    """A text process has ended."""

    def __init__(self, code: int) -> None:
        self.code = code


class Worker:
    """One text process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    @staticmethod
    async def start(file: int, seconds: float, nice: int) -> Worker:
        """Start a process; it loads its tokenizer while its first job waits in the pipe."""
        arguments = (str(file), str(seconds), str(MEMORY), str(nice))
        return Worker(
            await asyncio.create_subprocess_exec(
                *command("chairlift.serving.text_process", *arguments),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(file,),
                env=environment(),
                start_new_session=True,  # a terminal's Ctrl-C must not end it before the server has drained
            )
        )

    async def ask(self, raw: bytes) -> tuple[End, list[bytes]]:
        """Run a job; return its End frame, and the pieces before it."""
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
        """Kill the process."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
        await self._process.wait()

    async def _frame(self) -> bytes:
        head = await self._stdout.readexactly(LENGTH_BYTES)
        return await self._stdout.readexactly(int.from_bytes(head, "big"))
