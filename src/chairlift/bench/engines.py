"""An engine in a process of its own, seen from outside: start it, tell it to run, take down what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import chairlift
from chairlift.bench.peers import Task
from chairlift.core.errors import ChairliftError
from chairlift.core.words import counted
from chairlift.traffic.workloads import Workload


class UnavailableError(ChairliftError):
    """An engine that cannot run here."""


@dataclass(slots=True)
class Contender:
    """One engine's part in a benchmark: its runs, or why there are none."""

    name: str
    info: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    unavailable: str | None = None


class Engine:
    """A loaded engine that waits to be told to run."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.contender = Contender(name)
        self._process = process
        self._log = log
        self.contender.info = self._read("ready")

    def run(self, workload: Workload) -> None:
        """Run once, and check that it did what was asked."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: reading says why
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        run = self._read("run")
        name = self.contender.name
        for number, (answer, count) in enumerate(zip(run["requests"], workload.outputs, strict=True)):
            if len(answer["tokens"]) != count:
                raise ChairliftError(
                    f"{name} answered request {number} with {counted(len(answer['tokens']), 'token')}, not {count}: "
                    "no comparison"
                )
        self.contender.runs.append(run)

    def _read(self, kind: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = [each.strip() for each in self._log.read_text(errors="replace").splitlines() if each.strip()]
            raise UnavailableError(f"its process ended: {said[-1] if said else self._process.returncode}")
        message: dict[str, Any] = json.loads(line)
        if "unavailable" in message:
            raise UnavailableError(message["unavailable"])
        found: dict[str, Any] = message[kind]
        return found


def task_for(workload: Workload, scratch: Path, threads: int | None = None, **more: Any) -> Task:
    """What any engine is told of a workload, which is written down in its folder for all of them."""
    (scratch / "workload.json").write_text(json.dumps({"prompts": workload.prompts, "outputs": workload.outputs}))
    lengths = [query.prompt_tokens + query.output_tokens for query in workload.queries]
    threads = threads or len(os.sched_getaffinity(0))
    return Task(scratch=str(scratch), threads=threads, longest=max(lengths), total=sum(lengths), **more)


@contextmanager
def engine(name: str, python: str, task: Task) -> Iterator[Engine]:
    """Start an engine, and end it with the block whatever happens there."""
    scratch = Path(task.scratch)
    task_file, log = scratch / f"{name}.json", scratch / f"{name}.log"
    task_file.write_text(json.dumps(asdict(task)))
    command = [python, "-m", "chairlift.bench.peers", name, str(task_file), str(scratch / "workload.json")]
    with log.open("w") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(python, task),
                text=True,
                start_new_session=True,  # a group of its own; Ctrl-C is for us, and we end it
            )
        except OSError as error:
            raise UnavailableError(f"{python} cannot be started: {error.strerror}") from None
    try:
        yield Engine(name, process, log)
    finally:
        # Its whole group: a library may have forked helpers, which would hold its pipes open.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def environment(python: str, task: Task) -> dict[str, str]:
    """Same threads for everyone, no network, and for another interpreter this package alone of ours."""
    threads = {f"{library}_NUM_THREADS": str(task.threads) for library in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
    # CI keeps the telemetry of OpenVINO silent: it forks a process for each report, in the middle of a run.
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "true"}
    found = {**os.environ, **threads, **quiet}
    if python != sys.executable:
        # A link to the package, not the folder it is in, which may hold another torch than that interpreter's.
        folder = Path(task.scratch) / "packages"
        folder.mkdir(exist_ok=True)
        link = folder / "chairlift"
        if not link.exists():
            link.symlink_to(Path(chairlift.__file__).parent)
        found["PYTHONPATH"] = str(folder)
    return found
