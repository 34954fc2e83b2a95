"""A KV store with a server that answers with values that are not blocks of ours."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_kv_transfer import SIZE, Engine, until

from chairlift.cluster.kv_store.resp import Address, Redis, RedisError
from chairlift.cluster.kv_store.store import KvStore
from chairlift.core.prefix_node import packed


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that has this reply for every key."""

    class Server(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.readline():
                parts = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                self.wfile.write(reply if parts[0] == b"GET" else b"+OK\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("value", [b"", b"abc", b"kv01", b"kv01\0\0\0\0", b"x" * 500], ids=len)
def test_a_value_that_is_no_block_ends_a_fetch_at_once_and_takes_no_slot(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.cluster.kv_store.store._LONGEST", 3600.0)
    with answering(bulk(value)) as url:
        engine = Engine()
        store = KvStore(url, "same", SIZE, engine.exchange, engine.blocks)
        slots = len(store._free)
        for name in ("first", "second"):
            assert store.fetch(name, "", packed(list(range(4 * SIZE))), 0, seconds=3600.0)
            done: list[str] = []
            until(lambda done=done, name=name: done.extend(store.take_ready()) or done == [name], engine)
        assert len(store._free) == slots and store.fetched == 0 and store.failures == 0


@pytest.mark.parametrize(
    "reply", [b"$" + b"9" * 5000 + b"\r\n", b"$3\r\nabcde\r\n", b"$-2\r\n", b"HTTP/1.1 400 Bad\r\n"]
)
def test_a_server_that_is_no_redis_counts_as_lost(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reply ends the threads: later requests would wait to their deadline."""
    monkeypatch.setattr("chairlift.cluster.kv_store.store._LONGEST", 3600.0)
    monkeypatch.setattr("chairlift.cluster.kv_store.store._RETRY", 0.0)
    with answering(reply) as url:
        engine = Engine()
        store = KvStore(url, "same", SIZE, engine.exchange, engine.blocks)
        for failures in (1, 2):
            assert store.fetch("r", "", packed(list(range(4 * SIZE))), 0, seconds=3600.0)
            until(store.take_ready, engine, seconds=5.0)
            assert store.failures == failures


def test_a_host_that_is_no_name_is_one_that_cannot_be_reached() -> None:
    with pytest.raises(RedisError, match="cannot be reached"):
        Redis(Address.of("redis://cache..local"), 1.0)
