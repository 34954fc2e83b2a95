"""KvStore: one engine's connections to a Redis server: a thread that stores evicted blocks and one that fetches.

A block's key is a hash of the model, the salt and all tokens up to its end, so that equal keys mean equal content; its
value has a checksum. The engine's thread never waits for the server.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import torch

from chairlift.cluster.kv_store.resp import Address, Redis, RedisError
from chairlift.core.exchange import Arrived, Departing, Exchange
from chairlift.core.prefix_node import TOKEN_BYTES
from chairlift.execution.exchange import BlockExchange

log = logging.getLogger("chairlift")

LIFETIME = 24 * 3600  # seconds that the server keeps a block; its maxmemory bounds their number
_REGION = 256 << 20  # bytes of slots, for blocks in either direction: 2,000 tokens of an 8B model
_MOST_SLOTS = 1024
_TIMEOUT = 2.0  # seconds without a byte from the server
_LONGEST = 10.0  # seconds that a request waits for blocks
_RETRY = 1.0  # seconds before a server that could not be reached is tried again
_SLOT_SECONDS = 0.002  # until free slots are looked for again
_KNOWN = 1 << 16  # keys that the server was sent or has sent: these blocks are not stored again
_BATCH = 16  # blocks asked for at once; the first time one, to learn whether there are any
_MOST_FETCHES = 64  # requests that may wait for blocks
_HEAD = struct.Struct("<4sI")  # a mark, and the checksum of what follows
_MARK = b"kv01"
_RATE = 0.2  # share of a new measurement in the mean


class Fetch:
    """The blocks of one prompt that are asked for: those behind the first `first`."""

    def __init__(self, name: str, salt: str, key: bytes, first: int, deadline: float) -> None:
        self.name, self.salt, self.key, self.first, self.deadline = name, salt, key, first, deadline
        self.arrived = 0  # blocks, counted by the thread that fetches
        self.copied = 0  # of these, into the pool: counted by the engine's thread
        self.is_over = False  # no further block arrives


class KvStore:
    """Stores the blocks that the engine evicts, and fetches those of prompts."""

    def __init__(self, url: str, layout: str, block_size: int, exchange: Exchange, blocks: BlockExchange) -> None:
        self._address, self._layout = Address.of(url), layout
        self._width = block_size * TOKEN_BYTES
        self._exchange, self._blocks = exchange, blocks
        slots = max(1, min(_MOST_SLOTS, _REGION // blocks.block_bytes))
        pinned = blocks.device.type == "cuda"
        self._out, self._in = (
            torch.empty(slots * blocks.block_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        )
        self._out_first = blocks.add_region(self._out, lambda places: None)
        self._in_first = blocks.add_region(self._in, self._freed)
        exchange.free.extend(range(self._out_first, self._out_first + slots))
        self._free: deque[int] = deque(range(slots))  # places for fetched blocks
        self._owner: dict[int, Fetch] = {}  # of each place that is not free
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._to_store: SimpleQueue[Departing] = SimpleQueue()
        self._to_fetch: SimpleQueue[Fetch] = SimpleQueue()
        self._fetches: dict[str, Fetch] = {}
        self._over: deque[Fetch] = deque()
        self.block_seconds = 0.0  # mean time to fetch one
        self.stored = self.fetched = self.failures = 0  # blocks, blocks, lost connections
        self.reader, self._writer = os.pipe()  # readable when blocks have been fetched
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        for task in (self._store_all, self._fetch_all):
            Thread(target=task, name="kv-store", daemon=True).start()

    # ---- called by the engine's thread

    def store(self, departing: list[Departing]) -> None:
        """Store evicted blocks that a finished step has copied to their slots."""
        for each in departing:
            self._to_store.put(each)

    def fetch(self, name: str, salt: str, key: bytes, first: int, seconds: float) -> bool:
        """Ask for the blocks of a prompt behind its first ones, within the time to compute them; whether it is asked.

        It is not if that would take longer, but now and then it is tried again.
        """
        missing = len(key) // self._width - first
        if missing <= 0 or len(self._fetches) >= _MOST_FETCHES:
            return False
        if missing * self.block_seconds > seconds:
            self.block_seconds *= 1 - _RATE / 4
            return False
        fetch = Fetch(name, salt, key, first, time.monotonic() + min(seconds, _LONGEST))
        self._fetches[name] = fetch
        self._to_fetch.put(fetch)
        return True

    def take_ready(self) -> list[str]:
        """Return the requests with all blocks in the pool, or past their deadline."""
        with suppress(BlockingIOError):
            os.read(self.reader, 1 << 16)
        while self._over:
            self._over.popleft().is_over = True
        if not self._fetches:
            return []
        now = time.monotonic()
        found = [
            name
            for name, each in self._fetches.items()
            if (each.is_over and each.arrived == each.copied) or each.deadline < now
        ]
        for name in found:
            del self._fetches[name]
        return found

    @property
    def wait(self) -> float | None:
        """Seconds until a request has waited long enough; None if none waits."""
        if not self._fetches:
            return None
        return max(0.0, min(each.deadline for each in self._fetches.values()) - time.monotonic())

    def abort(self, name: str) -> None:
        """Forget a request."""
        self._fetches.pop(name, None)

    def _freed(self, places: list[int]) -> None:
        for place in places:
            self._owner.pop(place).copied += 1
            self._free.append(place)

    # ---- the threads

    def _keys(self, salt: str, key: bytes) -> Iterator[bytes]:
        """Yield the key of each block: a hash of the model, the salt and all tokens up to its end."""
        before = hashlib.blake2b(f"{self._layout}\0{salt}".encode(), digest_size=32).digest()
        for start in range(0, len(key), self._width):
            chunk = key[start : start + self._width]
            before = hashlib.blake2b(before + chunk, digest_size=32).digest()
            yield b"chairlift:kv:" + before.hex().encode()

    def _memory(self, raw: torch.Tensor, place: int) -> memoryview:
        size = self._blocks.block_bytes
        return memoryview(raw.numpy().data)[place * size : (place + 1) * size]

    def _note(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > _KNOWN:
            with suppress(KeyError):  # the other thread may have removed it
                self._known.popitem(last=False)

    def _store_all(self) -> None:
        redis: Redis | None = None
        failed = -_RETRY
        while True:
            each = self._to_store.get()
            *_, key = self._keys(each.salt, each.key)
            try:
                if key in self._known or time.monotonic() - failed < _RETRY:
                    continue
                redis = redis or Redis(self._address, _TIMEOUT)
                raw = self._memory(self._out, each.slot - self._out_first)
                head = _HEAD.pack(_MARK, zlib.crc32(raw))
                value = b"".join((head, raw))
                redis.call([[b"SET", key, value, b"EX", str(LIFETIME).encode()]])
                self._note(key)
                self.stored += 1
            except RedisError as error:
                self._lose(redis, error)
                redis, failed = None, time.monotonic()
            finally:
                self._exchange.free.append(each.slot)

    def _lose(self, redis: Redis | None, error: RedisError) -> None:
        self.failures += 1
        self._known.clear()  # the server may have lost all blocks
        log.warning("the KV store %s is not used for %.0f s: %s", self._address, _RETRY, error)
        if redis is not None:
            redis.close()

    def _fetch_all(self) -> None:
        redis: Redis | None = None
        failed = -_RETRY
        while True:
            fetch = self._to_fetch.get()
            try:
                if time.monotonic() - failed >= _RETRY and time.monotonic() < fetch.deadline:
                    redis = redis or Redis(self._address, _TIMEOUT)
                    self._fetch(redis, fetch)
            except RedisError as error:
                self._lose(redis, error)
                redis, failed = None, time.monotonic()
            self._over.append(fetch)
            self._ring()

    def _fetch(self, redis: Redis, fetch: Fetch) -> None:
        """Fetch blocks in order until one is missing or the time is over."""
        keys = list(self._keys(fetch.salt, fetch.key))
        number, count, begun = fetch.first, 1, time.monotonic()
        while number < len(keys) and time.monotonic() < fetch.deadline:
            if not self._free:
                time.sleep(_SLOT_SECONDS)
                continue
            places = [self._free.popleft() for _ in range(min(count, len(keys) - number, len(self._free)))]
            redis.set_timeout(min(_TIMEOUT, 0.05 + max(0.0, fetch.deadline - time.monotonic()) * 2))
            found = 0
            try:
                asked = [[b"GET", key] for key in keys[number : number + len(places)]]
                for value, place in zip(redis.call(asked, self._blocks.block_bytes + _HEAD.size), places, strict=True):
                    if value is None or not self._accept(value, place):
                        break
                    found += 1
            finally:
                self._free.extend(places[found:])
            if found:
                self._arrive(fetch, number, places[:found])
                for key in keys[number : number + found]:
                    self._note(key)
            number, count = number + found, _BATCH
            if found < len(places):
                self._known.pop(keys[number], None)
                break
        got = number - fetch.first
        if got:
            took = (time.monotonic() - begun) / got
            self.block_seconds += _RATE * (took - self.block_seconds) if self.block_seconds else took

    def _accept(self, value: bytes, place: int) -> bool:
        """Copy a value to its slot; False if it is damaged."""
        head, content = value[: _HEAD.size], memoryview(value)[_HEAD.size :]
        if len(content) != self._blocks.block_bytes or head != _HEAD.pack(_MARK, zlib.crc32(content)):
            log.warning("a block of the KV store is damaged and is computed again")
            return False
        self._memory(self._in, place)[:] = content
        return True

    def _arrive(self, fetch: Fetch, first: int, places: list[int]) -> None:
        fetch.arrived += len(places)
        for place in places:
            self._owner[place] = fetch
        self.fetched += len(places)
        end = (first + len(places)) * self._width
        slots = [self._in_first + place for place in places]
        self._exchange.arrived.append(Arrived(fetch.salt, fetch.key[:end], first, slots))
        self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")
