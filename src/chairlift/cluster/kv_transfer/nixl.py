"""NIXL: slots of a receiver on another host that a sender writes with RDMA, through UCX.

Both ends need the package nixl, and a transport of UCX other than TCP: on its TCP port UCX writes and reads any address
of the process for any other process that connects. UCX's own variable UCX_TLS can allow TCP all the same. Each
connection has an agent of its own, which ends with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from chairlift.cluster.kv_transfer.wire import Handle, LinkError

log = logging.getLogger("chairlift")

# Read by UCX and NIXL when the first agent is made. Their messages are not ours: a failure is logged here.
_ENVIRONMENT = {"UCX_TLS": "^tcp", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
_BACKEND = "UCX"
_WRITE_SECONDS = 10.0  # for the blocks of one chunk
_POLL = 0.0001  # seconds between two looks at a transfer


class UnusableError(RuntimeError):
    """NIXL cannot be used between these two ends."""


@cache
def is_usable() -> bool:
    """Return whether the package is installed and has a transport; the first call takes a second or two."""
    if find_spec("nixl") is None:
        return False
    try:
        _agent()
    except UnusableError as error:
        log.info("KV blocks are sent over TCP: %s", error)
        return False
    return True


def _agent() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        # Its own thread for progress never sleeps.
        return nixl_agent(secrets.token_hex(), nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
    except Exception as error:  # the package's errors have no base of their own
        raise UnusableError(f"NIXL finds no transport ({error}; UCX_TLS is {os.environ['UCX_TLS']})") from None


class _End:
    """Memory of this process, registered with an agent."""

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw, self._address = raw, raw.data_ptr()
        self._agent = _agent()
        try:
            self._registered = self._agent.register_memory([(self._address, raw.numel(), 0, "")], "DRAM")
        except Exception as error:  # out of lockable memory, for example
            raise UnusableError(f"{raw.numel():,} bytes cannot be registered with NIXL: {error}") from None

    def close(self) -> None:
        """End all access to the memory."""
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None  # its threads and connections end


class Inlet(_End):
    """A receiver's memory."""

    def handle(self) -> Handle:
        """Return what a sender needs to write the memory, and nothing else of this process."""
        return [self._agent.get_partial_agent_metadata(self._registered, True, [_BACKEND]), self._address]

    def progress(self) -> None:
        """Answer the sender's network card: connections are made so, and over TCP each write."""
        self._agent.get_new_notifs()


class Outlet(_End):
    """A sender's copy of the slots of a receiver."""

    def __init__(self, raw: torch.Tensor, block_bytes: int, handle: Handle) -> None:
        super().__init__(raw)
        self._size = block_bytes
        try:
            metadata, there = handle
            self._there = int(there)
            self._peer = self._agent.add_remote_agent(metadata)
            raw[:block_bytes].zero_()
            self.write([0], lambda: False)  # the hosts may have no network in common
        except Exception as error:
            self.close()
            raise UnusableError(f"the receiver cannot be reached with NIXL: {error}") from None

    def write(self, slots: list[int], is_lost: Callable[[], bool]) -> None:
        """Write slots to the receiver's memory; LinkError if they do not arrive, or when the connection is lost."""
        own, theirs = (self._descriptors(start, slots) for start in (self._address, self._there))
        end = time.monotonic() + _WRITE_SECONDS
        try:
            transfer = self._agent.initialize_xfer("WRITE", own, theirs, self._peer)
            state = self._agent.transfer(transfer)
            while state == "PROC" and not is_lost() and time.monotonic() < end:
                time.sleep(_POLL)
                state = self._agent.check_xfer_state(transfer)
            self._agent.release_xfer_handle(transfer)
        except Exception as error:
            raise LinkError(f"NIXL could not write blocks: {error}") from None
        if state != "DONE":
            raise LinkError("NIXL could not write blocks in time")

    def _descriptors(self, start: int, slots: list[int]) -> Any:
        return self._agent.get_xfer_descs([(start + slot * self._size, self._size, 0) for slot in slots], "DRAM")
