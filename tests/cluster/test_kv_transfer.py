"""KV connections between two caches in one process, over real sockets: what arrives, is refused and is left."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from chairlift.cluster.kv_transfer import nixl, region, wire
from chairlift.cluster.kv_transfer import outgoing as outgoing_module
from chairlift.cluster.kv_transfer.incoming import Incoming
from chairlift.cluster.kv_transfer.outgoing import Outgoing
from chairlift.cluster.kv_transfer.wire import Blocks, Hello, LinkError, Prompt, Welcome
from chairlift.core.blocks import BlockPool
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.errors import ChairliftError
from chairlift.core.exchange import Exchange
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import Node, packed
from chairlift.core.prefixes import PrefixBinding
from chairlift.execution.exchange import BlockExchange
from chairlift.ops.kv_cache import KvCache

SIZE, BLOCKS, KEY = 16, 40, b"a key of the whole cluster"


class Engine:
    """The parts of an engine that blocks go through: a cache, its pool and its tree; its steps only move blocks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.cache = KvCache(3, BLOCKS, 2, 8, SIZE, dtype, torch.device("cpu"))
        self.blocks = BlockExchange(self.cache)
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tree = PrefixCache(self.pool)
        self.binding = PrefixBinding(self.pool, self.tree, CacheGroups((0,), SIZE, 1))

    @property
    def exchange(self) -> Exchange:
        return self.tree.exchange

    def step(self) -> None:
        plan = StepPlan()
        self.binding.take_in(plan, BLOCKS)
        self.binding.plan_moves(plan)
        self.blocks.receive(plan.received)
        self.binding.confirm(plan)
        read, self.exchange.read = self.exchange.read, []
        self.blocks.free(read)
        self.pool.check([])
        self.tree.check()

    def found(self, tokens: list[int], salt: str = "") -> list[Node]:
        path: list[Node] = []
        self.tree.match(path, salt, packed(tokens), len(tokens) // SIZE)
        return path


def until(condition: Callable[[], object], *engines: Engine, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to hold"
        for engine in engines:
            engine.step()
        time.sleep(0.002)


def address(kind: str, folder: Path) -> str:
    if kind == "unix":
        return f"unix:{folder}/kv"
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp:127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def with_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NIXL over TCP, which is the one transport of a machine without RDMA, on the loopback interface."""
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'chairlift[nixl]'")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    nixl.is_usable.cache_clear()
    assert nixl.is_usable()
    yield
    nixl.is_usable.cache_clear()


@pytest.fixture(params=["unix", "tcp", "nixl"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "nixl":
        request.getfixturevalue("with_nixl")
    return address(request.param, tmp_path)


def receiver(where: str, layout: str = "same", dtype: torch.dtype = torch.float32) -> tuple[Engine, Incoming]:
    engine = Engine(dtype)
    return engine, Incoming(where, KEY, layout, SIZE, engine.exchange, engine.blocks)


def sender(layout: str = "same", key: bytes = KEY, dtype: torch.dtype = torch.float32) -> tuple[Engine, Outgoing]:
    engine = Engine(dtype)
    engine.cache.data.copy_(torch.randn(engine.cache.data.shape))
    return engine, Outgoing(key, layout, SIZE, engine.blocks)


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few that a prompt needs each of them several times."""
    monkeypatch.setattr(region, "BYTES", dict.fromkeys(region.BYTES, 3 * Engine().blocks.block_bytes))
    yield


def test_blocks_arrive_bit_for_bit_as_they_are_computed(where: str, few_slots: None) -> None:
    """A prompt of 10 blocks in chunks, from any blocks of the pool, through 3 slots."""
    (there, incoming), (here, outgoing) = receiver(where), sender()
    random, tokens = Random(1), [Random(2).randrange(1000) for _ in range(10 * SIZE + 5)]
    table = random.sample(range(BLOCKS), 11)
    threading.Thread(target=lambda: until(lambda: there.exchange.taken == 10, there), daemon=True).start()
    outgoing.begin("r", where, "salt", packed(tokens))
    for computed in (20, 20, 64, 100, 165):
        outgoing.computed("r", table, computed)
    outgoing.finish("r")
    done: list[str] = []
    until(lambda: done.extend(outgoing.take_done()) or done == ["r"])
    path = there.found(tokens, "salt")
    assert len(path) == 10 and not there.found(tokens, "other")
    for node, block in zip(path, table, strict=False):
        assert torch.equal(there.cache.data[:, node.block], here.cache.data[:, block])
    assert there.pool.cached == 10 and outgoing.sent == 10 and incoming.connections == 1


def test_blocks_that_are_there_already_are_not_stored_twice(where: str) -> None:
    (there, _), (_, outgoing) = receiver(where), sender()
    tokens = list(range(6 * SIZE))
    for number, length in enumerate((3 * SIZE, 6 * SIZE, 6 * SIZE)):
        outgoing.begin(str(number), where, "", packed(tokens[:length]))
        outgoing.computed(str(number), list(range(6)), length)
        outgoing.finish(str(number))
        until(lambda: outgoing.take_done(), there)
    assert there.exchange.taken == there.pool.cached == 6


@pytest.mark.parametrize("what", ["key", "layout", "size"])
def test_another_key_model_or_dtype_is_refused_and_the_prompt_counts_as_sent(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver computes it itself."""
    where = address("tcp", tmp_path)
    there, _ = receiver(where)
    _, outgoing = sender(
        "another" if what == "layout" else "same",
        b"another key of a cluster" if what == "key" else KEY,
        torch.bfloat16 if what == "size" else torch.float32,
    )
    outgoing.begin("r", where, "", packed([1] * 64))
    outgoing.computed("r", [0, 1, 2, 3], 64)
    outgoing.finish("r")
    assert outgoing.take_done() == ["r"]
    there.step()
    assert there.exchange.taken == 0
    assert ("another cluster key" if what == "key" else "different models") in caplog.text or what == "key"


def test_a_receiver_that_is_gone_costs_no_more_than_a_moment(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, outgoing = sender()
    monkeypatch.setattr(outgoing_module, "_RETRY", 60.0)
    begun = time.monotonic()
    for name in ("a", "b", "c"):
        outgoing.begin(name, where, "", packed([1] * 64))
        outgoing.computed(name, [0, 1, 2, 3], 64)
        outgoing.finish(name)
    assert outgoing.take_done() == ["a", "b", "c"] and time.monotonic() - begun < 5


def test_a_receiver_that_is_silent_delays_steps_by_a_moment_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of another network may drop all packets: no step waits for the steps of a handshake."""
    monkeypatch.setattr(outgoing_module, "_CONNECT", 0.1)
    _, outgoing = sender()
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in "abc":
            outgoing.begin(name, f"tcp:127.0.0.1:{silent.getsockname()[1]}", "", packed([1] * 64))
            outgoing.computed(name, [0, 1, 2, 3], 64)
            outgoing.finish(name)
        assert outgoing.take_done() == ["a", "b", "c"] and outgoing.sent == 0
        assert 0.1 <= time.monotonic() - begun < wire.HANDSHAKE_SECONDS / 5


def test_blocks_that_were_computed_before_their_connection_is_made_are_sent_with_the_next(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, may_connect = wire.connect, threading.Event()

    def late(*given: Any) -> socket.socket:
        assert may_connect.wait(10)
        return connect(*given)

    monkeypatch.setattr(wire, "connect", late)
    monkeypatch.setattr(outgoing_module, "_CONNECT", 0.0)
    (there, _), (_, outgoing) = receiver(where), sender()
    tokens = list(range(4 * SIZE))
    outgoing.begin("r", where, "", packed(tokens))
    outgoing.computed("r", [3, 2, 1, 0], 2 * SIZE)
    assert outgoing.sent == 0
    may_connect.set()
    until(lambda: outgoing._peers[where].has_tried())
    outgoing.computed("r", [3, 2, 1, 0], 4 * SIZE)
    outgoing.finish("r")
    until(lambda: outgoing.take_done(), there)
    assert outgoing.sent == 4 and len(there.found(tokens)) == 4


def test_a_receiver_that_does_not_read_holds_a_prompt_up_for_a_moment_only(
    where: str, few_slots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there, _), (_, outgoing) = receiver(where), sender()
    monkeypatch.setattr(outgoing_module, "_STALL", 0.2)
    tokens = list(range(10 * SIZE))
    outgoing.begin("r", where, "", packed(tokens))
    outgoing.computed("r", list(range(10)), len(tokens))  # three blocks are copied, for the others there is no slot
    outgoing.finish("r")
    assert outgoing.take_done() == ["r"]
    begun = time.monotonic()
    monkeypatch.setattr(outgoing_module, "_STALL", 30.0)
    for name in "abc":  # no other prompt waits for a receiver that was waited for in vain
        outgoing.begin(name, where, "", packed(tokens))
        outgoing.computed(name, list(range(10)), len(tokens))
    assert time.monotonic() - begun < 10
    until(lambda: there.exchange.taken == 3, there)
    assert len(there.found(tokens)) == 3


def test_a_lost_sender_leaves_what_has_arrived_and_no_memory(where: str) -> None:
    (there, incoming), (_, outgoing) = receiver(where), sender()
    tokens = list(range(4 * SIZE))
    outgoing.begin("r", where, "", packed(tokens))
    outgoing.computed("r", [3, 2, 1, 0], len(tokens))
    until(lambda: there.exchange.arrived)
    outgoing._peers[where]._lose("the test ends it")
    until(lambda: incoming.connections == 0)
    assert there.blocks._regions, "its slots are needed until a step has read them"
    there.step()
    assert len(there.found(tokens)) == 4
    assert not there.blocks._regions, "the region of a lost sender is kept"
    again = f"{time.monotonic()}"
    outgoing.begin(again, where, "", packed(tokens))  # over a new connection
    outgoing.computed(again, [3, 2, 1, 0], len(tokens))
    outgoing.finish(again)
    done: list[str] = []
    until(lambda: done.extend(outgoing.take_done()) or done == [again], there)


def handshake(where: str, engine: Engine) -> tuple[socket.socket, int]:
    link = wire.connect(where, KEY)
    wire.send(link, Hello("same", engine.blocks.block_bytes, ["tcp" if where.startswith("tcp") else "shm"]))
    welcome = wire.receive(link)
    assert isinstance(welcome, Welcome)
    if where.startswith("unix"):
        os.close(region.receive_descriptor(link))
    return link, welcome.slots


@pytest.mark.parametrize(
    "messages",
    [
        [Blocks(1, 0, [0])],
        [Prompt(1, "", bytes(4 * SIZE)), Blocks(1, 0, [0, 0])],
        [Prompt(1, "", bytes(4 * SIZE)), Blocks(1, 0, [60_000])],
        [Prompt(1, "", bytes(4 * SIZE)), Blocks(1, 1, [0])],
        [Prompt(1, "", bytes(4 * SIZE)), Blocks(1, 0, [])],
        [Hello("same", 1, ["shm"])],
        [b"\xff\xff\xff\x7f" + bytes(100)],
        [b"\x05\x00\x00\x00nonse"],
        [bytes(1000)],
    ],
    ids=[
        "no-prompt",
        "slot-twice",
        "slot-unknown",
        "behind-end",
        "no-slots",
        "hello-again",
        "long",
        "nonsense",
        "zeros",
    ],
)
def test_a_sender_that_breaks_the_rules_is_cut_off_and_others_go_on(
    where: str, messages: list[wire.Message | bytes]
) -> None:
    there, incoming = receiver(where)
    link, _ = handshake(where, there)
    try:
        for message in messages:
            link.sendall(message) if isinstance(message, bytes) else wire.send(link, message)
        link.settimeout(10)
        with pytest.raises(LinkError):
            while True:
                wire.receive(link)
    except (BrokenPipeError, ConnectionResetError):
        pass
    until(lambda: incoming.connections == 0)
    there.step()
    assert there.exchange.taken == 0 and there.pool.free == BLOCKS and not there.blocks._regions
    good, _ = handshake(where, there)
    good.close()


@pytest.mark.parametrize("blocks", [0.5, 1.5])
def test_a_sender_that_ends_within_a_block_leaves_no_memory(tmp_path: Path, blocks: float) -> None:
    where = address("tcp", tmp_path)
    there, incoming = receiver(where)
    link, _ = handshake(where, there)
    wire.send(link, Prompt(1, "", packed(list(range(2 * SIZE)))))
    wire.send(link, Blocks(1, 0, [0, 1]))
    link.sendall(bytes(int(blocks * there.blocks.block_bytes)))
    link.close()
    until(lambda: incoming.connections == 0, there)
    assert not there.blocks._regions and there.exchange.taken == 0


def test_a_prompt_of_which_blocks_are_given_up_is_forgotten_by_the_receiver(
    where: str, few_slots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may have so many open prompts, and lasts as long as its engines."""
    monkeypatch.setattr("chairlift.cluster.kv_transfer.incoming._MAX_PROMPTS", 2)
    monkeypatch.setattr(outgoing_module, "_STALL", 0.05)
    (there, incoming), (_, outgoing) = receiver(where), sender()
    for name in "abcd":
        outgoing.begin(name, where, "", packed([ord(name)] * 10 * SIZE))
        outgoing.computed(name, list(range(10)), 10 * SIZE)  # for most of them there is no slot
        outgoing.finish(name)
    first = outgoing._peers[where]
    until(lambda: first.is_lost or len(first._free) == 3, there)
    outgoing.begin("last", where, "", packed([1] * SIZE))
    outgoing.computed("last", [0], SIZE)
    outgoing.finish("last")
    done: list[str] = []
    until(lambda: done.extend(outgoing.take_done()) or "last" in done, there)
    assert not first.is_lost and incoming.connections == 1


def test_a_connection_that_says_nothing_is_closed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)
    _, incoming = receiver(where)
    kind, _, path = where.partition(":")
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    silent = socket.socket(family)
    host, _, port = path.rpartition(":")
    silent.connect(path if kind == "unix" else (host, int(port)))
    until(lambda: incoming.connections == 1)
    until(lambda: incoming.connections == 0)


def test_a_key_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(ChairliftError, match="chmod 600"):
        wire.read_key(file)
    file.chmod(0o600)
    assert wire.read_key(file) == b"0123456789abcdef0123456789abcdef"
    file.write_bytes(b"short")
    with pytest.raises(ChairliftError, match="5 bytes"):
        wire.read_key(file)
    with pytest.raises(ChairliftError, match="cannot be read"):
        wire.read_key(tmp_path / "none")
