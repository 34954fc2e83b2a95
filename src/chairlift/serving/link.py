"""Link: the engine's socket to one HTTP process, with a bound on what that process has not read."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from chairlift.core.errors import RequestError
from chairlift.core.request import FinishReason
from chairlift.serving import messages
from chairlift.serving.messages import Batch, News, Stats

log = logging.getLogger("chairlift")

_PART = 4096  # news in one message
_BACKLOG = 100_000  # messages that an HTTP process may leave unread before its requests are ended
_BEHIND = 4 << 20  # bytes that an HTTP process may leave unread before the engine waits for it: 1,000 steps or more
_MOST = 64 << 20  # and before its requests are ended, if it does not read at all
_STUCK = 2.0  # seconds without reading, after which the engine does not wait for it any longer


class Link:
    """The socket to one HTTP process, and the requests that came through it."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.keys: dict[int, str] = {}  # their numbers for requests, and ours
        self._owed: list[int] = []  # keys of requests that were ended and could not be told so
        self._sent = self._read = 0  # bytes, since the other side came
        self._read_at = 0.0  # when it last said that it had read some
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a process that is gone
        self._socket.setsockopt(zmq.SNDHWM, _BACKLOG)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # what may be under way is bounded by admission, before it gets here
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller wake for it."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def changes(self) -> list[bool]:
        """Whether the other side came (True) or went (False), since the last call."""
        found = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            found.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return found

    def receive(self) -> list[messages.Order]:
        """All orders that have come."""
        orders: list[messages.Order] = []
        while True:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return orders
            try:
                orders.append(messages.decode_order(raw))
            except RequestError as error:  # of SamplingParams, which checks itself as it is decoded
                if (key := messages.key_of(raw)) is not None:
                    self.send(Batch([News(key, 0, finish_reason=messages.REFUSED, error=str(error))]))
            except msgspec.DecodeError as error:
                log.error("an order could not be decoded: %s", error)
                if (key := messages.key_of(raw)) is not None:
                    self.send(messages.Unreadable(key, f"the engine could not decode the request: {error}"))

    def begin(self) -> None:
        """Another process has come, which has nothing to read yet."""
        self._sent = self._read = 0
        self._owed.clear()

    def has_read(self, total: int, now: float) -> None:
        """The other side has read so many bytes in all; if it was too far behind before, it is told what it missed."""
        self._read, self._read_at = total, now
        if self._owed and self._sent - self._read < _BEHIND:
            owed, self._owed = self._owed, []
            told = "the answer was lost: the HTTP process was too far behind the engine"
            self.tell([News(key, 0, finish_reason=FinishReason.ERROR.value, error=told) for key in owed], None)

    def is_behind(self, now: float) -> bool:
        """Whether the other side should have time to read: it has much to read, and reads."""
        return self._sent - self._read > _BEHIND and now - self._read_at < _STUCK

    def owe_end(self) -> None:
        """Have all requests that are under way told of their end as soon as the other side reads again."""
        self._owed += self.keys

    def tell(self, news: list[News], stats: Stats | None) -> bool:
        """A step's news, in messages of bounded size: beams come with all their tokens at once."""
        if self._sent - self._read > _MOST:
            return False
        parts = [news[start : start + _PART] for start in range(0, len(news), _PART)] or [[]]
        told = [self.send(Batch(part)) for part in parts[:-1]]
        return all(told) and self.send(Batch(parts[-1], stats))

    def send(self, report: messages.Report) -> bool:
        """Send without waiting; False if the other side does not read."""
        raw = messages.encode(report)
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += len(raw)
        return True

    def close(self) -> None:
        """Close the socket once what was sent has left, or after a second."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=1000)
