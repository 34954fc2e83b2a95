"""Processes that simulate candidates for the planner: jobs and verdicts are lines of JSON.

    python -m chairlift.simulation.workers FILE

FILE has the traffic, the shapes and the targets, which all jobs share.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chairlift.core.errors import ChairliftError
from chairlift.costs.hardware import Shape
from chairlift.simulation.planning import Candidate, Targets, Verdict, busiest, judge
from chairlift.traffic.query import Query


class Workers:
    """Worker processes; each call takes one that is idle."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in processes:
            self._idle.put(process)

    def check(self, is_whole: bool, candidate: Candidate) -> Verdict:
        """Simulate a candidate, on the whole trace or on its busiest part."""
        process = self._idle.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([is_whole, asdict(candidate)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            self._idle.put(process)
        if not line:
            raise ChairliftError(f"a process that simulated {candidate} has ended: is there enough memory?")
        strain, summary = json.loads(line)
        return Verdict(candidate, strain, summary)


@contextmanager
def started(
    count: int, folder: Path, queries: Sequence[Query], shapes: Mapping[tuple[int, str], Shape], targets: Targets
) -> Iterator[Workers]:
    """Start worker processes, and end them with the block; the traffic is written to the folder."""
    file = folder / "traffic.json"
    kept = [[query.prompt_tokens, query.output_tokens, query.at, query.tenant, list(query.blocks)] for query in queries]
    known = [[bits, kv_dtype, asdict(shape)] for (bits, kv_dtype), shape in shapes.items()]
    file.write_text(json.dumps({"queries": kept, "shapes": known, "targets": dict(targets)}))
    command = [sys.executable, "-m", "chairlift.simulation.workers", str(file)]
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield Workers(processes)


def main() -> None:
    """Simulate candidates until the input ends."""
    shared: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    queries = [
        Query(prompt, output, at, tenant=tenant, blocks=blocks)
        for prompt, output, at, tenant, blocks in shared["queries"]
    ]
    part = busiest(queries)
    shapes = {(bits, kv_dtype): Shape(**shape) for bits, kv_dtype, shape in shared["shapes"]}
    for line in sys.stdin:
        is_whole, fields = json.loads(line)
        fields["settings"] = tuple(map(tuple, fields["settings"]))
        verdict = judge(shapes, shared["targets"], queries if is_whole else part, Candidate(**fields))
        print(json.dumps([verdict.strain, verdict.summary]), flush=True)


if __name__ == "__main__":
    main()
