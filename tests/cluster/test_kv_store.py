"""A KV store with a server that answers with values that are not blocks of ours."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_kv_transfer import SIZE, Engine, until

from chairlift.cluster.kv_store.store import KvStore
from chairlift.core.prefix_node import packed


@contextmanager
def answering(value: bytes) -> Iterator[str]:
    """A server that has this value for every key."""

    class Server(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.readline():
                parts = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                self.wfile.write(b"$%d\r\n%s\r\n" % (len(value), value) if parts[0] == b"GET" else b"+OK\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
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
    with answering(value) as url:
        engine = Engine()
        store = KvStore(url, "same", SIZE, engine.exchange, engine.blocks)
        slots = len(store._free)
        for name in ("first", "second"):
            assert store.fetch(name, "", packed(list(range(4 * SIZE))), 0, seconds=3600.0)
            done: list[str] = []
            until(lambda done=done, name=name: done.extend(store.take_ready()) or done == [name], engine)
        assert len(store._free) == slots and store.fetched == 0 and store.failures == 0
