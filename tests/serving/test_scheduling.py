"""Which request runs next, as clients see it: priorities, shares and deadlines over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, keys_file, running

from chairlift.core.params import SamplingParams
from chairlift.core.settings import SchedulingSettings
from chairlift.serving.core_messages import as_request
from chairlift.serving.messages import Submit, decode_order, encode
from chairlift.serving.server import choices

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
ONE_SEAT = {"FAKE_SEQUENCES": "1", "FAKE_STEP": "0.02"}


@contextmanager
def holding(server: Running, key: str | None = None, **body: Any) -> Iterator[None]:
    """All rows of a batch of one taken, until the block ends."""
    asked = {"prompt": "Hello", "max_tokens": 400, "stream": True, "request_id": "holder", **body}
    headers = server.headers if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", server.url + COMPLETION, json=asked, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()  # let go of, it would close the connection
        next(lines)
        yield


class Crowd:
    """Requests that wait together, and the order in which they are answered."""

    def __init__(self, server: Running, pool: ThreadPoolExecutor) -> None:
        self.answered: list[str] = []
        self._server, self._pool = server, pool
        self._futures: list[Future[None]] = []

    def join(self, name: str, key: str | None = None, path: str = COMPLETION, **body: Any) -> None:
        """Ask, and come back when it waits in the engine's queue."""
        prompt: dict[str, Any] = {"prompt": "Hello"}
        if path == CHAT:
            prompt = {"messages": [{"role": "user", "content": "Hello"}]}
        asked = {**prompt, "max_tokens": 8, "request_id": name, **body}
        headers = self._server.headers if key is None else {"Authorization": f"Bearer {key}"}
        self._futures.append(self._pool.submit(self._ask, path, asked, headers))
        self._server.wait_until(lambda: explained(self._server, name) is not None)

    def _ask(self, path: str, asked: dict[str, Any], headers: dict[str, str]) -> None:
        reply = self._server.post(path, asked, headers=headers)
        assert reply.status_code == 200, reply.text
        self.answered.append(asked["request_id"])

    def wait(self) -> list[str]:
        """Until all are answered: in which order."""
        for future in self._futures:
            future.result()
        return self.answered


def explained(server: Running, name: str) -> dict[str, Any] | None:
    """What the server says of a request that has one answer under way."""
    reply = server.get(f"/v1/requests/{name}")
    assert reply.status_code in (200, 404)
    if reply.status_code == 404:
        return None
    [answer] = reply.json()["answers"]
    return answer  # type: ignore[no-any-return]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return keys_file(tmp_path, alice='ttft = "20s"', bob="weight = 3")


def has(server: Running, name: str, **wanted: Any) -> bool:
    """Whether the server says that of a request."""
    told = explained(server, name)
    return told is not None and wanted.items() <= told.items()


@pytest.fixture(scope="module")
def by_priority(tiny_model: Path) -> Iterator[Running]:
    flags = ("--policy", "priority", "--preemption", "swap", "--max-waiting", "50")
    with running(tiny_model, *flags, fake=True, environment=ONE_SEAT) as server:
        yield server
        server.wait_until(server.is_idle)


def test_a_higher_priority_goes_first(by_priority: Running) -> None:
    server = by_priority
    with ThreadPoolExecutor(8) as pool:
        crowd = Crowd(server, pool)
        with holding(server, priority=100):
            for name, priority in (("low", -5), ("plain", 0), ("high", 7), ("also-high", 7), ("middle", 3)):
                crowd.join(name, priority=priority, path=CHAT if name == "high" else COMPLETION)
            waiting = {name: explained(server, name) for name in ("high", "also-high", "middle", "plain", "low")}
            assert [told and told["ahead"] for told in waiting.values()] == [0, 1, 2, 3, 4]
            server.wait_until(lambda: server.metric("num_requests_waiting_by_reason", reason="rows") == 5)
        assert crowd.wait() == list(waiting)


def test_a_higher_priority_takes_the_seat_of_a_lower_one_which_then_goes_on(by_priority: Running) -> None:
    server = by_priority
    before = server.metric("num_preemptions_total")
    with ThreadPoolExecutor(2) as pool, holding(server, priority=-1, prompt=[7] * 40):
        crowd = Crowd(server, pool)
        crowd.join("urgent", priority=1, max_tokens=50)
        server.wait_until(lambda: has(server, "holder", preemptions=1))
        told = explained(server, "holder")
        assert told is not None and "It was preempted 1 time, and kept its place in the queue." in told["why"]
        assert crowd.wait() == ["urgent"]
        server.wait_until(lambda: has(server, "holder", state="running"))
    server.wait_until(server.is_idle)
    assert server.metric("num_preemptions_total") == before + 1
    assert server.metric("kv_blocks_swapped_out_total") == server.metric("kv_blocks_swapped_in_total") >= 3
    assert server.metric("scheduling_info", policy="priority", preemption="swap", prefill="chunked") == 1


@pytest.mark.long
def test_tenants_share_by_weight_whoever_asks_more(tiny_model: Path, keys: str) -> None:
    flags = ("--policy", "fair", "--predictor", "max_tokens", "--api-keys", keys, "--max-waiting", "50")
    with running(tiny_model, *flags, fake=True, environment=ONE_SEAT) as server, ThreadPoolExecutor(12) as pool:
        server.key = "sk-key-of-operator"
        assert any("scheduling policy fair, predictor max_tokens" in line for line in server.lines)
        crowd = Crowd(server, pool)
        with holding(server, max_tokens=450):  # the operator's own: it has its share of the one seat, and no more
            for number in range(6):
                crowd.join(f"alice-{number}", key="sk-key-of-alice")
            for number in range(3):
                crowd.join(f"bob-{number}", key="sk-key-of-bob")
            told = explained(server, "alice-3")
            assert told is not None
            assert (told["tenant"], told["ahead"], told["lanes"]) == ("alice", 3, 2), "others' are in other lanes"
            # Paid for in advance, at the operator's weight of 1; the others began level with it.
            for tenant in ("operator", "alice", "bob"):
                assert server.metric("tenant_service_tokens", tenant=tenant) == told["prompt_tokens"] + 2 * 450
        answered = [name.partition("-")[0] for name in crowd.wait()]
        # 5 + 2 x 8 tokens each: after alice's first, bob's three cost him as much as one of hers.
        assert answered[:4].count("bob") == 3, answered
        assert answered.count("alice") == 6
        server.wait_until(server.is_idle)
        assert server.metric("tenant_service_tokens", tenant="alice") == 0, "a tenant that is away has no account"


@pytest.mark.long
def test_the_earliest_deadline_goes_first_be_it_the_request_s_or_its_tenant_s(tiny_model: Path, keys: str) -> None:
    flags = ("--policy", "deadline", "--api-keys", keys, "--max-waiting", "50")
    with running(tiny_model, *flags, fake=True, environment=ONE_SEAT) as server, ThreadPoolExecutor(8) as pool:
        server.key = "sk-key-of-operator"
        crowd = Crowd(server, pool)
        with holding(server):
            crowd.join("never")
            crowd.join("alices", key="sk-key-of-alice")  # 20 s, says her key
            crowd.join("thirty", ttft=30)
            crowd.join("ten", key="sk-key-of-alice", ttft=10.5, path=CHAT)
            told = [explained(server, name) for name in ("ten", "alices", "thirty")]
            assert [each and each["ahead"] for each in told] == [0, 1, 2]
            assert told[0] is not None and "s; the earliest deadline is admitted first." in told[0]["why"][2]
            aside = explained(server, "never")
            assert aside is not None
            assert aside["lanes"] == 2 and "it has no deadline; it waits in the second lane" in aside["why"][2]
        assert [name for name in crowd.wait() if name != "never"] == ["ten", "alices", "thirty"]


@pytest.mark.parametrize("ttft", [0, -1, "1", True, [], 604801, 1e308])
def test_a_deadline_that_is_none_is_refused(plain: Running, ttft: Any) -> None:
    for path, prompt in ((COMPLETION, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        refused = plain.post(path, {**prompt, "ttft": ttft})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "ttft"


@pytest.mark.parametrize("ttft", [None, 0.001, 2, 604800])
def test_a_deadline_changes_no_answer_where_no_policy_reads_it(plain: Running, ttft: Any) -> None:
    reply = plain.post(COMPLETION, {"prompt": "x", "max_tokens": 2, "ttft": ttft})
    assert reply.status_code == 200
    assert "x-chairlift-ignored-fields" not in reply.headers


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, fake=True) as server:
        yield server


def test_the_first_lines_name_what_was_chosen_and_nothing_where_nothing_was(plain: Running) -> None:
    assert not any("scheduling" in line for line in plain.lines)
    assert choices(SchedulingSettings()) == ""
    chosen = SchedulingSettings(
        max_sequences=3, policy="sjf", aging=2, batching="dynamic", batch_window=0.5, overlap=False
    )
    assert choices(chosen) == "policy sjf, aging 2, batching dynamic, batch-window 0.5 s, overlap False"


# ---- what crosses to the engine

ORDER: dict[str, Any] = {
    "key": 1,
    "id": "name.with.dots",
    "prompt": [1, 2],
    "params": SamplingParams(max_tokens=4, best_of=3, use_beam_search=True, length_penalty=0.5, early_stopping="never"),
    "arrival": 5.0,
    "seed": 3,
    "tenant": "alice",
    "weight": 2.5,
    "priority": 7,
    "deadline": 5.5,
    "endpoint": "chat",
    "salt": "alice/mine",
}


def test_all_that_policies_go_by_reaches_the_engine() -> None:
    order = decode_order(encode(Submit(**ORDER)))
    assert isinstance(order, Submit)
    request = as_request("0.1.name.with.dots", order)
    found = (request.tenant, request.weight, request.priority, request.deadline, request.endpoint, request.salt)
    assert found == ("alice", 2.5, 7, 5.5, "chat", "alice/mine")
    asked = request.params
    search = (asked.n, asked.best_of, asked.use_beam_search, asked.length_penalty, asked.early_stopping)
    assert search == (1, 3, True, 0.5, "never")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "x" * 65},
        {"id": "x" * 129},
        {"endpoint": "x" * 17},
        {"salt": "x" * 322},
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": float("nan")},
        {"priority": 2**31 + 1},
        {"priority": -(2**31) - 1},
    ],
)
def test_what_is_out_of_bounds_never_reaches_the_scheduler(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        decode_order(encode(Submit(**{**ORDER, **wrong})))
