"""Whatever a generator of requests, valid and invalid, makes of our description, no answer is the server's fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import Running, running


def responses(server: Running) -> dict[str, float]:
    """How many there were of each status."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "chairlift:http_requests_total":
                found[sample.labels["status"]] = found.get(sample.labels["status"], 0) + sample.value
    return found


GENERATING = "/v1/(chat/completions|completions|responses|messages)$"  # bodies of these routes take long to draw


def generate(server: Running, examples: int, *only: str) -> subprocess.Popen[str]:
    """A generator at work, valid and invalid data in turn."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", "not_a_server_error", "--mode", "all", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(examples), "--seed", "1", "--suppress-health-check", "all"),
            *("--generation-database", "none", "--no-color", "--continue-on-failure", *only),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize(("examples", "least"), [pytest.param(250, 2_000, id="many")])  # to try it: 1 and 150
def test_no_generated_request_breaks_the_server(tiny_model: Path, examples: int, least: int) -> None:
    # Short answers: most of the time was decoding.
    with running(tiny_model, "--log-level", "error", "--max-waiting", "1000", "--max-length", "64") as server:
        generators = [
            generate(server, examples, "--exclude-path-regex", GENERATING),
            generate(server, max(1, examples // 6), "--include-path-regex", GENERATING),
        ]
        said = "".join(generator.communicate()[0][-4000:] for generator in generators)
        counts = responses(server)
        assert not [status for status in counts if status.startswith("5")], said
        assert sum(counts.values()) > least, f"too few cases: {counts}\n{said}"
        assert counts["200"] > least / 50 and counts["400"] > least / 10, f"one side only: {counts}"
        assert server.is_healthy()
        server.wait_until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("kv_cache_usage_perc") == 0
        print(f"{sum(counts.values()):,.0f} cases: {counts}")
