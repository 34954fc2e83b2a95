"""Long texts, large replies and hostile templates: the event loop goes on, memory is bounded, the reason is told."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from probing import attack, peaks, probing
from running import Running, running

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.openai.options import Options
from chairlift.serving import scores
from chairlift.serving.generation import EncodedPrompt
from mostly_long import mostly_long
from tiny import make_tiny_model

CHAT, COMPLETION, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
WORDS = "x y z "
ROOMY = {"FAKE_LENGTH": "150000", "FAKE_SEQUENCES": "2"}
LONGEST_CONTEXT = {"FAKE_LENGTH": "2000000", "FAKE_SEQUENCES": "2", "FAKE_BLOCKS": "250000"}


def words(size: int) -> str:
    return WORDS * (size // len(WORDS))


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Running]:
    """A context of 512 tokens: what cannot fit is refused."""
    with running(tiny_model, fake=True) as started:
        assert started.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).status_code == 200
        yield started
        started.wait_until(started.is_idle)


@pytest.fixture(scope="module")
def roomy(tiny_model: Path) -> Iterator[Running]:
    """A context of 150,000 tokens: a text of a megabyte might fit."""
    with running(tiny_model, fake=True, environment=ROOMY) as started:
        yield started


@pytest.fixture(scope="module")
def endless(tiny_model: Path) -> Iterator[Running]:
    """A context of 2,000,000 tokens: no text that can be sent is too long by its size alone."""
    with running(tiny_model, fake=True, environment=LONGEST_CONTEXT) as started:
        yield started


# ---- long texts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": words(8_000_000)}),
        (COMPLETION, {"prompt": [words(4_000_000), "x", words(3_900_000)], "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": words(8_000_000)}]}),
        (TOKENIZE, {"prompt": words(8_000_000)}),
        (TOKENIZE, {"messages": [{"role": "user", "content": words(8_000_000)}]}),
    ],
    ids=["a prompt", "prompts", "a conversation", "a text to tokenize", "a conversation to tokenize"],
)
def test_a_text_that_cannot_fit_the_context_is_refused_by_its_size(server: Running, path: str, body: Any) -> None:
    """Tokenizing one took 14 s or more, for all of which no other client had an answer, and 2 GiB."""
    before = sum(peaks(server.process.pid).values())
    with probing(server) as probe:
        [response] = attack(server, path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "at least" in error["message"]
    if path != TOKENIZE:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 512 tokens. However, you requested at least" in error["message"]
    assert probe.worst < 2
    assert probe.memory - before < 400


def test_the_end_of_a_text_of_any_length_can_be_asked_for(server: Running) -> None:
    body = {"prompt": words(8_000_000) + "the end", "truncate_prompt_tokens": 5, "max_tokens": 1}
    with probing(server) as probe:
        [response] = attack(server, COMPLETION, {**body, "return_token_ids": True, "echo": True})
    choice = response.json()["choices"][0]
    whole = server.post(TOKENIZE, {"prompt": words(600) + "the end"}).json()["tokens"]
    assert choice["prompt_token_ids"] == whole[-5:]
    assert probe.worst < 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "count"),
    [("roomy", 1_200_000, 2), pytest.param("endless", 8_000_000, 6, marks=pytest.mark.long)],
    ids=["2 of 1 MB", "6 of 8 MB"],
)
@pytest.mark.parametrize("path", mostly_long([TOKENIZE, COMPLETION]))
def test_long_texts_that_might_fit_are_read_beside_the_event_loop(
    request: pytest.FixtureRequest, path: str, name: str, size: int, count: int
) -> None:
    """Six texts of 8 MB: no answer for 110 s, and 6.7 GiB."""
    roomy: Running = request.getfixturevalue(name)
    with probing(roomy) as probe, ThreadPoolExecutor(1) as others:
        attacking = others.submit(attack, roomy, path, *[{"prompt": words(size), "max_tokens": 1}] * count)
        time.sleep(0.5)
        chat = roomy.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, timeout=20)
        assert chat.status_code == 200, "a chat waits for no book"
        statuses = {response.status_code for response in attacking.result()}
    assert statuses <= {200, 400, 429}
    assert size > 2_000_000 or statuses == {200 if path == TOKENIZE else 400}, "what might fit is counted"
    assert probe.worst < 2
    assert probe.memory < 2500, "MiB"


@pytest.mark.long
def test_the_server_lives_on_where_memory_is_limited(tiny_model: Path) -> None:
    """With `ulimit -v` at 3 GiB the third text of 8 MB ended the process."""
    with running(tiny_model, fake=True, environment=LONGEST_CONTEXT) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (3 << 30, 3 << 30))
        for _ in range(4):
            statuses = {reply.status_code for reply in attack(server, TOKENIZE, *[{"prompt": words(8_000_000)}] * 3)}
            assert statuses <= {400, 429, 503}
        assert server.process.poll() is None
        assert server.post(COMPLETION, {"prompt": "Hello", "max_tokens": 1}).status_code == 200


def test_the_text_processes_end_with_the_server_in_whatever_way_it_ends(tiny_model: Path) -> None:
    with running(tiny_model, fake=True) as server:
        child = server.child("text_process")
        server.process.kill()
        server.process.wait(10)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_text_whose_client_has_left_is_not_read(roomy: Running) -> None:
    body = json.dumps({"prompt": words(1_200_000), "max_tokens": 1}).encode()
    host, port = roomy.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    submitted = roomy.metric("requests_submitted_total")
    begun = time.monotonic()
    for _ in range(8):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + body)
            time.sleep(0.1)
    roomy.wait_until(lambda: roomy.logged().count("/v1/completions 499") >= 8, 60)
    # One is being read; the others would take as long again each.
    shortly = roomy.post(TOKENIZE, {"prompt": words(60_000)}, timeout=60)
    assert shortly.status_code == 200
    assert time.monotonic() - begun < 60
    assert roomy.metric("requests_submitted_total") == submitted


# ---- words, strings and ids


def test_bad_words_are_spelled_once_for_all_prompts_beside_the_event_loop(server: Running) -> None:
    body = {"prompt": ["x"] * 40, "max_tokens": 1, "bad_words": [f"{number:03}" + "x" * 47 for number in range(200)]}
    with probing(server) as probe:
        [response] = attack(server, COMPLETION, body)
    assert response.status_code == 200, response.text
    assert probe.worst < 2
    many = [f"{number:03}" + "x" * 197 for number in range(256)]
    for refused in ({"bad_words": ["x" * 257]}, {"bad_words": many, "prompt": ["x"] * 256}):
        error = server.post(COMPLETION, {"prompt": "x", "max_tokens": 1, **refused}).json()["error"]
        assert "bad_words" in error["message"] and "most" in error["message"]


@pytest.mark.parametrize(
    ("name", "size"), [("roomy", 300_000), pytest.param("endless", 2_000_000, marks=pytest.mark.long)]
)
def test_strings_of_tokens_are_made_beside_the_event_loop(request: pytest.FixtureRequest, name: str, size: int) -> None:
    roomy: Running = request.getfixturevalue(name)
    with probing(roomy) as probe:
        [response] = attack(roomy, TOKENIZE, {"prompt": words(size), "return_token_strs": True})
    found = response.json()
    assert "".join(found["token_strs"]) == words(size)
    assert probe.worst < 2
    with probing(roomy) as probe:
        [response] = attack(roomy, "/detokenize", {"tokens": found["tokens"][:390_000]})
    assert words(size).startswith(response.json()["prompt"])
    assert probe.worst < 2


# ---- log-probabilities


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real engine, with room for prompts of 4,000 tokens."""
    model = make_tiny_model(tmp_path_factory.mktemp("scoring") / "llama", max_position_embeddings=4096)
    with running(model, "--kv-tokens", "32768", "--max-sequences", "64") as started:
        yield started
        started.wait_until(started.is_idle)


PROMPTS = [[7 + number] * 1000 for number in range(4)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            COMPLETION,
            {"prompt": PROMPTS, "n": 16, "prompt_logprobs": 64},
            "16 answers x 4,000 prompt tokens x 65 make 4,160,000 log-probabilities in one reply, and the most is 524,",
        ),
        (
            COMPLETION,
            {"prompt": [9] * 1000, "prompt_logprobs": 4, "stream": True},
            "1 answers x 1,000 prompt tokens x 5 make 5,000 log-probabilities in one stream, and the most is 4,096",
        ),
        (COMPLETION, {"prompt": PROMPTS[0] * 3, "n": 60, "echo": True, "logprobs": 4}, "make 900,000"),
        (COMPLETION, {"prompt": PROMPTS * 4, "n": 64, "return_token_ids": True}, "make 1,024,000"),
        (COMPLETION, {"prompt": [9], "n": 8, "logprobs": 64, "max_tokens": 2000}, "8 answers x 2,000 tokens x 65"),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "logprobs": True,
                "top_logprobs": 64,
                "max_tokens": 3000,
                "n": 9,
            },
            "9 answers x 3,000 tokens x 65 may make 1,755,000 log-probabilities in one reply",
        ),
    ],
    ids=["a prompt's", "a prompt's in a stream", "an echo's", "ids", "an answer's", "a chat's"],
)
def test_more_log_probabilities_than_a_reply_may_have_are_refused(
    scoring: Running, path: str, body: Any, told: str
) -> None:
    """They made a reply of 271 MiB, for which the event loop stood still for 13 s."""
    before = scoring.metric("requests_submitted_total")
    response = scoring.post(path, {"max_tokens": 1, **body})
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
    assert scoring.metric("requests_submitted_total") == before


@pytest.mark.long
def test_a_reply_as_large_as_may_be_is_written_beside_the_event_loop(scoring: Running) -> None:
    body = {"prompt": PROMPTS, "n": 2, "prompt_logprobs": 64, "max_tokens": 1, "temperature": 0}
    with probing(scoring) as probe:
        [response] = attack(scoring, COMPLETION, body)
    assert response.status_code == 200
    assert len(response.content) > 30_000_000
    choices = response.json()["choices"]
    assert len(choices) == 8
    for first, second in zip(choices[::2], choices[1::2], strict=True):
        assert first["prompt_logprobs"] == second["prompt_logprobs"]
        assert first["prompt_logprobs"][0] is None
        assert {len(entry) for entry in first["prompt_logprobs"][1:]} <= {64, 65}
    assert probe.worst < 2
    assert probe.memory < 1500, "MiB"


@pytest.mark.long
def test_a_large_reply_says_what_small_ones_say(scoring: Running) -> None:
    """One is written by a text process, the others on the event loop."""
    body = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 5, "logprobs": 3}
    prompts = [list(range(start, start + 200)) for start in (2, 60)]
    large = scoring.post(COMPLETION, {**body, "prompt": prompts}).json()["choices"]
    for prompt, choice in zip(prompts, large, strict=True):
        small = scoring.post(COMPLETION, {**body, "prompt": prompt, "prompt_logprobs": None}).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]) == (small["text"], small["logprobs"])
        short = scoring.post(COMPLETION, {**body, "prompt": prompt[:40]}).json()["choices"][0]
        for ours, theirs in zip(choice["prompt_logprobs"][1:40], short["prompt_logprobs"][1:], strict=True):
            assert ours.keys() == theirs.keys()
            assert [entry["rank"] for entry in ours.values()] == [entry["rank"] for entry in theirs.values()]


def test_log_probabilities_of_all_requests_under_way_are_bounded(thinker: Running) -> None:
    body = {"prompt": [9], "n": 8, "logprobs": 64, "max_tokens": 1000, "ignore_eos": True, "timeout": 0.5}
    before = thinker.metric("requests_refused_total", reason="too_many_logprobs")
    replies = attack(thinker, COMPLETION, *[body] * 6)
    assert sorted(reply.status_code for reply in replies) == [408, 408, 408, 408, 429, 429]
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.json()["error"]["code"] == "too_many_logprobs"
    assert int(refused.headers["retry-after"]) >= 1
    assert thinker.metric("requests_refused_total", reason="too_many_logprobs") == before + 2
    assert thinker.post(COMPLETION, body).status_code == 408, "those that have ended are not counted"


def encoded(prompt: int, **params: Any) -> EncodedPrompt:
    return EncodedPrompt(None, [9] * prompt, SamplingParams(**params), 0, [], [])


def test_an_answer_without_an_end_of_its_own_ends_before_its_log_probabilities_are_too_many() -> None:
    endless = encoded(1000, max_tokens=None, logprobs=20, n=2, prompt_logprobs=0)
    ended = scores.with_room(endless, 131_072)
    assert ended.params.max_tokens is not None
    assert scores.MOST * 0.99 < scores.count_scores([ended], Options(), 131_072, chat=True) <= scores.MOST
    assert scores.with_room(endless, 8192) is endless, "the context ends it before"
    assert scores.with_room(encoded(1000, max_tokens=None), 131_072).params.max_tokens is None
    explicit = encoded(1000, max_tokens=100_000, logprobs=20)
    with pytest.raises(RequestError, match="1 answers x 100,000 tokens x 21"):
        scores.count_scores([scores.with_room(explicit, 131_072)], Options(), 131_072, chat=True)
    assert scores.count_scores([explicit], Options(stream=True), 131_072, chat=True) == scores.MOST, "sent as it comes"


# ---- chat templates


HOSTILE = {
    "a format of a billion spaces": "{{ '%1000000000d' % 1 }}",
    "lists that hold themselves twice": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "deep nesting": "{% if a %}" * 5000 + "{% endif %}" * 5000,
}


@pytest.mark.long
@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_chat_template_costs_its_own_request_alone(tmp_path: Path, template: str) -> None:
    with running(make_tiny_model(tmp_path / "llama", chat_template=template), fake=True) as server:
        with probing(server) as probe:
            attacking = ThreadPoolExecutor(1).submit(
                attack, server, CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            )
            assert server.post(COMPLETION, {"prompt": "Hello", "max_tokens": 3}).status_code == 200
            [response] = attacking.result()
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]
        assert probe.worst < 2
        assert probe.memory < 2000, "MiB"
        assert server.is_healthy()
