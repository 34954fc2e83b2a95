"""The engine's supervisor, with real processes: no error ends its watch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from chairlift.serving.beat import Beat
from chairlift.serving.engine_process import Job
from chairlift.serving.supervisor import Supervisor


def test_an_engine_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    program, away = tmp_path / "engine", tmp_path / "away"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o700)

    async def run() -> None:
        beat = Beat()
        job = Job("m", {}, [], beat.descriptor, os.getpid())
        supervisor = Supervisor(job, beat, [str(program)])
        supervisor.start()
        first = supervisor.pid
        assert first is not None
        program.rename(away)  # what no descriptors or no memory would do: the start itself fails
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(2)
        assert supervisor.restarts == 0
        away.rename(program)
        async with asyncio.timeout(20):
            while supervisor.exit_code is not None:
                await asyncio.sleep(0.05)
        assert supervisor.restarts == 1 and supervisor.pid != first
        await supervisor.stop()

    asyncio.run(run())
