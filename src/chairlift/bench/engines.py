"""An engine in a process of its own: start it, send it commands, read its results."""

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
    """One engine of a benchmark: its runs, or why there are none."""

    name: str
    info: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    unavailable: str | None = None


class Engine:
    """A loaded engine process that waits for commands."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.contender = Contender(name)
        self._process = process
        self._log = log
        self.contender.info = self._read("ready")

    def run(self, workload: Workload) -> None:
        """Run the workload once, and check the lengths of the answers."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: _read reports why
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        run = self._read("run")
        name = self.contender.name
        for number, (answer, count) in enumerate(zip(run["requests"], workload.outputs, strict=True)):
            if len(answer["tokens"]) != count:
                raise ChairliftError(
                    f"{name} answered request {number} with {counted(len(answer['tokens']), 'token')}, not {count}: "
                    "speeds cannot be compared"
                )
        self.contender.runs.append(run)

    def _read(self, kind: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lines = [each.strip() for each in self._log.read_text(errors="replace").splitlines() if each.strip()]
            raise UnavailableError(f"its process ended: {lines[-1] if lines else self._process.returncode}")
        message: dict[str, Any] = json.loads(line)
        if "unavailable" in message:
            raise UnavailableError(message["unavailable"])
        found: dict[str, Any] = message[kind]
        return found


def task_for(workload: Workload, scratch: Path, threads: int | None = None, **more: Any) -> Task:
    """Write the workload to the scratch folder, and return the task for an engine."""
    (scratch / "workload.json").write_text(json.dumps({"prompts": workload.prompts, "outputs": workload.outputs}))
    lengths = [query.prompt_tokens + query.output_tokens for query in workload.queries]
    threads = threads or len(os.sched_getaffinity(0))
    return Task(scratch=str(scratch), threads=threads, longest=max(lengths), total=sum(lengths), **more)


@contextmanager
def engine(name: str, python: str, task: Task) -> Iterator[Engine]:
    """Start an engine, and end it with the block."""
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
                start_new_session=True,  # a process group of its own: Ctrl-C reaches only us, and we end it
            )
        except OSError as error:
            raise UnavailableError(f"{python} cannot be started: {error.strerror}") from None
    try:
        yield Engine(name, process, log)
    finally:
        # The whole group: a library may have forked helpers, which would keep the pipes open.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def environment(python: str, task: Task) -> dict[str, str]:
    """Return the environment: equal threads for all engines, no network, and this package for another interpreter."""
    threads = {f"{library}_NUM_THREADS": str(task.threads) for library in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
    # CI disables OpenVINO's telemetry, which forks a process for each report, during a run.
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "true"}
    found = {**os.environ, **threads, **quiet}
    if python != sys.executable:
        # A link to the package, not its parent folder, which may have another torch than that interpreter.
        folder = Path(task.scratch) / "packages"
        folder.mkdir(exist_ok=True)
        link = folder / "chairlift"
        if not link.exists():
            link.symlink_to(Path(chairlift.__file__).parent)
        found["PYTHONPATH"] = str(folder)
    return found
