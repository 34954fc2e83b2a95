"""Link: the engine's socket to one HTTP process, with a bound on the bytes that the process has not read."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from chairlift.core.errors import RequestError
from chairlift.core.request import FinishReason
from chairlift.serving import messages
from chairlift.serving.messages import AnswerUpdate, Stats, StepReport

log = logging.getLogger("chairlift")

_PART = 4096  # updates per message
_BACKLOG = 100_000  # unread messages of an HTTP process above which its requests are aborted
_BEHIND = 4 << 20  # unread bytes of an HTTP process above which the engine waits for it: 1,000 steps or more
_MOST = 64 << 20  # unread bytes above which its requests are aborted, if it does not read at all
_STUCK = 2.0  # seconds without reading after which the engine no longer waits for it


class Link:
    """The socket to one HTTP process, and the live requests that it submitted."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.keys: dict[int, str] = {}  # request id in the engine, by the HTTP process's key
        self._unsent_ends: list[int] = []  # keys of aborted requests without a sent end
        self._sent = self._read = 0  # bytes, since the HTTP process connected
        self._read_at = 0.0  # when it last acknowledged bytes
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a process that is not connected
        self._socket.setsockopt(zmq.SNDHWM, _BACKLOG)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # admission bounds what is in flight
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def register(self, poller: zmq.Poller) -> None:
        """Register the socket and its monitor with a poller."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def changes(self) -> list[bool]:
        """Return the connects (True) and disconnects (False) of the HTTP process since the last call."""
        found = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            found.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return found

    def receive(self) -> list[messages.Order]:
        """Return all orders that have arrived; undecodable ones are answered with an error."""
        orders: list[messages.Order] = []
        while True:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return orders
            try:
                orders.append(messages.decode_order(raw))
            except RequestError as error:  # from SamplingParams, which is validated while it is decoded
                if (key := messages.key_of(raw)) is not None:
                    self.send(StepReport([AnswerUpdate(key, 0, finish_reason=messages.REFUSED, error=str(error))]))
            except msgspec.DecodeError as error:
                log.error("an order could not be decoded: %s", error)
                if (key := messages.key_of(raw)) is not None:
                    self.send(messages.Unreadable(key, f"the engine could not decode the request: {error}"))

    def begin(self) -> None:
        """Reset the byte counts: a new HTTP process has connected."""
        self._sent = self._read = 0
        self._unsent_ends.clear()

    def has_read(self, total: int, now: float) -> None:
        """Record the total bytes read; send the ends of requests that were aborted while it was too far behind."""
        self._read, self._read_at = total, now
        if self._unsent_ends and self._sent - self._read < _BEHIND:
            keys, self._unsent_ends = self._unsent_ends, []
            message = "the answer was lost: the HTTP process was too far behind the engine"
            self.send_updates(
                [AnswerUpdate(key, 0, finish_reason=FinishReason.ERROR.value, error=message) for key in keys], None
            )

    def is_behind(self, now: float) -> bool:
        """Whether the engine should wait for the HTTP process: it has many unread bytes, and it reads."""
        return self._sent - self._read > _BEHIND and now - self._read_at < _STUCK

    @property
    def has_room(self) -> bool:
        """Whether the HTTP process has read enough to be sent what it can do without."""
        return self._sent - self._read < _BEHIND // 2

    def send_ends_later(self) -> None:
        """Remember the live requests, to send their end when the HTTP process reads again."""
        self._unsent_ends += self.keys

    def send_updates(self, updates: list[AnswerUpdate], stats: Stats | None) -> bool:
        """Send a step's updates in messages of bounded size: a beam search reports all its tokens at once."""
        if self._sent - self._read > _MOST:
            return False
        parts = [updates[start : start + _PART] for start in range(0, len(updates), _PART)] or [[]]
        sent = [self.send(StepReport(part)) for part in parts[:-1]]
        return all(sent) and self.send(StepReport(parts[-1], stats))

    def send(self, report: messages.Report) -> bool:
        """Send without blocking; return False if the HTTP process does not read."""
        raw = messages.encode(report)
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += len(raw)
        return True

    def close(self) -> None:
        """Close the socket once all is sent, or after a second."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=1000)
