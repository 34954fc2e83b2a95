"""`chairlift profile` writes all its measurements to the file and to the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chairlift.core.cost import Cost
from chairlift.costs import machine
from chairlift.models.families import outline, read_config
from chairlift.models.shapes import SHAPES


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift", "profile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
def test_the_command_writes_a_file_and_prints_tables(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    done = run("--shape", str(tiny_model), "--device", "cpu", "--out", str(file))
    assert done.returncode == 0, done.stderr
    for label in ("reads memory at", "multiplies large matrices at", "each token of a large step", "gate and up"):
        assert label in done.stdout
    assert "launch" not in done.stdout, "a CPU launches nothing"
    found = json.loads(file.read_text())
    assert (found["device"], found["dtype"]) == ("cpu", "float32")
    assert found["rates"]["read_bytes_s"] > 0 and found["rates"]["flops_s"] > 0
    names = machine.matrices(outline(read_config(SHAPES["stories15m"]))[0])
    products = {(each["matrix"], each["rows"]) for each in found["products"]}
    assert products <= {(name, rows) for name in names for rows in machine.ROWS}
    assert products >= {(name, machine.ROWS[0]) for name in names}  # on a busy machine, large ones are left out
    assert Cost(**found["cost"]).token > 0
    assert found["launch_s"] is found["to_device_bytes_s"] is found["to_host_bytes_s"] is None


@pytest.mark.long
def test_a_missing_folder_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "nowhere" / "machine.json"))
    assert done.returncode == 1 and "no such folder" in done.stderr


def test_the_matrices_are_those_of_the_layers_and_the_head() -> None:
    found = machine.matrices(outline(read_config(SHAPES["qwen3-0.6b"]))[0])
    assert found == {
        "queries, keys, values": (4096, 1024),
        "attention's output": (1024, 2048),
        "gate and up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    }


def test_a_product_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PATIENCE", 0.0)
    found = machine._multiply("one", 64, 64, 2, torch.float32, torch.device("cpu"))
    assert [each.rows for each in found] == [1]
