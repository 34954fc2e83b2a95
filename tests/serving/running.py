"""A real server on a real socket, for tests: started as users start it, stopped at the end."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

_TRUST = ssl.create_default_context()  # httpx would make one for each request, which takes longer than the request
FAKE = [sys.executable, str(Path(__file__).parent / "fake_engine.py")]


@dataclass(slots=True)
class Running:
    """A server under test."""

    url: str
    process: subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)  # what it has printed up to its address
    key: str | None = None  # sent with every request, if there is one
    log: Path | None = None  # where its log goes

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(
            method, self.url + path, **{"timeout": 60, "headers": self.headers, "verify": _TRUST, **more}
        )

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.request("POST", path, **content, **more)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of ours."""
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"chairlift:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")

    def is_idle(self) -> bool:
        """Whether every request the engine was given has ended, one way or another, and has left nothing behind."""
        samples = [
            each for family in text_string_to_metric_families(self.get("/metrics").text) for each in family.samples
        ]
        found = {sample.name.removeprefix("chairlift:"): sample.value for sample in samples}
        ended = sum(found[f"requests_{way}_total"] for way in ("finished", "aborted", "rejected", "failed"))
        held = (found[name] for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"))
        return found["requests_submitted_total"] == ended and not any(held)

    def engine_pid(self) -> int:
        """The engine process, found as the child that runs one."""
        return self.child("engine_process", "fake_engine")

    def child(self, *names: str) -> int:
        """The child process with one of the names in its command line."""
        found = self._children(names)
        assert found, f"there is no process {names}"
        return found[0]

    def has_child(self, *names: str) -> bool:
        return bool(self._children(names))

    def _children(self, names: tuple[str, ...]) -> list[int]:
        # `-ww`, or a long path would hide it.
        listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
        mine = [(pid, args) for pid, parent, args in lines if int(parent) == self.process.pid]
        return [int(pid) for pid, args in mine if any(name in args for name in names)]

    def wait_until(self, condition: Any, seconds: float = 90.0) -> float:
        """Seconds until something holds; an error if it never does."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, "it never came to hold"
            time.sleep(0.02)
        return time.monotonic() - start

    def logged(self) -> str:
        """What it has written to its log so far."""
        assert self.log is not None
        return self.log.read_text()

    def is_healthy(self) -> bool:
        return self.get("/health").status_code == 200


def keys_file(folder: Path, **tenants: str) -> str:
    """A file of keys, `sk-key-of-NAME`: an administrator's (operator) and each tenant's with its limits, if any."""
    limits = {"operator": "admin = true", **tenants}
    entries = [f'[[key]]\nkey = "sk-key-of-{name}"\ntenant = "{name}"\n{more}\n' for name, more in limits.items()]
    file = folder / "keys.toml"
    file.write_text("\n".join(entries))
    file.chmod(0o600)
    return str(file)


# The command line has no flags for these, and needs none.
_START = """
import importlib, json, resource, sys
for name, value in json.loads(sys.argv.pop(1)).items():
    module, constant = name.rsplit(".", 1)
    module = importlib.import_module(module)
    assert hasattr(module, constant), name
    setattr(module, constant, value)
if files := json.loads(sys.argv.pop(1)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
from chairlift.cli import main
main()
"""


@contextmanager
def running(
    model: Path | str,
    *flags: str,
    fake: bool = False,
    environment: dict[str, str] | None = None,
    constants: dict[str, Any] | None = None,
    open_files: int | None = None,
    port: int = 0,
) -> Iterator[Running]:
    """A server for a model; with `fake`, its engine only pretends. `constants` of its first process may be changed."""
    changed = {**({"chairlift.serving.supervisor.ENGINE": FAKE} if fake else {}), **(constants or {})}
    command = [sys.executable, "-c", _START, json.dumps(changed), json.dumps(open_files)]
    arguments = ["serve", "--port", str(port), str(model), *flags]
    with started([*command, *arguments], environment) as found:
        yield found


@contextmanager
def routed(
    *servers: Running | str, flags: tuple[str, ...] = (), constants: dict[str, Any] | None = None
) -> Iterator[Running]:
    """A router in front of servers."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    command = [sys.executable, "-c", _START, json.dumps(constants or {}), "null", "route", *urls, "--port", "0", *flags]
    with started(command, None) as found:
        yield found


@contextmanager
def started(command: list[str], environment: dict[str, str] | None) -> Iterator[Running]:
    with tempfile.NamedTemporaryFile("w+", prefix="chairlift-log-") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
        try:
            lines = _lines_up_to(log, "  address", process)
            url = next(word for word in lines[-1].split() if word.startswith("http")).removesuffix("/v1")
            yield Running(url, process, lines, log=Path(log.name))
        except BaseException:
            log.seek(0)
            print("the server's log:", log.read()[-8000:], sep="\n")  # pytest shows it
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def _lines_up_to(log: IO[str], word: str, process: subprocess.Popen[bytes]) -> list[str]:
    while True:
        has_ended = process.poll() is not None
        # Not through `log`: the server writes where that one was read last.
        lines = [line for line in Path(log.name).read_text().splitlines(keepends=True) if line.endswith("\n")]
        found = next((number for number, line in enumerate(lines) if word in line), None)
        if found is not None:
            return lines[: found + 1]
        assert not has_ended, "the server did not start"
        time.sleep(0.02)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response that must be one, in OpenAI's shape."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 500  # it carries the wrong value, but not a body's worth of it
    assert "raise max_" not in error["message"]  # a client cannot change the server's settings
    return error
