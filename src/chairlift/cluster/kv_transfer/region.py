"""Regions: memory of whole slots that a sender fills and a receiver copies into its cache.

The three ways are one seam: the receiver makes a region and says how to reach it, the sender opens it. A region belongs
to one connection. A sender that is cut off and fills a slot late cannot reach memory that is used for anything else.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from chairlift.cluster.kv_transfer.wire import LinkError

BYTES = {"shm": 64 << 20, "tcp": 64 << 20, "cuda": 256 << 20}  # of one connection's slots
Handle = list[bytes | int | bool]


def way_between(address: str, device: torch.device) -> str:
    """Return how blocks travel: CUDA IPC or shared memory on one host, TCP between hosts."""
    if address.startswith("tcp:"):
        return "tcp"
    return "cuda" if device.type == "cuda" else "shm"


def make(way: str, size: int, device: torch.device) -> tuple[torch.Tensor, Handle, int | None]:
    """Return the receiver's region: its memory, a handle for the sender, and a descriptor to pass to it."""
    if way == "shm":
        descriptor = os.memfd_create("chairlift-kv")
        os.ftruncate(descriptor, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8), [], descriptor
    if way == "cuda":
        raw = torch.empty(size, dtype=torch.uint8, device=device)
        storage: Any = raw.untyped_storage()
        return raw, [raw.storage_offset(), *storage._share_cuda_()], None
    return local(size, device), [], None


def local(size: int, device: torch.device) -> torch.Tensor:
    """Return memory of this process alone: a sender's copy of the slots that it sends as bytes."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def open_region(way: str, size: int, device: torch.device, handle: Handle, link: socket.socket) -> torch.Tensor:
    """Return the sender's view of a region."""
    if way == "shm":
        descriptor = receive_descriptor(link)
        try:
            if os.fstat(descriptor).st_size != size:
                raise LinkError(f"the shared memory has {os.fstat(descriptor).st_size:,} bytes instead of {size:,}")
            return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    if way == "cuda":
        offset, *parts = handle
        rebuild: Callable[..., Any] = torch.UntypedStorage._new_shared_cuda
        storage: torch.UntypedStorage = rebuild(*parts)
        found = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return found.set_(storage, int(offset), (size,), (1,))
    return local(size, device)


def send_descriptor(link: socket.socket, descriptor: int) -> None:
    """Pass a descriptor over a Unix socket."""
    try:
        link.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
    except OSError as error:
        raise LinkError(f"the other end is gone: {error}") from None


def receive_descriptor(link: socket.socket) -> int:
    """Return a descriptor that was passed over a Unix socket."""
    try:
        _, passed, _, _ = link.recvmsg(1, socket.CMSG_SPACE(4))
    except OSError as error:
        raise LinkError(f"the other end is gone: {error}") from None
    for level, kind, data in passed:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return int(array.array("i", data[:4])[0])
    raise LinkError("no shared memory was passed")
