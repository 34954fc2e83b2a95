"""Ranks: the rank processes of one model as rank 0 sees them: their channel, their group and their end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numba
import torch

from chairlift.cluster.tensor_parallel.channel import SharedSender
from chairlift.cluster.tensor_parallel.group import LOOPBACK, connect, file_store, own_store
from chairlift.cluster.tensor_parallel.memory import Board, make_memory
from chairlift.cluster.tensor_parallel.remote import RankJob, Remote, RemoteProcess, SocketSender, call, frame
from chairlift.cluster.tensor_parallel.watch import RankProcess, Watch
from chairlift.core.errors import ChairliftError, DeviceError, SettingsError

_COMMAND = [sys.executable, "-m", "chairlift.cluster.tensor_parallel.rank_process"]
_encode = msgspec.msgpack.encode


class Ranks:
    """Ranks 1 and up, each a process on this host or, with `remote`, on another one; rank 0 is this process.

    They load models and run steps as `send` says, and end with `close` or with this process.
    """

    def __init__(self, size: int, device: torch.device, remote: Remote | None = None) -> None:
        if sys.platform != "linux":
            raise SettingsError(f"tensor_parallel is {size}, which needs Linux: use 1")
        self.on_fault: Callable[[str], None] = lambda _reason: None  # called by the watching thread
        self._is_closed = False
        self._threads = torch.get_num_threads()
        self.are_remote = remote is not None
        self._sender: SharedSender | SocketSender
        shares = device.type == "cpu" and remote is None
        threads = max(1, self._threads // size) if shares else self._threads
        board = make_memory(Board.size(size))
        own_board = Board(board, 0)
        if remote is None:
            store, processes = self._start_here(size, device, threads, board)
        else:
            store, processes = self._start_there(size, device, remote)
        self.watch = Watch(processes, own_board, self._has_fault)
        os.close(board)
        with self.ending_on_error():
            _use_threads(threads)
            self.watch.wait_for("started")
            self.group = connect(store, 0, size, device, own_board, LOOPBACK if remote is None else remote.own)

    def _start_here(self, size: int, device: torch.device, threads: int, board: int) -> tuple[Any, list[RankProcess]]:
        """Return the store of the group and the processes to start on this host."""
        self._sender = sender = SharedSender(size - 1)
        # The store stays open: torch opens it by this number until it collects the group, at any later time.
        store = make_memory(0)
        shared = [sender.descriptor, board, store]
        processes = [self._process(sender, rank, size, device, threads, shared) for rank in range(1, size)]
        os.close(sender.descriptor)
        return file_store(f"/proc/self/fd/{store}", size), processes

    def _start_there(self, size: int, device: torch.device, remote: Remote) -> tuple[Any, list[RankProcess]]:
        """Return the store of the group and the processes that rank hosts have started."""
        links = call(remote)
        self._sender = SocketSender(links)
        store, port = own_store(remote.own, size)
        for rank, link in enumerate(links, 1):
            job = RankJob(rank, size, device.type == "cuda", remote.own, port)
            with suppress(OSError):  # the watch sees that the host has closed the connection
                link.sendall(frame(msgspec.json.encode(job)))
        return store, [
            RankProcess(rank, [], {}, [], os.dup(link.fileno()), RemoteProcess(link))
            for rank, link in enumerate(links, 1)
        ]

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """End the ranks if the block raises; if it only lost its connection to a rank, raise that rank's error."""
        try:
            yield
        except BaseException as error:
            cause = self.watch.wait_for_fault() if isinstance(error, DeviceError) else None
            self.watch.fail("rank 0 could not start")  # they may wait for rank 0
            self.close()
            if cause is None:
                raise
            raise ChairliftError(cause) from error

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to all other ranks."""
        self._sender.send(_encode(message))

    def check(self) -> None:
        """Raise a DeviceError if a rank has ended."""
        if self.watch.fault is not None:
            raise DeviceError(self.watch.fault)

    def lose(self, error: Exception) -> DeviceError:
        """End all ranks after an error in a step; return the DeviceError to raise, with the first cause."""
        cause = self.watch.wait_for_fault() if isinstance(error, DeviceError) else self.watch.fault
        self.watch.fail(f"rank 0: {type(error).__name__}: {error}")
        return DeviceError(cause or self.watch.fault or str(error))

    def close(self) -> None:
        """End the rank processes and wait for their end."""
        if self._is_closed:
            return
        self._is_closed = True
        self.watch.expect_end()
        self._sender.close()
        self.watch.close()
        _use_threads(self._threads)

    def _has_fault(self, reason: str) -> None:
        self._sender.is_broken = True
        if hasattr(self, "group"):
            self.group.abort()
        self.on_fault(reason)

    def _process(
        self, sender: SharedSender, rank: int, size: int, device: torch.device, threads: int, shared: list[int]
    ) -> RankProcess:
        reading, writing = os.pipe()
        memory, board, store = map(os.dup, shared)
        inherited = {"memory": memory, "board": board, "store": store, "reports": writing}
        inherited["bell"] = sender.bells[rank - 1]
        job = {"rank": rank, "size": size, "device": device.type, "parent": os.getpid(), **inherited}
        environment = {**os.environ, **_environment(rank, device, threads)}
        return RankProcess(rank, [*_COMMAND, json.dumps(job)], environment, list(inherited.values()), reading)


def _environment(rank: int, device: torch.device, threads: int) -> dict[str, str]:
    """Return a rank's environment: it sees its own GPU alone, or has its share of the cores."""
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"CUDA_VISIBLE_DEVICES": str(rank) if visible is None else visible.split(",")[rank].strip()}
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))


def _use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
