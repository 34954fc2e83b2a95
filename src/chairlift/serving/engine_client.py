"""EngineClient: an HTTP process's line to the engine, whichever engine process is at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from chairlift.core.errors import ChairliftError
from chairlift.serving import messages
from chairlift.serving.beat import Beat
from chairlift.serving.messages import Batch, Broken, Explained, Hello, News, PrefixCacheReset, Stats, Unreadable
from chairlift.serving.shared import private_folder

log = logging.getLogger("chairlift")
Told = Explained | PrefixCacheReset  # what answers a question
_FIND_EVERY = 0.5  # seconds between two looks whether the socket's file is there
_TELL_EVERY = 256 << 10  # bytes read between two words to the engine about it
_TURN = 0.005  # seconds of reading reports after which the streams are written that wait to be
_ENDED = "the engine process has ended; it is being started again"


class Listener(Protocol):
    """Who waits for the news of a request."""

    def take(self, news: News) -> None:
        """Something happened to one of its answers."""

    def lose(self, message: str) -> None:
        """The engine is gone, and nothing more will come."""

    def fail(self, message: str) -> None:
        """The engine could not take the request, through no fault of its client."""


class Watcher(Protocol):
    """Who wants to know how the engine stands."""

    def engine(self, stats: Stats) -> None:
        """After a step."""

    def engine_state(self, up: bool) -> None:
        """It came or went."""


class EngineClient:
    """Binds a socket that each engine process in turn connects to, and hands out what comes through it."""

    def __init__(self, address: str, beat: Beat, watcher: Watcher | None = None) -> None:
        self.hello: Hello | None = None  # None: there is no engine at the moment
        self.broken: str | None = None  # why the engine could not start
        self.stats: Stats | None = None
        self._address = address
        self._path = Path(address.removeprefix("ipc://"))
        self._beat = beat
        self._watcher = watcher
        self._listeners: dict[int, Listener] = {}
        self._questions: dict[int, asyncio.Future[Told | None]] = {}
        self._next = secrets.randbits(40)  # news for an earlier process on this socket must not find a listener here
        self._stale_ends = 0  # disconnections still to be read of engines that another has replaced already
        self._read = self._told = 0  # bytes of reports, and how many the engine knows of
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Wait for an engine from now on."""
        context = zmq.asyncio.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # admission has bounded what may be sent
        self._socket.setsockopt(zmq.RCVHWM, 0)  # the engine's side drops a reader that falls too far behind
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._bind()
        waiting = (self._receive(), self._watch(), self._stay_reachable())
        self._tasks = [asyncio.create_task(each) for each in waiting]

    async def close(self) -> None:
        """End whatever waits; a second call changes nothing."""
        self.hello = None
        self._lose("the server is stopping")
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
        """Bind again when the socket's file is gone: the next engine could not find it.

        Files in /tmp are removed by others, now and then. The engine that is connected notices nothing.
        """
        while True:
            await asyncio.sleep(_FIND_EVERY)
            if self._path.exists():
                continue
            log.warning("the socket %s was removed; it is made again", self._path)
            try:
                with contextlib.suppress(zmq.ZMQError):  # where an earlier try has come so far already
                    self._socket.unbind(self._address)
                self._bind()
            except (OSError, ChairliftError, zmq.ZMQError) as error:
                log.error("the socket %s cannot be made: %s", self._path, error)

    async def wait(self) -> None:
        """Until the engine comes, goes or says that it cannot start."""
        self._changed.clear()
        await self._changed.wait()

    # ---- how it stands

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served at the moment, or None."""
        if self.hello is None:
            return "the engine is not running" + (f": {self.broken}" if self.broken else "; it is being started")
        silence = self._beat.silence(time.monotonic())
        if silence > self._beat.patience:
            return f"the engine has been silent for {silence:.1f} s: a step hangs"
        return None

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for room in the batch, as of the last step."""
        return self.stats is not None and self.stats.waiting > 0 and self.stats.blocked_by != ""

    @property
    def live(self) -> int:
        """Requests under way through this process."""
        return len(self._listeners)

    # ---- orders out

    def new_key(self) -> int:
        """A number for a request."""
        self._next += 1
        return self._next

    def submit(self, order: messages.Submit, listener: Listener) -> None:
        """Hand a request to the engine; its news go to the listener until it is forgotten.

        Without an engine the listener is told at once: the engine may have ended since the request was let in.
        """
        self._listeners[order.key] = listener
        if not self._send(order):
            del self._listeners[order.key]
            listener.lose(self.trouble or "the engine does not take requests")

    def abort(self, key: int) -> None:
        """End a request; its listener hears no more."""
        if self._listeners.pop(key, None) is not None:
            self._send(messages.Abort(key))

    def stop(self, key: int, index: int) -> None:
        """End one answer of a request."""
        self._send(messages.Stop(key, index))

    def forget(self, key: int) -> None:
        """A request has ended by itself."""
        self._listeners.pop(key, None)

    @property
    def questions(self) -> int:
        """How many wait for an answer of the engine."""
        return len(self._questions)

    async def explain(self, name: str, tenant: str | None) -> Explained | None:
        """Where a request is, if it is that tenant's; None when the engine does not say in time."""
        told = await self._ask(messages.Explain(self.new_key(), name, tenant))
        return told if isinstance(told, Explained) else None

    async def reset_prefix_cache(self) -> int | None:
        """Have the engine forget all prefixes; how many blocks it was, None when it does not say in time."""
        told = await self._ask(messages.ResetPrefixCache(self.new_key()))
        return told.blocks if isinstance(told, PrefixCacheReset) else None

    async def _ask(self, order: messages.Explain | messages.ResetPrefixCache) -> Told | None:
        answer: asyncio.Future[Told | None] = asyncio.get_running_loop().create_future()
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
        """Send an order without waiting; False if there is no engine, or none that takes it."""
        if self.hello is None:
            return False
        future: Any = self._socket.send(messages.encode(order), zmq.NOBLOCK)  # done at once, or refused
        if future.done() and future.exception() is not None:
            log.error("the engine does not take orders: %s", future.exception())
            return False
        return True

    # ---- news in

    async def _receive(self) -> None:
        resumed = 0.0
        while True:
            report_comes: Any = self._socket.recv()
            has_waited = not report_comes.done()
            raw = await report_comes
            if has_waited:
                resumed = time.monotonic()
            self._count(len(raw))
            try:
                report = messages.decode_report(raw)
            except msgspec.DecodeError as error:
                # It may have held tokens of any request here: an answer without them would be a wrong one.
                log.error("a report of the engine could not be decoded: %s", error)
                for waiting in list(self._listeners.values()):
                    waiting.fail("a report of the engine could not be decoded")
                continue
            match report:
                case Batch(news, stats):
                    if stats is not None and self.hello is not None:  # an engine that was lost has been counted out
                        self.stats = stats
                        if self._watcher is not None:
                            self._watcher.engine(stats)
                    for each in news:
                        if (listener := self._listeners.get(each.key)) is not None:
                            try:
                                listener.take(each)
                            except Exception:  # one answer's bug must not silence the others
                                log.exception("news of a request could not be read")
                                listener.fail("the answer could not be read")
                        if each.logprobs is not None and time.monotonic() - resumed > _TURN:
                            await asyncio.sleep(0)  # with 64 alternatives each, a batch takes tens of milliseconds
                            resumed = time.monotonic()
                    if time.monotonic() - resumed > _TURN:  # `recv` does not wait while there are reports to read
                        await asyncio.sleep(0)
                        resumed = time.monotonic()
                case Explained(question) | PrefixCacheReset(question):
                    self._answer(question, report)
                case Unreadable(key, message):
                    self._answer(key, None)
                    if (listener := self._listeners.pop(key, None)) is not None:
                        listener.fail(message)
                case Hello():
                    if self.hello is not None:  # the end of the engine before it has yet to be seen
                        self._stale_ends += 1
                        self._lose(_ENDED)
                        self._tell(False)
                    self.hello, self.broken = report, None
                    self._read = self._told = len(raw)
                    self._tell(True)
                case Broken(message):
                    self.broken = message
                    self._tell(False)

    def _count(self, size: int) -> None:
        """Tell the engine now and then how much has been read: it waits for processes that are far behind."""
        self._read += size
        if self._read - self._told > _TELL_EVERY:
            self._told = self._read
            self._send(messages.Read(self._read))

    async def _watch(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)  # it is only told of disconnections
            if self._stale_ends:
                self._stale_ends -= 1
                continue
            self.hello = None
            self._lose(_ENDED)
            self._tell(False)

    def _lose(self, message: str) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lose(message)
        for question in self._questions:
            self._answer(question, None)

    def _answer(self, question: int, answer: Told | None) -> None:
        waits = self._questions.get(question)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    def _tell(self, up: bool) -> None:
        self._changed.set()
        if self._watcher is not None:
            self._watcher.engine_state(up)
