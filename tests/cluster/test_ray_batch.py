"""`chairlift batch --on ray`: a file over three raylets, killed and run again: every line once in the output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import Raylets, raylets

from chairlift import LLM
from chairlift.offline.batch import run_batch

pytestmark = pytest.mark.long
LINES = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets({}) as found:
        yield found


def line(custom_id: str, **body: Any) -> str:
    asked = {"temperature": 0, "max_tokens": 40, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked})


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in file.read_text().splitlines()] if file.exists() else []


def test_a_killed_job_goes_on_and_every_line_is_in_the_output_once(
    cluster: Raylets, tiny_model: Path, tmp_path: Path
) -> None:
    source, target, expected = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    lines = [
        line(f"line-{number}", prompt=f"The answer to {number} is", model=tiny_model.name) for number in range(LINES)
    ]
    lines += ["no JSON", lines[7], line("other", prompt="Hi", model="gpt"), line("long", prompt="Hi", max_tokens=-1)]
    source.write_text("\n".join(lines) + "\n")
    flags = ["--model", str(tiny_model), "--dtype", "float32", "--kv-tokens", "2048", "--max-sequences", "8"]
    command = [sys.executable, "-m", "chairlift", "batch", str(source), str(target), "--on", "ray", *flags]
    # Keys of a server: a job has its own.
    environment = {**os.environ, "RAY_ADDRESS": cluster.cluster.address, "CHAIRLIFT_API_KEYS": "alice:sk-12345678"}

    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    start = time.monotonic()
    while len(read(target)) < 20:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() - start < 300
        time.sleep(0.02)
    job.kill()
    job.communicate()
    before = len(read(target))
    assert before < LINES, "it was killed too late"

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert again.returncode == 1, again.stderr
    assert f"{LINES - before} done, 4 failed, {before} answered before" in again.stderr
    found = read(target)
    answers = {each["custom_id"]: each for each in found if each["error"] is None}
    assert sorted(answers) == sorted(f"line-{number}" for number in range(LINES))
    errors = [(each["custom_id"], each["error"]["code"]) for each in found if each["error"] is not None]
    assert sorted(errors, key=str) == [
        ("long", "invalid_request"),
        ("other", "model_not_found"),
        (None, "duplicate_custom_id"),
        (None, "invalid_json"),
    ]
    assert len(found) == LINES + 4
    print(f"{before} lines were answered when the job was killed, {LINES - before} by the next: each once")

    source.write_text("\n".join(lines[:40]) + "\n")
    run_batch(LLM(str(tiny_model), dtype="float32", kv_tokens=2048), source, expected)
    for each in read(expected):
        mine, theirs = (one["response"]["body"] for one in (answers[each["custom_id"]], each))
        assert (mine["choices"], mine["usage"]["total_tokens"]) == (theirs["choices"], theirs["usage"]["total_tokens"])
        assert mine["model"] == theirs["model"]
