"""The live page over HTTP: its files and their headers, which clients may read its stream, and what the stream has."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from running import Running, keys_file, running

from chairlift.core.blocks import BlockPool
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.core.step import Step, StepResult
from chairlift.engine.engine import Engine
from chairlift.serving.assets import asset
from chairlift.serving.messages import Watch
from chairlift.serving.page import MOST_UNREAD, MOST_VIEWERS, Page, Viewer
from chairlift.serving.watching import Watching
from mostly_long import mostly_long

SECRET = "zebra zebra zebra"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, "--replicas", "2", fake=True, environment={"FAKE_STEP": "0.03"}) as started:
        yield started


@contextmanager
def events(server: Running, headers: dict[str, str] | None = None) -> Iterator[Iterator[Any]]:
    """The stream's events."""
    with httpx.stream("GET", server.url + "/ui/events", timeout=30, headers=headers or server.headers) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line)


def until(stream: Iterator[Any], part: str, replica: int | None = None) -> Any:
    """The next event with a part, of a replica if one is named."""
    end = time.monotonic() + 30
    for each in stream:
        assert time.monotonic() < end, f"no event has {part}"
        if part in each and replica in (None, each.get("replica")):
            return each
    raise AssertionError("the stream has ended")


# ---- its files


def test_the_page_and_its_files_have_headers_that_confine_it(server: Running) -> None:
    for path in ("/", "/ui/main.js", "/ui/page.css", "/ui/icon.svg"):
        reply = server.get(path)
        assert reply.status_code == 200
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "http" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = server.get(path, headers={"If-None-Match": reply.headers["etag"]})
        assert again.status_code == 304 and not again.content


def test_there_are_no_other_files(server: Running) -> None:
    for path in ("/ui/", "/ui/none.js", "/ui/__init__.py", "/ui/../app.py", "/ui/%2e%2e%2fapp.py", "/ui/a/b.js"):
        assert server.get(path).status_code == 404, path
    assert server.post("/ui/main.js", {}).status_code == 405


def test_no_file_names_another_server_or_parses_text_as_markup() -> None:
    folder = Path(asset.__code__.co_filename).parents[1] / "ui"
    files = [file for file in folder.iterdir() if file.suffix in (".html", ".css", ".js", ".svg")]
    assert len(files) > 10
    for file in files:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        for wrong in ("http:", "https:", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert wrong not in text, f"{file.name} has {wrong}"
        assert len(text.splitlines()) < 300, file.name


@pytest.mark.long
def test_without_the_page_there_is_nothing_of_it(tiny_model: Path) -> None:
    with running(tiny_model, "--no-ui", fake=True) as server:
        for path in ("/", "/ui/main.js", "/ui/events"):
            assert server.get(path).status_code == 404, path
        assert "live page" not in server.logged()


# ---- its stream


def test_the_stream_has_the_steps_of_every_replica_with_its_lanes(server: Running) -> None:
    with events(server) as stream:
        first = next(stream)
        assert [(each["replica"], each["trouble"]) for each in first["engines"]] == [(0, None), (1, None)]
        begun = {found["replica"]: found["start"] for found in (until(stream, "start"), until(stream, "start"))}
        assert begun.keys() == {0, 1} and begun[0]["max_sequences"] == 64
        asking = Thread(target=server.post, args=("/v1/completions", {"prompt": SECRET, "max_tokens": 30}))
        asking.start()
        found = until(stream, "steps")
        admitted = next(event for event in found["events"] if event[0] == "admit")
        [[row, start, count]] = found["steps"][0][6]
        assert (admitted[2], admitted[6]) == (row, start + count), "the first step computes the whole prompt"
        text = json.dumps(found)
        assert "zebra" not in text, "prompts are not shown"
        asking.join()


def test_a_page_that_is_opened_later_learns_which_sequences_run(server: Running) -> None:
    body = {"prompt": "Hello", "max_tokens": 450, "request_id": "long-one", "stream": True}
    with events(server) as stream, httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30):
        replica = next(each["replica"] for each in stream if "long-one" in json.dumps(each))
        with events(server) as other:
            lanes = until(other, "start", replica)["start"]["lanes"]
            assert [lane[1] for lane in lanes] == ["long-one"]
            step = until(other, "steps", replica)["steps"][0]
            assert step[5], "the first step that a new page sees names its rows"


@pytest.mark.long
def test_a_page_that_stays_open_is_sent_new_beginnings_so_that_what_it_saves_has_one(tiny_model: Path) -> None:
    often = {"chairlift.serving.page._RENEW_EVERY": 0.1, "chairlift.serving.page._BEGIN_EVERY": 2}
    with running(tiny_model, fake=True, constants=often) as server, events(server) as stream:
        first, second = until(stream, "start")["start"], until(stream, "start")["start"]
        assert second["epoch"] == first["epoch"] and second["at"] > first["at"]


@pytest.mark.long
def test_prompts_are_in_the_stream_only_where_the_operator_allows_it(tiny_model: Path) -> None:
    with running(tiny_model, "--ui-prompts", fake=True) as server, events(server) as stream:
        until(stream, "start")
        server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 3})
        admitted = next(event for event in until(stream, "steps")["events"] if event[0] == "admit")
        assert admitted[-1] == SECRET


def test_only_an_admin_may_read_the_stream_and_anyone_the_page(tiny_model: Path, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, alice="")
    with running(tiny_model, "--api-keys", keys, fake=True) as server:
        assert server.get("/").status_code == 200
        assert server.get("/ui/events").status_code == 401
        assert server.get("/ui/events?key=sk-key-of-operator").status_code == 401
        assert server.get("/ui/events", headers={"Authorization": "Bearer sk-key-of-alice"}).status_code == 403
        with events(server, {"Authorization": "Bearer sk-key-of-operator"}) as stream:
            assert until(stream, "start")


@pytest.mark.long
def test_pages_are_bounded_and_a_server_that_stops_ends_them(tiny_model: Path) -> None:
    with running(tiny_model, "--grace", "20", fake=True) as server:
        client = httpx.Client(timeout=30, limits=httpx.Limits(max_connections=None))
        opened = [client.stream("GET", server.url + "/ui/events") for _ in range(MOST_VIEWERS)]
        replies = [each.__enter__() for each in opened]
        assert {reply.status_code for reply in replies} == {200}
        refused = server.get("/ui/events")
        assert refused.status_code == 429 and "retry-after" in refused.headers
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for reply in replies:
            assert sum(1 for _ in reply.iter_lines()) > 0  # to its end
        assert server.process.wait(10) == 0 and time.monotonic() - began < 10
        client.close()


def test_a_page_that_does_not_read_costs_bounded_memory_and_misses_steps() -> None:
    viewer = Viewer()
    part = b"x" * (MOST_UNREAD // 4)
    assert [viewer.put(part) for _ in range(5)] == [True, True, True, True, False]
    assert viewer.put(part)
    assert viewer._size == len(part)


# ---- the engine's side


class Instant:
    def launch(self, step: Step) -> StepResult:
        return StepResult([1] * len(step.sample_rows))

    def choose(self, launched: StepResult, masks: list[bytes | None]) -> None: ...

    def collect(self, launched: StepResult) -> StepResult:
        return launched


class Clock:
    time = 0.0

    def now(self) -> float:
        return self.time


class Line:
    """A link that notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.has_room = True

    def send(self, message: Any) -> bool:
        self.sent.append(json.loads(message.record))
        return True


def test_an_engine_records_only_while_it_is_asked_to_and_sends_ten_times_a_second() -> None:
    clock, line = Clock(), Line()
    engine = Engine(Scheduler(Limits(4, 64, 400, 8), BlockPool(100, 16)), Instant(), clock)
    engine.submit(Request("a", [1] * 8, SamplingParams(max_tokens=390, ignore_eos=True)))
    watching = Watching(engine, lambda request: request.id)
    for _ in range(10):
        engine.step()
        watching.send(clock.time)
    assert engine.on_applied is None and not line.sent
    watching.renew(line, Watch(2.0, True), clock.time)  # type: ignore[arg-type]
    for _ in range(200):
        clock.time += 0.005
        engine.step()
        watching.send(clock.time)
    assert 9 <= len(line.sent) <= 12
    assert sum(len(record.get("steps", ())) for record in line.sent) >= 180
    line.has_room = False
    clock.time += 0.5
    watching.send(clock.time)
    before = len(line.sent)
    clock.time += 0.5
    watching.send(clock.time)
    assert len(line.sent) == before, "a process that is behind is sent nothing that it can do without"
    clock.time += 2
    watching.send(clock.time)
    assert engine.on_applied is None, "the lease has expired"


def running_engine(clock: Clock) -> Engine:
    engine = Engine(Scheduler(Limits(4, 64, 400, 8), BlockPool(100, 16)), Instant(), clock)
    engine.submit(Request("a", [1] * 8, SamplingParams(max_tokens=390, ignore_eos=True)))
    engine.step()
    return engine


def test_a_second_process_is_sent_a_beginning_although_it_asks_for_none() -> None:
    """After a restart of the engine, each process renews what the one before had been asked for."""
    clock, first, second = Clock(), Line(), Line()
    engine = running_engine(clock)
    watching = Watching(engine, lambda request: request.id)
    watching.renew(first, Watch(9.0, False), clock.time)  # type: ignore[arg-type]
    watching.send(clock.time)
    watching.renew(second, Watch(9.0, False), clock.time)  # type: ignore[arg-type]
    engine.step()
    clock.time += 0.2
    watching.send(clock.time)
    assert [lane[1] for lane in second.sent[0]["start"]["lanes"]] == ["a"]
    assert second.sent[0]["steps"][0][5], "the first step that it sees names its rows"


def test_a_process_that_was_behind_goes_on_from_a_new_beginning() -> None:
    clock, line = Clock(), Line()
    engine = running_engine(clock)
    watching = Watching(engine, lambda request: request.id)
    watching.renew(line, Watch(9.0, True), clock.time)  # type: ignore[arg-type]
    for line.has_room in (True, False, True, True):
        engine.step()
        clock.time += 0.2
        watching.send(clock.time)
    engine.step()
    clock.time += 0.2
    watching.send(clock.time)
    begun, *others = line.sent
    assert "start" in begun and "start" in others[0], "the steps between cannot be understood without those it missed"
    assert others[0]["start"]["epoch"] == begun["start"]["epoch"] and others[0]["start"]["number"] >= 2


def test_an_engine_goes_on_when_a_recording_cannot_begin() -> None:
    def name_of(request: Request) -> str:
        raise RuntimeError("a bug")

    clock, line = Clock(), Line()
    engine = running_engine(clock)
    watching = Watching(engine, name_of)
    watching.renew(line, Watch(2.0, True), clock.time)  # type: ignore[arg-type]
    engine.step()
    assert engine.on_applied is None and engine.scheduler.counters.failed == 0


def test_prompts_that_cannot_be_decoded_cost_a_record_and_not_the_answers() -> None:
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            raise IndexError("no such token")

    client, viewer = SimpleNamespace(hello=None, trouble=None), Viewer()
    fleet = SimpleNamespace(clients={"a": client})
    model: Any = SimpleNamespace(name="m", fleet=fleet, reader=SimpleNamespace(tokenizer=Tokenizer()))
    page = Page([model], shows_prompts=True)
    page._viewers.add(viewer)
    client.on_record(json.dumps({"start": {"lanes": [[0, [9]]]}}).encode())
    assert viewer._size == 0
    client.on_record(json.dumps({"start": {"lanes": []}}).encode())
    assert viewer._size > 0


@pytest.mark.parametrize("bad_call", [1, 2], ids=["at once", "later"])
def test_an_engine_goes_on_when_its_steps_cannot_be_recorded(bad_call: int) -> None:
    clock, line, calls = Clock(), Line(), iter(range(1, 100))

    def name_of(request: Request) -> str:
        if next(calls) >= bad_call:
            raise RuntimeError("a bug")
        return request.id

    engine = Engine(Scheduler(Limits(4, 64, 400, 8), BlockPool(100, 16)), Instant(), clock)
    watching = Watching(engine, name_of)
    watching.renew(line, Watch(2.0, True), clock.time)  # type: ignore[arg-type]
    for number in range(6):
        engine.submit(Request(str(number), [1] * 8, SamplingParams(max_tokens=20, ignore_eos=True)))
    while engine.has_work:
        clock.time += 0.05
        engine.step()
        watching.send(clock.time)
    assert engine.scheduler.counters.finished == 6
    assert engine.on_applied is None


# ---- recordings


NESTED = pytest.param("[" * 60_000, id="nested", marks=pytest.mark.long)


@pytest.mark.parametrize("content", [*mostly_long(["hello\n", "", '{"kind": "other"}\n', "[1]\n", "\xff\n"]), NESTED])
def test_a_file_that_is_no_recording_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(content, encoding="latin-1")
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "view", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {file} is not a recording: ") and done.stderr.count("\n") == 1


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "view", str(tmp_path / "none")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "none cannot be read: No such file" in done.stderr


def test_every_file_of_the_page_is_in_the_package() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "chairlift.ui"
    ]
    files = [file for file in (root / "src/chairlift/ui").iterdir() if file.suffix != ".py" and file.is_file()]
    assert files and all(any(file.match(pattern) for pattern in patterns) for file in files)
    for file in files:
        assert asset(file.name) is not None, f"{file.name} has a type that is not served"
