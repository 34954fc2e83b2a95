"""A real Redis (or Valkey) server on a Unix socket, for tests."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from chairlift.cluster.kv_store.resp import Address, Redis, RedisError

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="there is no redis-server: apt-get install redis-server")


class RedisServer:
    """A server that can be killed and started again, at the same address and without its data."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.path, self._flags = folder / "redis.sock", flags
        self.url = f"unix://{self.path}"
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        options = ["--port", "0", "--unixsocket", str(self.path), "--save", "", "--dir", str(self.path.parent)]
        self.path.unlink(missing_ok=True)
        self._process = subprocess.Popen([PROGRAM, *options, *self._flags], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                self.call(b"PING")
                return
            except RedisError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def call(self, *command: bytes) -> bytes | None:
        link = Redis(Address.of(self.url), 5.0)
        try:
            return link.call([command], 1 << 26)[0]
        finally:
            link.close()

    def keys(self) -> int:
        return int(self.call(b"DBSIZE") or 0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
