"""A real server on a real socket, for tests: started as users start it, stopped at the end."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

_TRUST = ssl.create_default_context()  # httpx would make one for each request, which takes longer than the request
FAKE = [sys.executable, str(Path(__file__).parent / "fake_engine.py")]


@dataclass(slots=True)
class Running:
    """A server under test."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # what it has printed up to its address
    key: str | None = None  # sent with every request, if there is one

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
        listed = subprocess.run(["ps", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        whole = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        for line in (listed.stdout + whole.stdout).splitlines():
            pid, parent, args = line.split(None, 2)
            if int(parent) == self.process.pid and ("engine_process" in args or "fake_engine" in args):
                return int(pid)
        raise AssertionError("there is no engine process")

    def wait_until(self, condition: Any, seconds: float = 20.0) -> float:
        """Seconds until something holds; an error if it never does."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, "it never came to hold"
            time.sleep(0.02)
        return time.monotonic() - start

    def is_healthy(self) -> bool:
        return self.get("/health").status_code == 200


@contextmanager
def running(
    model: Path | str, *flags: str, fake: bool = False, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    """A server for a model; with `fake`, its engine only pretends."""
    start = "from chairlift.cli import main; main()"
    if fake:  # the command line has no flag for this, and needs none
        start = (
            "import json, sys, chairlift.serving.supervisor as s; s.ENGINE = json.loads(sys.argv.pop(1)); "
            "from chairlift.cli import main; main()"
        )
    command = [sys.executable, "-c", start, *([json.dumps(FAKE)] if fake else [])]
    process = subprocess.Popen(
        [*command, "serve", str(model), "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if "address" in line:
            break
    else:
        raise AssertionError("the server did not start:\n" + "".join(lines))
    url = next(word for word in lines[-1].split() if word.startswith("http")).removesuffix("/v1")
    # Its log must be read, or a full pipe would hold it up.
    reader = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    try:
        yield Running(url, process, lines)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(10)
        reader.wait(10)
