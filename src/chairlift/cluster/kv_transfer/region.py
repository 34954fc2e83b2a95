"""Regions: memory of whole slots that a sender fills and a receiver copies into its cache.

The ways are one seam: the receiver makes a region and says how to reach it, the sender opens it. A region belongs to
one connection. A sender that is cut off and fills a slot late cannot reach memory that is used for anything else.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from chairlift.cluster.kv_transfer import nixl
from chairlift.cluster.kv_transfer.wire import Handle, LinkError

BYTES = {"shm": 64 << 20, "tcp": 64 << 20, "nixl": 64 << 20, "cuda": 256 << 20}  # of one connection's slots


def ways_between(address: str, device: torch.device) -> list[str]:
    """Return how blocks can travel, the best way first: CUDA IPC or shared memory on one host, NIXL or TCP between."""
    if address.startswith("tcp:"):
        return ["nixl", "tcp"] if nixl.is_usable() else ["tcp"]
    return ["cuda" if device.type == "cuda" else "shm"]


class Made(NamedTuple):
    """A receiver's region."""

    raw: torch.Tensor
    handle: Handle  # for the sender
    descriptor: int | None = None  # to pass to the sender
    close: Callable[[], None] = lambda: None  # ends the sender's access, before the memory is freed
    progress: Callable[[], None] | None = None  # to be called again and again while the sender may write


def make(way: str, size: int, device: torch.device) -> Made:
    """Make a receiver's region."""
    if way == "shm":
        descriptor = os.memfd_create("chairlift-kv")
        os.ftruncate(descriptor, size)
        return Made(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8), [], descriptor)
    if way == "cuda":
        raw = torch.empty(size, dtype=torch.uint8, device=device)
        storage: Any = raw.untyped_storage()
        return Made(raw, [int(raw.storage_offset()), *storage._share_cuda_()])
    if way == "nixl":
        inlet = nixl.Inlet(local(size, device))
        return Made(inlet.raw, inlet.handle(), close=inlet.close, progress=inlet.progress)
    return Made(local(size, device), [])


def local(size: int, device: torch.device) -> torch.Tensor:
    """Return memory of this process alone: a sender's copy of slots on another host."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Opened(NamedTuple):
    """A sender's view of a region, or its copy of one that it does not map."""

    raw: torch.Tensor
    # Called with slots of the copy before they are announced, and with a function that says whether to stop.
    write: Callable[[list[int], Callable[[], bool]], None] | None = None
    close: Callable[[], None] = lambda: None


def open_region(way: str, size: int, block: int, device: torch.device, handle: Handle, link: socket.socket) -> Opened:
    """Open a receiver's region, of slots with `block` bytes each."""
    if way == "shm":
        descriptor = receive_descriptor(link)
        try:
            if os.fstat(descriptor).st_size != size:
                raise LinkError(f"the shared memory has {os.fstat(descriptor).st_size:,} bytes instead of {size:,}")
            return Opened(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8))
        finally:
            os.close(descriptor)
    if way == "cuda":
        offset, *parts = handle
        rebuild: Callable[..., Any] = torch.UntypedStorage._new_shared_cuda
        storage: torch.UntypedStorage = rebuild(*parts)
        found = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return Opened(found.set_(storage, int(offset), (size,), (1,)))
    if way == "nixl":
        outlet = nixl.Outlet(local(size, device), block, handle)
        return Opened(outlet.raw, outlet.write, outlet.close)
    return Opened(local(size, device))


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
