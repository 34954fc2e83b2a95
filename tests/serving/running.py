"""A real server on a real socket, for tests: started as users start it, stopped at the end."""

from __future__ import annotations

import json
import os
import signal
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

FAKE = [sys.executable, str(Path(__file__).parent / "fake_engine.py")]


@dataclass(slots=True)
class Running:
    """A server under test."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # what it has printed up to its address

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, timeout=60, **content, **more)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of ours."""
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"chairlift:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")

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
