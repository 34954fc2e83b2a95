"""The process of one rank other than rank 0: it loads its part of a model and runs the steps that rank 0 sends.

It is started with one argument, a job in JSON, by rank 0 or, on another host, by a rank host. It ends when rank 0
closes the channel or ends, and after any error.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

import msgspec
import torch

from chairlift.cluster.parent import die_with_parent
from chairlift.cluster.tensor_parallel.channel import Receiver, SharedReceiver
from chairlift.cluster.tensor_parallel.group import LostRankError, TorchGroup, connect, file_store, store_at
from chairlift.cluster.tensor_parallel.memory import Board, make_memory
from chairlift.cluster.tensor_parallel.remote import SocketReceiver
from chairlift.core.errors import ChairliftError
from chairlift.core.settings import Settings
from chairlift.core.step import Step
from chairlift.core.values import one_line
from chairlift.engine.garbage import freeze_loaded
from chairlift.execution.build import Loaded, find_model, load_found, prepare
from chairlift.execution.executor import LaunchedStep, TorchExecutor

log = logging.getLogger("chairlift")

_PROGRESS_SECONDS = 0.25
_decode = msgspec.msgpack.decode


class Reports:
    """Lines of JSON to rank 0."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **what: Any) -> None:
        """Report something."""
        os.write(self._descriptor, json.dumps(what).encode() + b"\n")


class Follower:
    """Does what rank 0 says, one message after the other."""

    def __init__(self, group: TorchGroup, receiver: Receiver, reports: Reports) -> None:
        self._group, self._receiver, self._reports = group, receiver, reports
        self._loaded: Loaded | None = None
        self._executor: TorchExecutor | None = None
        self._in_flight: deque[LaunchedStep] = deque()

    def run(self) -> None:
        """Serve until rank 0 closes the channel."""
        while (message := self._receiver.receive()) is not None:
            for order, content in _decode(message).items():
                getattr(self, f"_{order}")(content)

    def _launch(self, content: dict[str, Any]) -> None:
        assert self._executor is not None
        self._in_flight.append(self._executor.launch(Step.of_plain(content)))
        while len(self._in_flight) > 1:  # rank 0 also waits for a step after it has launched the next one
            self._executor.collect(self._in_flight.popleft())

    def _choose(self, samples: int) -> None:
        assert self._executor is not None
        self._executor.choose(self._in_flight[-1], [None] * samples)

    def _load(self, content: dict[str, Any]) -> None:
        self._loaded = self._executor = None  # frees a model that was loaded before
        settings = Settings.of(**content["settings"])
        found = find_model(content["model"], settings, progress=False)
        self._loaded = load_found(found, settings, progress=False, group=self._group)
        self._reports.say(read_bytes=0 if found.checkpoint is None else found.checkpoint.read_bytes)

    def _prepare(self, settings: dict[str, Any]) -> None:
        assert self._loaded is not None
        self._executor = None  # frees the KV cache of an engine before this one
        self._in_flight.clear()
        gc.unfreeze()
        gc.collect()
        self._executor = prepare(self._loaded, Settings.of(**settings), progress=False).executor
        freeze_loaded()  # all ranks wait for one that collects garbage in a step


def report_progress(board: Board, rank: int, reports: Reports) -> None:
    """Tell rank 0 on another host how far this rank has come, while that changes."""
    told = 0
    while True:
        time.sleep(_PROGRESS_SECONDS)
        if (count := board.read()[rank]) != told:
            reports.say(at=count)
            told = count


def open_ends(job: dict[str, Any]) -> tuple[Reports, Receiver, Board]:
    """Return this process's ends of what connects it with rank 0."""
    rank = job["rank"]
    if "link" not in job:
        return Reports(job["reports"]), SharedReceiver(job["memory"], job["bell"], rank - 1), Board(job["board"], rank)
    link = socket.socket(fileno=job["link"])
    reports, board = Reports(link.fileno()), Board(make_memory(Board.size(job["size"])), rank)
    threading.Thread(target=report_progress, args=(board, rank, reports), daemon=True).start()
    return reports, SocketReceiver(link), board


def join(job: dict[str, Any], device: torch.device, board: Board) -> TorchGroup:
    """Join the group of all ranks."""
    rank, size = job["rank"], job["size"]
    if "link" not in job:
        return connect(file_store(f"/proc/self/fd/{job['store']}", size), rank, size, device, board)
    return connect(store_at(job["store"][0], job["store"][1], size), rank, size, device, board, job["own"])


def main() -> None:
    """Join the group, then serve."""
    job = json.loads(sys.argv[1])
    die_with_parent(job["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches all processes; rank 0 handles it
    rank = job["rank"]
    device = torch.device("cuda", 0) if job["device"] == "cuda" else torch.device("cpu")
    reports, receiver, board = open_ends(job)
    try:
        reports.say(started=True)
        group = join(job, device, board)
        Follower(group, receiver, reports).run()
    except LostRankError as error:
        reports.say(lost=one_line(error))
        os._exit(1)
    except ChairliftError as error:
        reports.say(error=one_line(error))
        os._exit(1)
    except Exception as error:
        log.exception("rank %d has failed", rank)
        reports.say(error=f"{type(error).__name__}: {one_line(error)}")
        os._exit(1)
    os._exit(0)  # nothing to clean up: the connections of the group need not be closed one by one


if __name__ == "__main__":
    main()
