"""TorchGroup: the operations between ranks, by torch.distributed: gloo between CPU processes, NCCL between GPUs.

The process group is made directly, not as torch's default one: a program that uses LLM may have its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from chairlift.cluster.tensor_parallel.memory import Board
from chairlift.core.errors import DeviceError

_CONNECTING = timedelta(seconds=60)  # all ranks have started when the first one connects
_LOADING = timedelta(
    hours=12
)  # a rank waits for the slowest one to load; steps have a deadline of their own (watch.py)
LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # the stubs lack what is used here


class LostRankError(DeviceError):
    """An operation between ranks failed, most likely because another rank has ended."""


class TorchGroup:
    """This rank's end of a process group."""

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device, board: Board) -> None:
        self.rank, self.size = rank, size
        self._backend, self._device, self._board = backend, device, board

    def sum(self, x: Any) -> Any:
        """Sum a tensor or a NumPy array over all ranks, in place, and return it."""
        self._run(self._backend.allreduce, [x if isinstance(x, torch.Tensor) else torch.from_numpy(x)])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks side by side on rank 0; any other rank gets its own back."""
        if self._device.type == "cuda":
            # All ranks get all parts: NCCL gathers to one rank no faster, and this is what is usual in CUDA graphs.
            parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
            self._run(self._backend._allgather_base, parts, x.contiguous())
            return x if self.rank else parts.transpose(0, 1).reshape(x.shape[0], -1)
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._run(self._backend.gather, [found] if found else [], [x.contiguous()], dist.GatherOptions())
        return torch.cat(found, dim=1) if found else x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with that of rank 0 and return it."""
        x = x.contiguous()
        self._run(self._backend.broadcast, x, 0)
        return x

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        found = torch.tensor([number], device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._run(self._backend.allreduce, [found], options)
        return int(found)

    def abort(self) -> None:
        """Make operations that wait for a lost rank end; called by another thread."""
        if self._device.type == "cuda":
            self._backend.abort()

    def _run(self, operation: Callable[..., Any], *arguments: Any) -> None:
        self._board.advance()
        try:
            operation(*arguments).wait()
        except RuntimeError as error:
            raise LostRankError(f"the connection to another rank was lost ({str(error).splitlines()[0]})") from error


def file_store(path: str, size: int) -> Any:
    """Return the store through which the ranks of one host find each other, in a file."""
    return dist.FileStore(path, size)


def own_store(host: str, size: int) -> tuple[Any, int]:
    """Return the store of rank 0 for ranks on other hosts, and its port at this host's address."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # torch's, which would listen on all addresses by itself
    return dist.TCPStore(host, port, size, True, _CONNECTING, False, False, descriptor), port


def store_at(host: str, port: int, size: int) -> Any:
    """Return the store of rank 0 on another host."""
    return dist.TCPStore(host, port, size, False, _CONNECTING, False)


def connect(store: Any, rank: int, size: int, device: torch.device, board: Board, host: str = LOOPBACK) -> TorchGroup:
    """Join the group of all ranks, which find each other through a store; waits for all of them.

    `host` is the address of this host at which other ranks reach this one.
    """
    store.set_timeout(_CONNECTING)
    backend: Any
    try:
        if device.type == "cuda":
            if host == LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            backend = _nccl(store, rank, size, device)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = _LOADING
            backend = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise LostRankError(
            f"rank {rank} could not connect to the other ranks: {str(error).splitlines()[0]}"
        ) from error
    group = TorchGroup(backend, rank, size, device, board)
    group.least(0)  # NCCL connects at its first operation, which must not be inside a captured step
    return group


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    # Without this, torch ends the process when NCCL reports an error; ranks are watched here (watch.py).
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if device.index is not None:
        torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _LOADING
    return dist.ProcessGroupNCCL(store, rank, size, options)
