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
from chairlift.simulation.planning import Candidate, Targets, Verdict, busiest, faster, judge
from chairlift.traffic.query import Query


class Workers:
    """Worker processes; each call takes one that is idle."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in processes:
            self._idle.put(process)

    def check(self, is_whole: bool, candidate: Candidate, scale: float = 1.0) -> Verdict:
        """Simulate a candidate, on the whole trace or on its busiest part, until it has failed."""
        return self._ask(candidate, is_whole=is_whole, scale=scale, to_the_end=False)

    def at_rate(self, scale: float, candidate: Candidate, *, is_whole: bool = False) -> Verdict:
        """Simulate a candidate to the end at a multiple of the trace's rate."""
        return self._ask(candidate, is_whole=is_whole, scale=scale, to_the_end=True)

    def _ask(self, candidate: Candidate, **how: Any) -> Verdict:
        process = self._idle.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([how, asdict(candidate)]) + "\n")
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
    kept = [{**asdict(each), "blocks": list(each.blocks)} for each in queries]
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
    queries = [Query(**fields) for fields in shared["queries"]]
    part = busiest(queries)
    shapes = {(bits, kv_dtype): Shape(**shape) for bits, kv_dtype, shape in shared["shapes"]}
    for line in sys.stdin:
        how, fields = json.loads(line)
        fields["settings"] = tuple(map(tuple, fields["settings"]))
        fields["role_split"] = None if fields["role_split"] is None else tuple(fields["role_split"])
        asked = faster(queries if how["is_whole"] else part, how["scale"])
        verdict = judge(shapes, shared["targets"], asked, Candidate(**fields), to_the_end=how["to_the_end"])
        print(json.dumps([verdict.strain, verdict.summary]), flush=True)


if __name__ == "__main__":
    main()
