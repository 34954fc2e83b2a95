"""Limits that a child process sets on itself before it processes untrusted input: memory, and seconds per job.

The kernel enforces both, so they hold inside a C function and after the parent process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TIMED_OUT, OUT_OF_MEMORY = -14, -6  # exit codes: SIGALRM is ours; an allocation that fails in Rust aborts the process
_STATM = Path("/proc/self/statm")


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules in a child; `-P` keeps the working directory off sys.path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return a child's environment: it imports the same package as this process, and starts no tokenizer threads."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def confine(memory: int) -> None:
    """Limit this process to `memory` bytes more than it has now, and make it the kernel's first choice to kill."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if not _STATM.exists():  # not Linux: the process's size is unknown
        return
    import resource

    most = _pages()[0] + memory
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def resident() -> int:
    """Return the bytes of memory that this process uses; 0 if unknown."""
    return _pages()[1] if _STATM.exists() else 0


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End this process by SIGALRM if the block takes longer."""
    if sys.platform == "win32":  # has no such timer
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _pages() -> tuple[int, int]:
    size, held = _STATM.read_text().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(size) * page, int(held) * page
