"""Servers that tests of several files in this folder use, and what must be true of each when they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai_calls import MODEL
from running import Running, keys_file, running


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Running]:
    """After all that these tests do to it, the server answers and nothing has been lost."""
    flags = ("--served-model-name", "tiny", "--max-length", "256", "--kv-tokens", "4096")
    with running(tiny_model, *flags) as started:
        yield started
        assert started.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
        started.wait_until(started.is_idle)
        assert started.metric("requests_failed_total") == 0
        assert started.metric("engine_restarts_total") == 0


@pytest.fixture(scope="module")
def slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that takes seconds for an answer, and that wants keys."""
    keys = keys_file(tmp_path_factory.mktemp("keys"), single="max_concurrent = 1\nmax_priority = 3")
    flags = ("--served-model-name", MODEL, "--api-keys", keys)
    with running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.02"}) as started:
        started.key = "sk-key-of-operator"
        yield started
        started.wait_until(started.is_idle)


@pytest.fixture
def is_aborted(slow: Running) -> Iterator[Callable[[], bool]]:
    """Whether one more request than before the test has been aborted; in the end, nothing is left of any."""
    before = slow.metric("requests_aborted_total")
    yield lambda: slow.metric("requests_aborted_total") == before + 1
    slow.wait_until(slow.is_idle)
