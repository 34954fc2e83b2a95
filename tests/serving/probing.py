"""What a server is like for others while one client attacks it: how late /health answers, and the memory it takes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from running import Running

_ASKED = b"GET /health HTTP/1.1\r\nHost: probe\r\n\r\n"
EVERY = 0.02  # seconds between an answer and the next question


@dataclass(slots=True)
class Probe:
    """Seconds that answers of /health took, and the peak memory of the server's processes in MiB."""

    times: list[float] = field(default_factory=list)
    memory: float = 0.0  # the largest sum of the peaks of processes that were there at one time

    @property
    def worst(self) -> float:
        return max(self.times)


@contextmanager
def probing(server: Running) -> Iterator[Probe]:
    """Ask /health every 20 ms for as long as the block runs."""
    found, stop = Probe(), threading.Event()
    host, port = server.url.removeprefix("http://").split(":")

    def ask() -> None:
        with socket.create_connection((host, int(port)), timeout=300) as connection:
            while not stop.wait(EVERY):
                begun = time.monotonic()
                connection.sendall(_ASKED)
                answer = b""
                while not answer.endswith(b"}"):
                    answer += connection.recv(65536)
                found.times.append(time.monotonic() - begun)
                found.memory = max(found.memory, sum(peaks(server.process.pid).values()))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        time.sleep(0.1)
        yield found
    finally:
        stop.set()
        thread.join()


def peaks(parent: int) -> dict[int, float]:
    """The peak memory of a process and its children, but for the engine's, in MiB."""
    found = {}
    for folder in (Path("/proc") / str(parent), *_children(parent)):
        try:
            status = (folder / "status").read_text()
            if "engine" not in (folder / "cmdline").read_text() or int(folder.name) == parent:
                found[int(folder.name)] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
            continue  # it has just ended
    return found


def _children(parent: int) -> list[Path]:
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    return [Path("/proc") / pid for file in listed for pid in file.read_text().split()]


def attack(server: Running, path: str, *bodies: Any) -> list[httpx.Response]:
    """Send requests, all at once."""
    contents = [json.dumps(body).encode() for body in bodies]  # before: it would keep the probe waiting
    with ThreadPoolExecutor(len(contents)) as pool:
        return list(pool.map(lambda content: server.post(path, content, timeout=300), contents))
