"""A process that ends with the one that started it, whatever ends that one."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_EVERY = 1.0  # seconds between looks at the parent


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, also while it hangs or is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent() -> None:
    """End this process soon after the one that started it, from a thread.

    For actors: a raylet starts them from threads that may end before it does, which `die_with_parent` would take for
    the raylet's end; and an actor runs on after its raylet has been killed, while it awaits something.
    """

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(_EVERY)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), name="parent", daemon=True).start()
