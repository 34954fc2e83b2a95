"""The server process of a replica: a server on a free port of its node.

It reads a Job from stdin and writes Reports to stdout, all in JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from chairlift.cluster.parent import die_with_parent
from chairlift.core.errors import ChairliftError
from chairlift.serving import logs
from chairlift.serving.http_server import listen
from chairlift.serving.keys import Keyring
from chairlift.serving.listening import allow_files
from chairlift.serving.plan import Plan
from chairlift.serving.server import serve


class Job(msgspec.Struct, frozen=True):
    """The server's settings."""

    plan: Plan
    keyring: Keyring | None = None  # of the driver; keys in the environment of a node do not count
    host: str | None = None  # address to listen on; None: the node's
    cpus: float | None = None  # of the replica; None: it has GPUs
    parent: int = 0  # process id; the server process ends with it


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the actor is told."""

    port: int | None = None  # it listens
    error: str | None = None  # it cannot serve


def main() -> None:
    """Serve until a signal."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    die_with_parent(job.parent)
    logs.set_up(job.plan.log_format, job.plan.log_level)
    allow_files()
    try:
        listener = listen(job.plan.host, 0)
        _report(Report(port=listener.getsockname()[1]))
        asyncio.run(serve(job.plan, lambda text: None, job.keyring, listener))
    except ChairliftError as error:
        _report(Report(error=str(error)))
        sys.exit(1)


def _report(report: Report) -> None:
    os.write(1, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
