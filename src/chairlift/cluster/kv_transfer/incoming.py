"""Incoming: the receiving end of all KV connections of one engine."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from contextlib import suppress
from threading import Lock, Thread

from chairlift.cluster.kv_transfer import region, wire
from chairlift.cluster.kv_transfer.nixl import UnusableError
from chairlift.cluster.kv_transfer.wire import Blocks, End, Hello, LinkError, Prompt, Read, Refused, Welcome
from chairlift.core.exchange import Arrived, Exchange
from chairlift.core.prefix_node import TOKEN_BYTES
from chairlift.execution.exchange import BlockExchange

log = logging.getLogger("chairlift")

MAX_CONNECTIONS = 64
_MAX_PROMPTS = 4096  # of one connection, of which blocks may follow
_MOST_SLOTS = 1024  # of one connection
_PROGRESS, _IDLE = 0.0001, 0.01  # seconds between two calls of a region's `progress`, with open prompts and without
_ACCEPT_AGAIN = 1.0  # seconds after an error
_BACKLOG = 8  # new connections that may be in their handshake


class Connection:
    """One sender, with the slots that it may fill. A thread reads its messages; the engine's thread frees slots."""

    def __init__(self, incoming: Incoming, link: socket.socket, way: str) -> None:
        self._incoming, self._link, self._way = incoming, link, way
        slots = max(1, min(_MOST_SLOTS, region.BYTES[way] // incoming.blocks.block_bytes))
        size = slots * incoming.blocks.block_bytes
        self._region = region.make(way, size, incoming.blocks.device)
        self._raw, handle, descriptor, *_ = self._region
        try:
            wire.send(link, Welcome(slots, way, handle))
            if descriptor is not None:
                region.send_descriptor(link, descriptor)
        except LinkError:
            self._region.close()
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._granted = set(range(slots))  # slots that the sender may fill
        self._all = slots
        self._lock = Lock()
        self._prompts: dict[int, Prompt] = {}
        self._is_closed = False
        self._first = incoming.blocks.add_region(self._raw, self._free)

    def serve(self) -> None:
        """Read messages until the sender is gone."""
        self._link.settimeout(None)
        while True:
            self._await_message()
            match wire.receive(self._link):
                case Prompt() as prompt:
                    if len(self._prompts) >= _MAX_PROMPTS:
                        raise LinkError(f"{_MAX_PROMPTS} prompts are open")
                    self._prompts[prompt.transfer] = prompt
                case Blocks(transfer, first, slots):
                    self._take(self._prompts.get(transfer), first, slots)
                case End(transfer):
                    self._prompts.pop(transfer, None)
                case other:
                    raise LinkError(f"{type(other).__name__} was not expected")

    def _await_message(self) -> None:
        if (progress := self._region.progress) is None:
            return
        ready = select.poll()
        ready.register(self._link, select.POLLIN)
        while not ready.poll(0):
            progress()
            time.sleep(_PROGRESS if self._prompts else _IDLE)

    def _take(self, prompt: Prompt | None, first: int, slots: list[int]) -> None:
        """Queue filled slots for the engine's next step."""
        block = self._incoming.block_size * TOKEN_BYTES
        with self._lock:
            if not slots or len(set(slots)) != len(slots) or not self._granted.issuperset(slots):
                raise LinkError("slots were filled that were not free")
            if prompt is None or (first + len(slots)) * block > len(prompt.key):
                raise LinkError("blocks were sent behind the end of their prompt, or of no prompt")
            self._granted.difference_update(slots)
        if self._way == "tcp":
            try:
                self._fill(slots)
            except LinkError:  # the sender has ended within a block: without these, the region would never be dropped
                with self._lock:
                    self._granted.update(slots)
                raise
        key = prompt.key[: (first + len(slots)) * block]
        self._incoming.arrived(Arrived(prompt.salt, key, first, [self._first + slot for slot in slots]))

    def _fill(self, slots: list[int]) -> None:
        """Read the bytes of blocks that are sent over the connection itself."""
        size = self._incoming.blocks.block_bytes
        memory = memoryview(self._raw.numpy().data)
        for slot in slots:
            wire.read_into(self._link, memory[slot * size : (slot + 1) * size])

    def _free(self, slots: list[int]) -> None:
        """Let the sender fill slots again; called by the engine's thread."""
        with self._lock:
            self._granted.update(slots)
            if not self._is_closed:
                with suppress(LinkError):  # never blocks: the socket has room for the numbers of all slots
                    wire.send(self._link, Read(slots))
        self._drop_if_over()

    def close(self) -> None:
        """Close the socket; blocks that have arrived are still copied."""
        with self._lock:
            self._is_closed = True
        self._link.close()
        self._drop_if_over()

    def _drop_if_over(self) -> None:
        with self._lock:
            if self._is_closed and len(self._granted) == self._all:
                self._incoming.blocks.drop_region(self._first)
                self._region.close()


class Incoming:
    """Listens for senders, and passes their blocks to the engine."""

    def __init__(
        self, address: str, key: bytes, layout: str, block_size: int, exchange: Exchange, blocks: BlockExchange
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        self._layout, self._key, self._exchange = layout, key, exchange
        self._kind = address.partition(":")[0]
        region.ways_between(address, blocks.device)  # NIXL is looked for now: it takes longer than a step
        self.connections = 0
        self._lock = Lock()  # of that number, which many threads change
        self.reader, self._writer = os.pipe()  # readable when blocks have arrived
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._listener = wire.listen(address)
        self._listener.listen(_BACKLOG)
        Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError as error:  # out of descriptors, for example: the engine can do without blocks for a while
                log.error("no KV connection can be accepted: %s", error)
                time.sleep(_ACCEPT_AGAIN)
                continue
            if self.connections >= MAX_CONNECTIONS:
                link.close()
                continue
            self._count(1)
            Thread(target=self._serve, args=(link,), name="kv-receive", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Serve one sender until it is gone."""
        connection = None
        try:
            link.settimeout(wire.HANDSHAKE_SECONDS)
            is_local = self._kind == "unix"
            if not is_local:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire.keep_alive(link)
            wire.prove(link, b"" if is_local else self._key, is_sender=False)
            hello = wire.receive(link)
            reason = self._problem(hello)
            if reason is not None or not isinstance(hello, Hello):
                wire.send(link, Refused(reason or "a Hello was expected"))
                return
            connection = self._welcome(link, self._common(hello.ways))
            connection.serve()
        except LinkError as error:
            log.info("a KV connection has ended: %s", error)
        except (RuntimeError, OSError) as error:  # out of memory, for example
            log.error("a KV connection could not be served: %s", error)
        finally:
            if connection is not None:
                connection.close()
            link.close()
            self._count(-1)

    def _welcome(self, link: socket.socket, ways: list[str]) -> Connection:
        """Return a connection that uses the first of the ways that can be used."""
        for way in ways[:-1]:
            try:
                return Connection(self, link, way)
            except UnusableError as error:
                log.warning("KV blocks cannot be received by %s: %s", way, error)
        return Connection(self, link, ways[-1])

    def _count(self, more: int) -> None:
        with self._lock:
            self.connections += more

    def _problem(self, hello: wire.Message) -> str | None:
        """Return why a sender is refused."""
        if not isinstance(hello, Hello):
            return "a Hello was expected"
        if (hello.layout, hello.block_bytes) != (self._layout, self.blocks.block_bytes):
            return "the engines have different models, dtypes or block sizes: start both with the same settings"
        if not self._common(hello.ways):
            ways = " or ".join(hello.ways)
            return f"blocks cannot be sent by {ways} to an engine on {self.blocks.device} at a {self._kind} socket"
        return None

    def _common(self, ways: list[str]) -> list[str]:
        """Return the ways of a sender that this end can use too, in the sender's order."""
        own = region.ways_between(f"{self._kind}:", self.blocks.device)
        return [way for way in ways if way in own]

    def arrived(self, blocks: Arrived) -> None:
        """Queue blocks for the engine's next step; called by a connection's thread."""
        self._exchange.arrived.append(blocks)
        self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def hear(self) -> None:
        """Empty the pipe; called by the engine's thread before it looks for blocks."""
        with suppress(BlockingIOError):
            os.read(self.reader, 1 << 16)
