"""EngineClient: an HTTP process's connection to the engine, across restarts of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from chairlift.core.errors import ChairliftError
from chairlift.serving import messages
from chairlift.serving.beat import Beat
from chairlift.serving.messages import (
    AnswerUpdate,
    Broken,
    Explained,
    Hello,
    PrefixCacheReset,
    Stats,
    StepReport,
    Unreadable,
    Watched,
)
from chairlift.serving.shared import private_folder

log = logging.getLogger("chairlift")
EngineAnswer = Explained | PrefixCacheReset  # the engine's answer to a question
_FIND_EVERY = 0.5  # seconds between two checks that the socket's file exists
_ACKNOWLEDGE_EVERY = 256 << 10  # bytes of reports per Read message to the engine
_READ_SECONDS = 0.005  # of reading reports before other tasks, which write the streams, may run
_ENDED = "the engine process has ended; it is being started again"


class Listener(Protocol):
    """Receives the updates of one request."""

    def take(self, update: AnswerUpdate) -> None:
        """Handle an update of one of its answers."""

    def lose(self, message: str) -> None:
        """Handle the end of the engine process: no further update follows."""

    def fail(self, message: str) -> None:
        """Handle a server error: the request or one of its updates could not be decoded."""


class Watcher(Protocol):
    """Receives the engine's statistics and state."""

    def engine(self, stats: Stats) -> None:
        """Handle the statistics of a step."""

    def engine_state(self, up: bool) -> None:
        """Handle a start (True) or an end (False) of the engine."""


class EngineClient:
    """Binds a socket to which each engine process connects, and passes its reports to the listeners."""

    def __init__(self, address: str, beat: Beat, watcher: Watcher | None = None) -> None:
        self.hello: Hello | None = None  # None while no engine is connected
        self.broken: str | None = None  # why the engine could not start
        self.on_record: Callable[[bytes], None] = lambda record: None  # called with each record of the steps
        self._address = address
        self._path = Path(address.removeprefix("ipc://"))
        self._beat = beat
        self._watcher = watcher
        self._listeners: dict[int, Listener] = {}
        self._questions: dict[int, asyncio.Future[EngineAnswer | None]] = {}
        self._next = secrets.randbits(40)  # random: updates meant for an earlier process on this socket match no key
        self._stale_ends = 0  # pending disconnect events of engines that have already been replaced
        self._read = self._acknowledged = 0  # bytes of reports, and the total last sent to the engine
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Bind the socket and start receiving."""
        context = zmq.asyncio.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # admission bounds what is sent
        self._socket.setsockopt(zmq.RCVHWM, 0)  # the engine process bounds what an HTTP process leaves unread
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._bind()
        waiting = (self._receive(), self._watch(), self._stay_reachable())
        self._tasks = [asyncio.create_task(each) for each in waiting]

    async def close(self) -> None:
        """Fail all pending requests and close the socket; a second call does nothing."""
        self.hello = None
        self._fail_pending("the server is stopping")
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            self._socket.disable_monitor()
            self._socket.close()

    def _bind(self) -> None:
        private_folder(self._path.parent)
        self._socket.bind(self._address)

    async def _stay_reachable(self) -> None:
        """Bind again when the socket's file was removed: the next engine could not connect.

        Cleaners remove files in /tmp now and then. A connected engine is not affected.
        """
        while True:
            await asyncio.sleep(_FIND_EVERY)
            if self._path.exists():
                continue
            log.warning("the socket %s was removed; binding it again", self._path)
            try:
                with contextlib.suppress(zmq.ZMQError):  # an earlier attempt may have unbound it
                    self._socket.unbind(self._address)
                self._bind()
            except (OSError, ChairliftError, zmq.ZMQError) as error:
                log.error("the socket %s cannot be bound: %s", self._path, error)

    async def wait(self) -> None:
        """Wait until the engine starts, ends, or reports that it cannot start."""
        self._changed.clear()
        await self._changed.wait()

    # ---- state

    @property
    def trouble(self) -> str | None:
        """The reason why requests cannot be served now, or None."""
        if self.hello is None:
            return "the engine is not running" + (f": {self.broken}" if self.broken else "; it is being started")
        silence = self._beat.silence(time.monotonic())
        if silence > self._beat.patience:
            return f"the engine has been silent for {silence:.1f} s: a step hangs"
        return None

    @property
    def live(self) -> int:
        """Number of this process's requests in the engine."""
        return len(self._listeners)

    # ---- sending orders

    def new_key(self) -> int:
        """Return a new number for a request."""
        self._next += 1
        return self._next

    def submit(self, order: messages.Submit, listener: Listener) -> None:
        """Send a request to the engine; its updates go to the listener until `forget` or `abort`.

        Without an engine, `lose` is called at once: the engine may have ended since the request was admitted.
        """
        self._listeners[order.key] = listener
        if not self._send(order):
            del self._listeners[order.key]
            listener.lose(self.trouble or "the engine does not accept requests")

    def listen(self, key: int, listener: Listener) -> None:
        """Replace the listener of a request."""
        if key in self._listeners:
            self._listeners[key] = listener

    def abort(self, key: int) -> None:
        """Abort a request; its listener gets no further update."""
        if self._listeners.pop(key, None) is not None:
            self._send(messages.Abort(key))

    def stop(self, key: int, index: int) -> None:
        """End one answer of a request."""
        self._send(messages.Stop(key, index))

    def forget(self, key: int) -> None:
        """Drop the listener of a finished request."""
        self._listeners.pop(key, None)

    @property
    def questions(self) -> int:
        """Number of questions that the engine has not answered."""
        return len(self._questions)

    async def explain(self, name: str, tenant: str | None) -> Explained | None:
        """Return the state of a request, if the tenant owns it; None if the engine does not answer in time."""
        answer = await self._ask(messages.Explain(self.new_key(), name, tenant))
        return answer if isinstance(answer, Explained) else None

    async def reset_prefix_cache(self) -> int | None:
        """Clear the prefix cache; return the number of blocks, or None if the engine does not answer in time."""
        answer = await self._ask(messages.ResetPrefixCache(self.new_key()))
        return answer.blocks if isinstance(answer, PrefixCacheReset) else None

    def watch(self, order: messages.Watch) -> None:
        """Ask for records of the steps, which go to `on_record`."""
        self._send(order)

    async def _ask(self, order: messages.Explain | messages.ResetPrefixCache) -> EngineAnswer | None:
        answer: asyncio.Future[EngineAnswer | None] = asyncio.get_running_loop().create_future()
        if not self._send(order):
            return None
        self._questions[order.question] = answer
        try:
            async with asyncio.timeout(self._beat.patience):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._questions.pop(order.question, None)

    def _send(self, order: messages.Order) -> bool:
        """Send an order without blocking; return False if no engine is connected or the send fails."""
        if self.hello is None:
            return False
        future: Any = self._socket.send(messages.encode(order), zmq.NOBLOCK)  # completes or fails at once
        if future.done() and future.exception() is not None:
            log.error("an order could not be sent to the engine: %s", future.exception())
            return False
        return True

    # ---- receiving reports

    async def _receive(self) -> None:
        resumed = 0.0
        while True:
            receiving: Any = self._socket.recv()
            has_waited = not receiving.done()
            raw = await receiving
            if has_waited:
                resumed = time.monotonic()
            self._count(len(raw))
            try:
                report = messages.decode_report(raw)
            except msgspec.DecodeError as error:
                # It may have held tokens of any request here, and an answer without them would be wrong.
                log.error("a report of the engine could not be decoded: %s", error)
                for waiting in list(self._listeners.values()):
                    waiting.fail("a report of the engine could not be decoded")
                continue
            match report:
                case StepReport(updates, stats):
                    # The counts of an engine that has ended are settled already.
                    if stats is not None and self.hello is not None and self._watcher is not None:
                        self._watcher.engine(stats)
                    for each in updates:
                        if (listener := self._listeners.get(each.key)) is not None:
                            try:
                                listener.take(each)
                            except Exception:  # an error in one answer must not stop the others
                                log.exception("an update of a request could not be handled")
                                listener.fail("an update of the answer could not be handled")
                        if each.logprobs is not None and time.monotonic() - resumed > _READ_SECONDS:
                            await asyncio.sleep(0)  # with 64 alternatives each, a report takes tens of ms
                            resumed = time.monotonic()
                    if time.monotonic() - resumed > _READ_SECONDS:  # `recv` does not suspend while reports are queued
                        await asyncio.sleep(0)
                        resumed = time.monotonic()
                case Explained(question) | PrefixCacheReset(question):
                    self._answer(question, report)
                case Watched(record):
                    self.on_record(record)
                case Unreadable(key, message):
                    self._answer(key, None)
                    if (listener := self._listeners.pop(key, None)) is not None:
                        listener.fail(message)
                case Hello():
                    if self.hello is not None:  # the disconnect event of the previous engine is still pending
                        self._stale_ends += 1
                        self._fail_pending(_ENDED)
                        self._notify(False)
                    self.hello, self.broken = report, None
                    self._read = self._acknowledged = len(raw)
                    self._notify(True)
                case Broken(message):
                    self.broken = message
                    self._notify(False)

    def _count(self, size: int) -> None:
        """Acknowledge read bytes now and then: the engine waits for processes that are far behind."""
        self._read += size
        if self._read - self._acknowledged > _ACKNOWLEDGE_EVERY:
            self._acknowledged = self._read
            self._send(messages.Read(self._read))

    async def _watch(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)  # only disconnect events are monitored
            if self._stale_ends:
                self._stale_ends -= 1
                continue
            self.hello = None
            self._fail_pending(_ENDED)
            self._notify(False)

    def _fail_pending(self, message: str) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lose(message)
        for question in self._questions:
            self._answer(question, None)

    def _answer(self, question: int, answer: EngineAnswer | None) -> None:
        pending = self._questions.get(question)
        if pending is not None and not pending.done():
            pending.set_result(answer)

    def _notify(self, up: bool) -> None:
        self._changed.set()
        if self._watcher is not None:
            self._watcher.engine_state(up)
