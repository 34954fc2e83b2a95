"""A request with rules that leave it no token gets an error object, and the requests beside it their answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import Running

PLAIN: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 30, "ignore_eos": True}
WHY = "no token is left to choose under allowed_token_ids and bad_words: allow more tokens"


@pytest.fixture(scope="module")
def server(one_server: Running) -> Running:
    """Without the check that no request fails: here some must."""
    return one_server


@pytest.fixture(scope="module")
def cornered(server: Running) -> dict[str, Any]:
    """After its first token, whichever of the two letters it is, both are banned."""
    letters = [server.post("/tokenize", {"prompt": letter, "add_special_tokens": False}).json() for letter in "zQ"]
    allowed = [token for each in letters for token in each["tokens"]]
    words = [one + other for one in "zQ" for other in "zQ"]
    return {"prompt": [5, 6, 7], "max_tokens": 30, "allowed_token_ids": allowed, "bad_words": words}


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"temperature": 0, "logprobs": 2}], ids=str)
def test_it_gets_an_error_object_and_others_their_answers(
    server: Running, cornered: dict[str, Any], more: dict[str, Any]
) -> None:
    alone = server.post("/v1/completions", PLAIN).json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        bodies = [cornered | more, PLAIN] * 4
        replies = list(pool.map(lambda body: server.post("/v1/completions", body), bodies))
    for failed, answered in zip(replies[::2], replies[1::2], strict=True):
        assert (failed.status_code, failed.json()["error"]["message"]) == (400, WHY)
        assert answered.json()["choices"][0]["text"] == alone
    server.wait_until(server.is_idle)
    assert "Traceback" not in server.logged()


def test_a_stream_ends_with_the_error(server: Running, cornered: dict[str, Any]) -> None:
    reply = server.post("/v1/completions", cornered | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["message"] == WHY
    assert events[-1]["error"]["type"] == "invalid_request_error"
    server.wait_until(server.is_idle)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids are all forbidden"),
        ({"bad_words": ["x" * 129]}, "bad_words has an entry of 129 characters: use at most 128"),
    ],
    ids=["all forbidden", "long word"],
)
def test_what_is_known_before_the_first_token_is_refused(server: Running, body: dict[str, Any], why: str) -> None:
    reply = server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3} | body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(why)
