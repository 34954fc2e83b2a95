"""The engine's sign of life, read by one process while another writes it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from chairlift.serving.beat import PATIENCE, Beat

WRITER = """
import sys, time
from pathlib import Path
from chairlift.serving.beat import Beat
beat = Beat(Path(sys.argv[1]))
print("begun", flush=True)
while True:
    beat.touch(time.monotonic(), 7.0)
"""


def test_nobody_ever_sees_half_a_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    beat = Beat(path)
    assert beat.patience == PATIENCE
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
            while beat.patience == PATIENCE:
                time.sleep(0.01)
            for _ in range(500_000):
                # A writer that has lost its core is silent for a while, but not since the clock began.
                assert beat.silence(time.monotonic()) < 60 and beat.patience == 7.0
        finally:
            writer.kill()
