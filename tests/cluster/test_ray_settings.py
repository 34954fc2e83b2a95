"""`chairlift serve --on ray`: what is refused before a cluster is looked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mostly_long import mostly_long

_WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # an import of it fails
from chairlift.cli import main
main()
"""


def test_without_ray_the_error_says_what_to_install() -> None:
    command = [sys.executable, "-c", _WITHOUT_RAY, "serve", "--on", "ray"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert found.stderr.startswith("error: --on ray needs the package ray")
    assert "pip install 'chairlift[ray]'" in found.stderr


def test_a_range_of_replicas_needs_a_cluster() -> None:
    command = [sys.executable, "-m", "chairlift", "serve", "--replicas", "1..3"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert found.stderr == "error: --replicas is 1..3: a range needs --on ray; use one number\n"


@pytest.mark.parametrize("given", mostly_long(["0", "two", "3..1", "65", "-1", "1..", "1..65"]))
def test_a_wrong_number_of_replicas_is_refused(given: str) -> None:
    command = [sys.executable, "-m", "chairlift", "serve", "--replicas", given]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert (
        found.stderr
        == f"error: --replicas is {given}: use a number from 1 to 64, or with --on ray a range such as 1..3\n"
    )
