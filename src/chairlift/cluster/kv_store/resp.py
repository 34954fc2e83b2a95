"""Redis: a connection to a Redis or Valkey server, with the few commands that a store of blocks needs (RESP 2)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from chairlift.core.errors import SettingsError

_LINE = 64 << 10  # bytes of the longest reply that is not a block
_DIGITS = 18  # of a length


class RedisError(ConnectionError):
    """The server cannot be reached, does not answer in time, or refuses a command."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, and how to log in.

    >>> Address.of("redis://:secret@cache.local:6380/2")
    Address(host='cache.local', port=6380, path='', user='', password='secret', database=2)
    >>> Address.of("unix:///run/redis.sock").path
    '/run/redis.sock'
    """

    host: str
    port: int
    path: str  # of a Unix socket, instead of host and port
    user: str
    password: str
    database: int

    @staticmethod
    def of(url: str) -> Address:
        """Read redis://[[user]:password@]host[:port][/database], or unix:///path."""
        try:
            parts = urlsplit(url)
            database = parts.path.strip("/") if parts.scheme == "redis" else ""
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            path = parts.path if parts.scheme == "unix" else ""
            if parts.scheme not in ("redis", "unix") or not (parts.hostname or path):
                raise ValueError
            return Address(parts.hostname or "", parts.port or 6379, path, user, password, int(database or 0))
        except ValueError:
            shown = url.rpartition("@")[2]  # never a password in a log
            raise SettingsError(
                f"the KV store is {shown!r}: use redis://[:PASSWORD@]HOST[:PORT][/DATABASE] or unix:///PATH"
            ) from None

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Redis:
    """One connection. Every call raises RedisError after `timeout` seconds without a byte, and is then unusable."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._buffer = bytearray()
        try:
            if address.path:
                self._link = socket.socket(socket.AF_UNIX)
                self._link.settimeout(timeout)
                self._link.connect(address.path)
            else:
                self._link = socket.create_connection((address.host, address.port), timeout)
                self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, UnicodeError) as error:  # of a name with an empty or overlong label
            raise RedisError(f"{address} cannot be reached: {error}") from None
        if address.password:
            login = [address.user.encode()] if address.user else []
            self.call([[b"AUTH", *login, address.password.encode()]])
        if address.database:
            self.call([[b"SELECT", str(address.database).encode()]])

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def set_timeout(self, seconds: float) -> None:
        """Change the longest wait for a byte."""
        self._link.settimeout(max(0.001, seconds))

    def call(self, commands: Sequence[Sequence[bytes | memoryview]], most: int = _LINE) -> list[bytes | None]:
        """Send commands at once and return their replies; a bulk reply may have up to `most` bytes, None is nil."""
        try:
            for command in commands:
                self._link.sendall(b"*%d\r\n" % len(command))
                for part in command:
                    self._link.sendall(b"$%d\r\n" % len(part))
                    self._link.sendall(part)
                    self._link.sendall(b"\r\n")
            return [self._reply(most) for _ in commands]
        except OSError as error:
            raise RedisError(f"the connection was lost: {error}") from None

    def _reply(self, most: int) -> bytes | None:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind in (b"+", b":"):
            return rest
        if kind == b"$" and rest == b"-1":
            return None
        # Python refuses to read a number of thousands of digits.
        if kind == b"$" and rest.isdigit() and len(rest) <= _DIGITS and int(rest) <= most:
            found = self._exactly(int(rest) + 2)
            if found.endswith(b"\r\n"):
                return found[:-2]
        raise RedisError(f"the server answered {line[:200].decode(errors='replace')}")

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _LINE:
                raise RedisError("the server's reply is too long")
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._fill()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    def _fill(self) -> None:
        received = self._link.recv(1 << 18)
        if not received:
            raise RedisError("the server has closed the connection")
        self._buffer += received
