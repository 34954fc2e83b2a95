"""Servers that tests of several files in this folder use, and what must be true of each when a file is done with it.

A start takes seconds, so that files with the same needs share a server: it is started for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_model import serving
from openai_calls import MODEL
from running import Running, keys_file, running


@pytest.fixture(scope="session")
def one_server(tiny_model: Path) -> Iterator[Running]:
    """The server of `server`, for whichever files come to this process."""
    with running(tiny_model, "--served-model-name", MODEL, "--max-length", "256", "--kv-tokens", "4096") as started:
        yield started


@pytest.fixture(scope="module")
def server(one_server: Running) -> Iterator[Running]:
    """After all that a file's tests do to it, the server answers and nothing has been lost."""
    failed = one_server.metric("requests_failed_total")
    yield one_server
    assert one_server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
    one_server.wait_until(one_server.is_idle)
    assert one_server.metric("requests_failed_total") == failed
    assert one_server.metric("engine_restarts_total") == 0


@pytest.fixture(scope="session")
def one_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The server of `thinker`, for whichever files come to this process."""
    with serving(tmp_path_factory.mktemp("model")) as started:
        yield started


@pytest.fixture(scope="module")
def thinker(one_thinker: Running) -> Iterator[Running]:
    """A server with a model that reasons when it is told to; it fails no request."""
    failed = one_thinker.metric("requests_failed_total")
    yield one_thinker
    one_thinker.wait_until(one_thinker.is_idle)
    assert one_thinker.metric("requests_failed_total") == failed


@pytest.fixture(scope="session")
def one_slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The server of `slow`, for whichever files come to this process."""
    keys = keys_file(tmp_path_factory.mktemp("keys"), single="max_concurrent = 1\nmax_priority = 3")
    flags = ("--served-model-name", MODEL, "--api-keys", keys)
    with running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.02"}) as started:
        started.key = "sk-key-of-operator"
        yield started


@pytest.fixture(scope="module")
def slow(one_slow: Running) -> Iterator[Running]:
    """A server that takes seconds for an answer, and that wants keys."""
    yield one_slow
    one_slow.wait_until(one_slow.is_idle)


@pytest.fixture
def is_aborted(slow: Running) -> Iterator[Callable[[], bool]]:
    """Whether one more request than before the test has been aborted; in the end, nothing is left of any."""
    before = slow.metric("requests_aborted_total")
    yield lambda: slow.metric("requests_aborted_total") == before + 1
    slow.wait_until(slow.is_idle)
