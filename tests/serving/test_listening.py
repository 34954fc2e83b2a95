"""The listening socket."""

import socket

import pytest

from chairlift.core.errors import SettingsError
from chairlift.serving.http_server import listen


def test_what_it_accepts_sends_small_packets_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP, "or asyncio leaves Nagle's algorithm on"
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_one_line_with_a_remedy() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
            listen("127.0.0.1", port)
