"""The engine's sign of life, read by one process while another writes it."""

from __future__ import annotations

import subprocess
import sys
import time

from chairlift.serving.beat import PATIENCE, Beat

WRITER = """
import sys, time
from chairlift.serving.beat import Beat
beat = Beat(int(sys.argv[1]))
print("begun", flush=True)
while True:
    beat.touch(time.monotonic(), 7.0)
"""


def test_nobody_ever_sees_half_a_sign_of_life() -> None:
    beat = Beat()
    assert beat.patience == PATIENCE
    command = [sys.executable, "-c", WRITER, str(beat.descriptor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[beat.descriptor]) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
            while beat.patience == PATIENCE:
                time.sleep(0.01)
            for _ in range(500_000):
                # A writer that has lost its core is silent for a while, but not since the clock began.
                assert beat.silence(time.monotonic()) < 60 and beat.patience == 7.0
        finally:
            writer.kill()
