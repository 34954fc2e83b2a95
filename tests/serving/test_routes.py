"""Every route over plain HTTP, and what a careless or hostile client sends: an error object each, and on it goes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from openai_calls import MODEL
from running import Running, refused, running

import chairlift
from chairlift.serving.routes import ROUTES
from mostly_long import mostly_long
from tiny import CHAT_TEMPLATE

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
VOCABULARY, LENGTH = 384, 256


# ---- the small routes


def test_a_server_says_that_it_is_healthy_ready_and_which_version_it_is(server: Running) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/version").json() == {"version": chairlift.__version__}


def test_the_description_has_every_route_and_no_other(server: Running) -> None:
    described = server.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    written = {(method.upper(), path) for path, found in described["paths"].items() for method in found}
    assert written == {(route.method, route.path.replace(":path}", "}")) for route in ROUTES}
    for path, found in described["paths"].items():
        for operation in found.values():
            assert operation["summary"]
            named = {parameter["name"] for parameter in operation.get("parameters", [])}
            assert named == {part.strip("{}") for part in path.split("/") if part.startswith("{")}


def test_every_get_route_answers(server: Running) -> None:
    for route in ROUTES:
        if route.method == "GET":
            wanted = 404 if "{id}" in route.path else 200  # none of that name is under way
            assert server.get(route.path.replace("{name:path}", MODEL)).status_code == wanted, route


def test_the_metrics_are_prometheus_text(server: Running) -> None:
    page = server.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "chairlift:engine_up" in page.text


@pytest.mark.parametrize("text", ["Hello", "Everyone gets off.\n\tÜber 🚡 中文", " ", ""])
def test_a_text_comes_back_from_its_tokens(server: Running, text: str) -> None:
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == LENGTH
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}


def test_a_conversation_is_tokenized_as_a_chat_completion_reads_it(server: Running) -> None:
    tokens = server.post("/tokenize", {"messages": MESSAGES, "model": MODEL}).json()["tokens"]
    written = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert written == "<|begin|>user\nHello<|end|>\n<|begin|>assistant\n"
    reply = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}).json()
    assert reply["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [3]}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "1 2"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [VOCABULARY]}),
        ("/detokenize", {"tokens": [2**63 - 1]}),
    ],
)
def test_what_cannot_be_tokenized_is_refused(server: Running, path: str, body: Any) -> None:
    refused(server.post(path, body))


def test_a_client_can_use_the_tokenizer_from_afar(server: Running) -> None:
    """As lm-eval does: it needs the special tokens by text, and turns them and everything else into ids by itself."""
    info = server.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|begin|>", "<|end|>", None)
    assert (info["chat_template"], info["model_max_length"], info["vocab_size"]) == (CHAT_TEMPLATE, LENGTH, 320)
    assert info["tokenizer_class"]
    ends = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert ends == [1]
    text = "What is the answer?<|end|>\n"
    ids = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_there_is_no_other_route_and_no_other_method(server: Running) -> None:
    for path in ("/v1", "/v1/images", "/v1/chat/completions/", "/../etc/passwd", "/%00", "/" + "a" * 5000):
        assert refused(server.get(path), 404)["code"] == "unknown_route"
    for path in {route.path for route in ROUTES}:
        allowed = [route.method for route in ROUTES if route.path == path]
        for method in {"GET", "POST", "PUT", "DELETE"}.difference(allowed):
            response = server.request(method, path.replace("{name:path}", MODEL))
            assert refused(response, 405)["code"] == "wrong_method"
            assert response.headers["allow"] == ", ".join(allowed)


# ---- names


def test_a_request_keeps_the_name_its_client_gave_it(server: Running) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    named = server.post(COMPLETION, body, headers={"X-Request-Id": "trace-1.a:b_c"})
    assert named.headers["x-request-id"] == "trace-1.a:b_c"
    assert named.json()["id"] == "cmpl-trace-1.a:b_c"
    within = server.post(COMPLETION, {**body, "request_id": "mine"}, headers={"X-Request-Id": "other"})
    assert within.headers["x-request-id"] == "mine"
    assert within.json()["id"] == "cmpl-mine"
    stream = server.post(COMPLETION, {**body, "request_id": "mine", "stream": True})
    assert stream.headers["x-request-id"] == "mine"
    assert refused(server.post(COMPLETION, {**body, "request_id": "a b"}))["param"] == "request_id"


def test_a_model_with_a_very_long_name_is_not_found(server: Running) -> None:
    assert refused(server.post(COMPLETION, {"prompt": "x", "model": "x" * 100_000}), 404)["param"] == "model"


def test_two_requests_without_a_name_get_two(server: Running) -> None:
    names = {server.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(names) == 5


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\tb", "a;b", "<script>", "é"])
def test_a_name_that_could_do_harm_is_replaced(server: Running, name: str) -> None:
    given = server.get("/health", headers={"X-Request-Id": name.encode()}).headers["x-request-id"]
    assert given != name
    assert given.isalnum()


# ---- fields


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": "Hello"})])
def test_unknown_fields_are_set_aside_and_named(server: Running, path: str, body: Any) -> None:
    response = server.post(path, {**body, "max_tokens": 1, "frobnicate": [1], "enable_thinking": False})
    assert response.status_code == 200
    assert response.headers["x-chairlift-ignored-fields"] == "enable_thinking, frobnicate"
    streamed = server.post(path, {**body, "max_tokens": 1, "frobnicate": 1, "stream": True})
    assert streamed.headers["x-chairlift-ignored-fields"] == "frobnicate"
    assert "x-chairlift-ignored-fields" not in server.post(path, {**body, "max_tokens": 1, "user": "me"}).headers


def test_hostile_names_of_fields_do_no_harm_in_a_header(server: Running) -> None:
    names = ["a\r\nX-Evil: 1", "é" * 3, "", "x" * 5000, *(f"field{number}" for number in range(500))]
    response = server.post(COMPLETION, {"prompt": "Hello", "max_tokens": 1, **dict.fromkeys(names, 1)})
    assert response.status_code == 200
    assert "x-evil" not in response.headers
    assert len(response.headers["x-chairlift-ignored-fields"]) < 5000
    for name, shown in ((" ", "%20"), ("\x04", "%04"), (" é ", "%20%C3%A9%20")):
        body = json.dumps({"prompt": "Hello", "max_tokens": 1, name: 1}).encode()
        response = server.post(COMPLETION, body, headers={"Content-Type": "application/json"})
        assert (response.status_code, response.headers["x-chairlift-ignored-fields"]) == (200, shown)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "suffix", "the end"),
        (COMPLETION, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "modalities", ["text", "audio"]),
    ],
)
def test_what_cannot_be_done_yet_is_refused_by_name(server: Running, path: str, field: str, value: Any) -> None:
    error = refused(server.post(path, {"prompt": "Hello", "messages": MESSAGES, field: value}))
    assert error["param"] == field
    assert "not supported" in error["message"]


def test_what_asks_for_nothing_is_no_reason_to_refuse(server: Running) -> None:
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    ignored = {"user": "me", "metadata": {}, "store": False, "service_tier": "auto", "logit_bias": None, "stop": None}
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, **neutral, **ignored}).status_code == 200
    assert server.post(COMPLETION, {"prompt": "Hello", "best_of": 1, "suffix": "", "n": None}).status_code == 200


def test_an_image_is_refused_by_its_type(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = refused(server.post(CHAT, {"messages": [{"role": "user", "content": [image]}]}))
    assert "image_url" in error["message"]


# ---- hostile connections


def talk(server: Running, raw: bytes) -> bytes:
    """What the server says to bytes that no client library would send."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        answer = b""
        try:
            while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
                answer += part
        except ConnectionResetError:  # it may hang up on what it has not read to the end
            pass
        return answer


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions? The base URL"),
        ("POST", "/completions", "did you mean /v1/completions?"),
        ("GET", "/models", "did you mean /v1/models?"),
        ("GET", "/models/tiny", "did you mean /v1/models/tiny?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/v1/health", "did you mean /health?"),
        ("GET", "/v1/nothing", "see /openapi.json"),
    ],
)
def test_a_path_without_v1_or_with_one_too_many_gets_a_hint(
    server: Running, method: str, path: str, meant: str
) -> None:
    error = refused(server.request(method, path, json={} if method == "POST" else None), 404)
    assert error["code"] == "unknown_route"
    assert meant in error["message"]


@pytest.mark.parametrize("form", mostly_long(["json", "words"]))
def test_the_log_says_why_a_request_was_refused_in_one_line(tiny_model: Path, form: str) -> None:
    with running(tiny_model, "--log-format", form, fake=True) as server:
        server.post(COMPLETION, {"prompt": "x", "documents": [{"a": 1}]})
        server.post(COMPLETION, {"prompt": "x", "model": "x\n200 forged\x1b[2J" + "y" * 100_000})
        server.get("/nothing%0AGET%20/forged%20200")
        server.get("/health")
        server.wait_until(lambda: "/health 200" in server.logged())
        lines = server.logged().splitlines()[-4:]
    assert "documents is not supported" in lines[0]
    assert "model_not_found" in lines[1] and "there is no model" in lines[1] and len(lines[1]) < 1000
    assert "unknown_route" in lines[2]
    assert lines[3].count("why") == 0
    assert not any("\x1b" in line for line in lines)
    if form == "json":
        found = [json.loads(line) for line in lines]
        assert [each["message"].split()[-1] for each in found] == ["400", "404", "404", "200"]
        assert [each.get("code") for each in found] == [None, "model_not_found", "unknown_route", None]


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: 1\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Bad: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"HELLO\r\n\r\n",
    ],
    ids=["a large header", "many headers", "a long path", "a negative length", "two lengths", "NUL", "TLS", "words"],
)
def test_a_head_that_cannot_be_is_refused_without_harm(server: Running, raw: bytes) -> None:
    answer = talk(server, raw)
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), answer[:100]
    assert server.is_healthy()


def test_clients_that_hang_up_in_the_middle_of_anything_do_no_harm(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    whole = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    for end in range(0, len(whole) + 1, 7):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(whole[:end])
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(whole * 3)  # requests sent ahead; their answers are not read
    server.wait_until(server.is_idle)
