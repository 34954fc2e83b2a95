"""One engine in its own process: `python -m chairlift.bench.peers NAME TASK.json WORKLOAD.json`.

It writes JSON lines to stdout: {"ready": ...} or {"unavailable": ...}, then one {"run": ...} for each line of stdin.
It ends with the end of its stdin, so that it never outlives its parent process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from chairlift.bench.peers import Peer, Task, Unavailable, load
from chairlift.core.errors import ChairliftError


def main(name: str, task_file: str, workload_file: str) -> None:
    """Load the engine, then run the workload on each command."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout write to the log, not to the replies
    commands = listen()

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    task = Task(**json.loads(Path(task_file).read_text()))
    work = json.loads(Path(workload_file).read_text())
    try:
        peer = load(name, task)
        # Warm-up: compile kernels, capture graphs and start pools before anything is timed.
        peer.run([prompt[:64] for prompt in work["prompts"][:8]], [min(4, count) for count in work["outputs"][:8]])
        reply(ready=peer.describe())
        while commands.get() == "run":
            reply(run=timed(peer, work["prompts"], work["outputs"], task.device))
    except (Unavailable, ChairliftError) as reason:
        reply(unavailable=str(reason))


def timed(peer: Peer, prompts: list[list[int]], outputs: list[int], device: str) -> dict[str, Any]:
    """Run once; return the seconds, the memory peak, and each request's tokens and times."""
    forget_peak(device)
    start = time.monotonic()
    finished = peer.run(prompts, outputs)
    seconds = time.monotonic() - start
    return {
        "seconds": seconds,
        "peak_bytes": peak_bytes(device),
        "requests": [
            {"first": each.first - start, "last": each.last - start, "tokens": each.tokens} for each in finished
        ],
    }


def listen() -> queue.Queue[str]:
    """Return a queue of commands; the end of stdin ends the process, even during a run."""
    commands: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line.strip())
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # includes processes that a library has forked
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return commands


def forget_peak(device: str) -> None:
    """Reset the memory peak, so that loading does not count."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int | None:
    """Return the memory peak since then: of the device, or of the process's resident pages."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_reserved())
    if sys.platform != "linux":
        return None
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(*sys.argv[1:])
