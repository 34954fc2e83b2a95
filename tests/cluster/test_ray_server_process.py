"""The server process of a replica on Ray, started as its actor starts it; without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from running import FAKE

from chairlift.cluster.ray.server_process import Job, Report
from chairlift.serving.plan import ModelPlan, Plan


@pytest.mark.long
def test_a_replica_has_the_keys_of_its_driver_and_none_of_its_node(tiny_model: Path) -> None:
    """A gateway without keys passes requests without one on; the raylet may have keys in its environment."""
    plan = Plan([ModelPlan("tiny", str(tiny_model))], {}, log_level="warning", engine_command=FAKE)
    process = subprocess.Popen(
        [sys.executable, "-m", "chairlift.cluster.ray.server_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CHAIRLIFT_API_KEYS": "alice:sk-12345678"},
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            process.stdin.write(msgspec.json.encode(Job(plan, parent=os.getpid())))
            process.stdin.close()
            port = msgspec.json.decode(process.stdout.readline(), type=Report).port
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).status_code == 200
        finally:
            process.terminate()
