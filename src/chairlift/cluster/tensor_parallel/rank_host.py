"""RankHost: waits for rank 0 of another host and starts a rank's process for it."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from chairlift.cluster.kv_transfer.wire import LinkError
from chairlift.cluster.tensor_parallel.remote import accept

log = logging.getLogger("chairlift")

_COMMAND = [sys.executable, "-m", "chairlift.cluster.tensor_parallel.rank_process"]


class RankHost:
    """Has one rank's process at a time: that of the last engine that connected, since an engine before it has ended."""

    def __init__(self, host: str, key: str, environment: Mapping[str, str]) -> None:
        self._host, self._key, self._environment = host, key, environment
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._process: subprocess.Popen[bytes] | None = None
        # The process ends with the thread that starts it (die_with_parent).
        threading.Thread(target=self._serve, name="chairlift-rank-host", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT, for rank 0."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._listener.getsockname()[1]}"

    @property
    def pid(self) -> int | None:
        """The id of the rank's process; None if none was started."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the rank's process and accept no further one."""
        self._listener.close()
        self._end()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link:
                try:
                    self._start(link)
                except (LinkError, OSError) as error:
                    log.warning("a connection for a rank was refused: %s", error)

    def _start(self, link: socket.socket) -> None:
        job = accept(link, self._key)
        self._end()
        given = {
            "rank": job.rank,
            "size": job.size,
            "device": "cuda" if job.is_cuda else "cpu",
            "parent": os.getpid(),
            "link": link.fileno(),
            "store": [job.host, job.port],
            "own": self._host,
        }
        self._process = subprocess.Popen(
            [*_COMMAND, json.dumps(given)],
            env=self._environment,
            pass_fds=[link.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
