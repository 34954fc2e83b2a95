"""Why a request waits: asked over HTTP and with `chairlift explain`, of one's own and of others'."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, keys_file, running

from mostly_long import mostly_long

COMPLETION = "/v1/completions"
OPERATOR, ALICE, BOB = (
    {"Authorization": f"Bearer {key}"} for key in ("sk-key-of-operator", "sk-key-of-alice", "sk-key-of-bob")
)


@contextmanager
def asking(server: Running, headers: dict[str, str] | None = None, **body: Any) -> Iterator[None]:
    """A streamed request that the engine has, for as long as the block lasts; it need not have begun."""
    asked = {"prompt": "Hello", "max_tokens": 400, "stream": True, **body}
    headers = server.headers if headers is None else headers
    with httpx.stream("POST", server.url + COMPLETION, json=asked, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200
        yield


def explain(server: Running, name: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return server.get(f"/v1/requests/{name}", headers=server.headers if headers is None else headers)


def answers(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return reply.json()["answers"]  # type: ignore[no-any-return]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two rows, and keys; the tests' own questions carry the operator's."""
    keys = keys_file(tmp_path_factory.mktemp("keys"), alice="", bob="")
    environment = {"FAKE_SEQUENCES": "2", "FAKE_STEP": "0.05"}
    with running(tiny_model, "--api-keys", keys, "--max-waiting", "50", fake=True, environment=environment) as found:
        found.key = "sk-key-of-operator"
        yield found


@pytest.fixture
def crowd(server: Running) -> Iterator[Running]:
    """Two of alice's run; then wait one of bob's and one of hers."""
    server.wait_until(server.is_idle)
    with ExitStack() as stack:
        for name, headers in (("first", ALICE), ("second", ALICE), ("bobs", BOB), ("alices", ALICE)):
            stack.enter_context(asking(server, headers, request_id=name))
        server.wait_until(lambda: answers(explain(server, "alices"))[0]["blocked_by"] == "rows")
        yield server


def test_one_that_runs_tells_how_far_it_is(crowd: Running) -> None:
    crowd.wait_until(lambda: answers(explain(crowd, "first", ALICE))[0]["generated_tokens"] >= 3)
    reply = explain(crowd, "first", ALICE).json()
    assert (reply["id"], reply["object"], reply["unfinished"]) == ("first", "request", 1)
    [answer] = reply["answers"]
    assert (answer["state"], answer["ahead"], answer["tenant"], answer["index"]) == ("running", None, "alice", 0)
    assert answer["computed_tokens"] == answer["prompt_tokens"] + answer["generated_tokens"] - 1
    assert answer["why"][0].startswith("It runs: ") and answer["why"][0].endswith(" so far, of 400 at most.")
    assert answer["seconds"] > 0


def test_one_that_waits_tells_why_and_who_goes_before_it(crowd: Running) -> None:
    [bobs], [alices] = answers(explain(crowd, "bobs", BOB)), answers(explain(crowd, "alices", ALICE))
    assert (bobs["state"], bobs["ahead"], bobs["waiting"], bobs["generated_tokens"]) == ("waiting", 0, 2, 0)
    assert alices["ahead"] == 1
    assert alices["why"][:3] == [
        "It waits: 1 request is before it, and 2 requests wait in all.",
        "All 2 rows of the batch are in use.",
        "Policy fcfs: requests are admitted in order of arrival.",
    ]


def test_a_tenant_may_ask_about_its_own_and_an_administrator_about_all(crowd: Running) -> None:
    assert answers(explain(crowd, "bobs", OPERATOR)) and answers(explain(crowd, "first", OPERATOR))
    hidden, unknown = explain(crowd, "bobs", ALICE), explain(crowd, "bobz", ALICE)
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.text == unknown.text.replace("bobz", "bobs"), "that it exists is not told"
    assert explain(crowd, "bobs", {}).status_code == 401


def test_two_tenants_may_use_one_name(crowd: Running) -> None:
    with asking(crowd, BOB, request_id="alices"):
        crowd.wait_until(lambda: len(answers(explain(crowd, "alices"))) == 2)
        assert [each["tenant"] for each in answers(explain(crowd, "alices", ALICE))] == ["alice"]
        assert [each["tenant"] for each in answers(explain(crowd, "alices", BOB))] == ["bob"]


def test_the_id_in_a_reply_will_do_and_so_will_its_header(server: Running) -> None:
    asked = {"prompt": "Hello", "max_tokens": 400, "stream": True}
    path = server.url + COMPLETION
    with httpx.stream("POST", path, json=asked, headers={**ALICE, "X-Request-Id": "cmpl-7"}, timeout=60) as reply:
        assert reply.headers["x-request-id"] == "cmpl-7"
        for name in ("cmpl-7", "cmpl-cmpl-7"):
            server.wait_until(lambda name=name: explain(server, name, ALICE).status_code == 200)
        assert explain(server, "cmpl-cmpl-7", ALICE).json()["id"] == "cmpl-7"
        assert explain(server, "7", ALICE).status_code == 404


def test_every_answer_of_a_call_is_told(server: Running) -> None:
    server.wait_until(server.is_idle)
    with asking(server, prompt=["a", "b", "c"], n=2, request_id="six"):
        server.wait_until(lambda: explain(server, "six").json().get("unfinished") == 4)
        found = answers(explain(server, "six"))
        assert [(each["state"], each["index"]) for each in found] == [
            *(("running", 0), ("running", 1), ("waiting", 0), ("waiting", 0)),
        ], "what waits has not forked yet"
        [name, *lines] = run_command("six", "--url", server.url, "--api-key", "sk-key-of-operator").stdout.splitlines()
        assert name == "Answer 1 of 4 that have not ended:"
        assert [line for line in lines if line.startswith("Answer")] == [
            f"Answer {number} of 4 that have not ended:" for number in (2, 3, 4)
        ]


@pytest.mark.parametrize("name", ["nothing", "a" * 500, "%00", "a%20b", "%F0%9F%9A%A1", "cmpl-", "..."])
def test_what_is_not_there_is_told_so(server: Running, name: str) -> None:
    reply = explain(server, name)
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "unknown_request" and "finished requests are not kept" in error["message"]


def test_one_that_has_ended_is_not_there(server: Running) -> None:
    assert server.post(COMPLETION, {"prompt": "x", "max_tokens": 1, "request_id": "done"}).status_code == 200
    assert explain(server, "done").status_code == 404


# ---- the command


def test_the_command_prints_it_in_plain_lines(crowd: Running) -> None:
    done = run_command("cmpl-alices", "--url", f"{crowd.url}/v1", "--api-key", "sk-key-of-alice")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert lines == [
        "It waits: 1 request is before it, and 2 requests wait in all.",
        "All 2 rows of the batch are in use.",
        "Policy fcfs: requests are admitted in order of arrival.",
    ]
    assert last.startswith("It arrived ") and last.endswith("s ago, with a prompt of 5 tokens.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    mostly_long(
        [
            (
                ("nothing", "--api-key", "sk-key-of-alice"),
                "HTTP 404: no running or waiting request has the id 'nothing'",
            ),
            (("a/../b", "--api-key", "sk-key-of-alice"), "HTTP 404"),
            (("first",), "HTTP 401: no valid API key"),
            (("first", "--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9 (connection refused)"),
            (("first", "--url", "nowhere"), "'nowhere' is not a URL of a server"),
        ],
        1,
    ),
)
def test_what_goes_wrong_is_one_line(server: Running, arguments: tuple[str, ...], said: str) -> None:
    done = run_command("--url", server.url, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


# ---- an engine that does not answer, and several HTTP processes


@pytest.mark.long
def test_a_stuck_engine_is_told_in_time_and_holds_few_questions(server: Running) -> None:
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda _: explain(server, "first"), range(12)))
    finally:
        os.kill(engine, signal.SIGCONT)
    by_status = {reply.status_code: reply for reply in replies}
    assert by_status.keys() == {429, 503}
    assert [reply.status_code for reply in replies].count(503) == 8
    assert by_status[429].json()["error"]["code"] == "too_many_questions"
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
    server.wait_until(lambda: explain(server, "first").status_code == 404)
    assert server.engine_pid() == engine


@pytest.mark.long
def test_any_http_process_answers_for_all(tiny_model: Path) -> None:
    environment = {
        "FAKE_STEP": "0.5"
    }  # the request must outlast every try to reach the process that does not stand still
    with running(tiny_model, "--api-workers", "2", "--policy", "fair", fake=True, environment=environment) as server:
        assert any("warning: the fair policy shares among the tenants of API keys" in line for line in server.lines)
        first, second = server.process.pid, server.child("http_process")
        with asking(server, request_id="shared"):
            # Its head may arrive before the engine has the request, and a process that stands still sends nothing.
            server.wait_until(lambda: explain(server, "shared").status_code == 200)
            for stopped in (first, second):  # while one of them stands still, the other is asked: one owns it, one not
                os.kill(stopped, signal.SIGSTOP)
                try:
                    server.wait_until(lambda: explain(server, "shared").status_code == 200)
                finally:
                    os.kill(stopped, signal.SIGCONT)
            for _ in range(4):  # whichever answers
                assert server.metric("scheduling_info", policy="fair", batching="continuous") == 1
                assert server.metric("tenant_service_tokens", tenant="") > 0
                assert server.metric("num_requests_waiting_by_reason", reason="rows") == 0
