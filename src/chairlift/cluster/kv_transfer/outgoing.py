"""Outgoing: the sending end: the blocks of prompts that this engine computes for others, sent as they are computed."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple

import torch

from chairlift.cluster.kv_transfer import nixl, region, wire
from chairlift.cluster.kv_transfer.nixl import UnusableError
from chairlift.cluster.kv_transfer.wire import Blocks, End, Hello, LinkError, Prompt, Read, Refused, Welcome
from chairlift.execution.exchange import BlockExchange

log = logging.getLogger("chairlift")

_STALL = 1.0  # seconds to wait for free slots before a prompt's further blocks are given up; no step runs meanwhile
_CONNECT = 0.5  # seconds from the start of a connection that computed blocks wait for it; no step runs meanwhile
_RETRY = 2.0  # seconds before a receiver that could not be reached is tried again


class Filled(NamedTuple):
    """Slots with blocks of one prompt, once their copies are done."""

    transfer: int
    first: int
    slots: list[int]
    done: torch.Event | None


class Peer:
    """The connection to one receiver: a thread sends what the engine has copied, another reads which slots are free.

    It may take seconds to connect, while prompts are computed; blocks that are never sent are computed by the receiver.
    """

    def __init__(self, address: str, key: bytes, layout: str, blocks: BlockExchange, outgoing: Outgoing) -> None:
        self._blocks, self._outgoing = blocks, outgoing
        self._free: deque[int] = deque()
        self._owner: dict[int, Transfer] = {}  # of each slot that is not free
        self._changed = Condition()
        self._is_connecting, self._patience_end = True, time.monotonic() + _CONNECT
        self.is_lost = False
        self.retry_at = 0.0  # if it is lost
        self._is_stalled = False  # no slot became free in time
        self._queue: SimpleQueue[Filled | Prompt | End | None] = SimpleQueue()
        Thread(target=self._run, args=(address, key, layout), name="kv-send", daemon=True).start()

    def _run(self, address: str, key: bytes, layout: str) -> None:
        """Connect, then send what is queued."""
        try:
            slots = self._connect_best(address, key, layout)
        except Exception as error:  # of the network, of memory, or of torch at a handle that makes no sense
            log.warning("no KV can be sent: %s", error)
            with self._changed:
                self.is_lost, self._is_connecting, self.retry_at = True, False, time.monotonic() + _RETRY
                self._changed.notify_all()
            return
        with self._changed:
            self._free.extend(range(slots))
            self._is_connecting = False
            self._changed.notify_all()
        Thread(target=self._read_all, name="kv-read", daemon=True).start()
        self._send_all()

    def _connect_best(self, address: str, key: bytes, layout: str) -> int:
        """Connect in the best way that works; return the number of slots."""
        ways = region.ways_between(address, self._blocks.device)
        try:
            slots = self._connect(address, key, layout, ways)
        except UnusableError as error:
            log.warning("KV blocks are sent to %s over TCP: %s", address, error)
            slots = self._connect(address, key, layout, ways[1:])
        self._link.settimeout(None)
        self._slots = self._blocks.view(self._region.raw)
        return slots

    def _connect(self, address: str, key: bytes, layout: str, ways: list[str]) -> int:
        """Connect to the receiver and open its region; return the number of slots."""
        blocks = self._blocks
        self._link = wire.connect(address, key)
        try:
            wire.send(self._link, Hello(layout, blocks.block_bytes, ways))
            match wire.receive(self._link):
                case Welcome(slots, way, handle) if way in ways:
                    size, block = slots * blocks.block_bytes, blocks.block_bytes
                    self._region = region.open_region(way, size, block, blocks.device, handle, self._link)
                    self._is_sent = way == "tcp"
                    log.info("KV blocks are sent to %s by %s", address, way)
                    return slots
                case Refused(reason):
                    raise LinkError(f"{address} refuses blocks: {reason}")
                case _:
                    raise LinkError(f"{address} does not follow the protocol")
        except BaseException:
            self._link.close()
            raise

    # ---- called by the engine's thread

    def put(self, message: Prompt | End) -> None:
        """Send a message behind those that are queued."""
        self._queue.put(message)

    def has_tried(self) -> bool:
        """Return whether it is connected or lost; a new connection is waited for."""
        with self._changed:
            patience = max(0.0, self._patience_end - time.monotonic())
            return self._changed.wait_for(lambda: not self._is_connecting, patience)

    def send(self, transfer: Transfer, first: int, blocks: list[int]) -> bool:
        """Copy computed blocks to slots and announce them; False if there was no slot in time."""
        end = time.monotonic() + _STALL
        while blocks:
            slots = self._take_slots(transfer, len(blocks), end)
            if not slots:
                return False
            done = self._blocks.copy_out(blocks[: len(slots)], [self._slots[slot] for slot in slots])
            self._queue.put(Filled(transfer.number, first, slots, done))
            first, blocks = first + len(slots), blocks[len(slots) :]
        return True

    def _take_slots(self, transfer: Transfer, most: int, end: float) -> list[int]:
        """Wait for free slots, unless the receiver has just been waited for in vain; return up to `most`."""
        with self._changed:
            patience = 0.0 if self._is_stalled else max(0.0, end - time.monotonic())
            self._is_stalled = not self._changed.wait_for(lambda: self._free or self.is_lost, patience)
            if self.is_lost:
                return []
            found = [self._free.popleft() for _ in range(min(most, len(self._free)))]
            for slot in found:
                self._owner[slot] = transfer
            transfer.unread += len(found)
        return found

    # ---- the connection's threads

    def _send_all(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if not isinstance(item, Filled):
                    wire.send(self._link, item)
                    continue
                if item.done is not None:
                    item.done.synchronize()
                if self._region.write is not None:
                    self._region.write(item.slots, lambda: self.is_lost)
                wire.send(self._link, Blocks(item.transfer, item.first, item.slots))
                if self._is_sent:
                    self._send_bytes(item.slots)
        except (LinkError, RuntimeError) as error:
            self._lose(str(error))
        finally:
            self._region.close()

    def _send_bytes(self, slots: list[int]) -> None:
        memory, size = memoryview(self._region.raw.numpy().data), self._blocks.block_bytes
        try:
            for slot in slots:
                self._link.sendall(memory[slot * size : (slot + 1) * size])
        except OSError as error:
            raise LinkError(f"the other end is gone: {error}") from None

    def _read_all(self) -> None:
        try:
            while True:
                message = wire.receive(self._link)
                if not isinstance(message, Read):
                    raise LinkError(f"{type(message).__name__} was not expected")
                self._freed(message.slots)
        except LinkError as error:
            self._lose(str(error))

    def _freed(self, slots: list[int]) -> None:
        with self._changed:
            for slot in slots:
                transfer = self._owner.pop(slot, None)
                if transfer is None:
                    raise LinkError(f"slot {slot} was not in use")
                transfer.unread -= 1
                self._free.append(slot)
                self._is_stalled = False
                if transfer.is_over and not transfer.unread:
                    self._outgoing.ended(transfer)
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        """End the connection: its prompts count as sent, and the receiver, if it runs, computes what it lacks."""
        with self._changed:
            if self.is_lost:
                return
            self.is_lost = True
            over = {each.number: each for each in self._owner.values() if each.is_over}
            self._changed.notify_all()
        log.warning("a KV connection was lost: %s", reason)
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        self._queue.put(None)
        for transfer in over.values():
            self._outgoing.ended(transfer)

    def finish(self, transfer: Transfer) -> bool:
        """Note that no more blocks of a prompt follow; whether its end is already certain."""
        with self._changed:
            transfer.is_over = True
            return self.is_lost or not transfer.unread


class Transfer:
    """The blocks of one prompt on their way to one receiver."""

    def __init__(self, number: int, name: str, peer: Peer | None) -> None:
        self.number, self.name = number, name
        self.peer = peer
        self.sent = 0  # blocks that are copied or given up
        self.unread = 0  # slots that the receiver has not freed
        self.is_over = False


class Outgoing:
    """All transfers of one engine; its methods are called by the engine's thread."""

    def __init__(self, key: bytes, layout: str, block_size: int, blocks: BlockExchange) -> None:
        self._key, self._layout, self._size, self._blocks = key, layout, block_size, blocks
        self._peers: dict[str, Peer] = {}
        if key:
            nixl.is_usable()  # looked for now: it takes longer than a step
        self._transfers: dict[str, Transfer] = {}
        self._done: deque[Transfer] = deque()
        self._next = 0
        self.sent = 0  # blocks
        self.reader, self._writer = os.pipe()  # readable when a receiver has read all blocks of a prompt
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def begin(self, name: str, address: str, salt: str, key: bytes) -> None:
        """Send the blocks of a request's prompt to a receiver, as they are computed."""
        self._next += 1
        peer = self._peer(address)
        self._transfers[name] = Transfer(self._next, name, peer)
        if peer is not None:
            width = 4 * self._size
            peer.put(Prompt(self._next, salt, key[: len(key) // width * width]))

    def _peer(self, address: str) -> Peer | None:
        """Return the connection to a receiver, which may still be made; None if there is none now."""
        found = self._peers.get(address)
        if found is None or (found.is_lost and time.monotonic() >= found.retry_at):
            found = self._peers[address] = Peer(address, self._key, self._layout, self._blocks, self)
        return None if found.is_lost else found

    def __contains__(self, name: str) -> bool:
        return name in self._transfers

    def computed(self, name: str, blocks: list[int], tokens: int) -> None:
        """Send the blocks that a prompt's first `tokens` tokens fill, except those that were sent before."""
        transfer = self._transfers[name]
        full = min(tokens // self._size, len(blocks))
        if full <= transfer.sent or transfer.peer is None or not transfer.peer.has_tried():
            return
        first, transfer.sent = transfer.sent, full
        if not transfer.peer.send(transfer, first, blocks[first:full]):
            transfer.peer.put(End(transfer.number))  # or the receiver would keep the prompt for the whole connection
            transfer.peer = None  # the receiver is gone or does not read: it computes the rest itself
        else:
            self.sent += full - first

    def finish(self, name: str) -> None:
        """Note that a prompt is computed: it is reported by `take_done` once the receiver has all its blocks."""
        transfer = self._transfers[name]
        if transfer.peer is None:
            self.ended(transfer)
            return
        transfer.peer.put(End(transfer.number))
        if transfer.peer.finish(transfer):
            self.ended(transfer)

    def abort(self, name: str) -> None:
        """Forget a request."""
        transfer = self._transfers.pop(name, None)
        if transfer is not None and transfer.peer is not None:
            transfer.peer.put(End(transfer.number))

    def ended(self, transfer: Transfer) -> None:
        """Report a transfer; any thread may call this."""
        self._done.append(transfer)
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def take_done(self) -> list[str]:
        """Return the requests with blocks that were all read since the last call."""
        with suppress(BlockingIOError):
            os.read(self.reader, 1 << 16)
        found = []
        while self._done:
            transfer = self._done.popleft()
            if self._transfers.get(transfer.name) is transfer:
                del self._transfers[transfer.name]
                found.append(transfer.name)
        return found
