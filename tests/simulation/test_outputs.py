"""What a simulation writes: a report that opens anywhere, and a trace that ui.perfetto.dev opens."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from chairlift.cli import app
from chairlift.report.svg import chart

PHASES = {"X", "M", "C", "b", "e"}  # of the trace-event format, those that we write


def simulated(tmp_path: Path, *options: str) -> Any:
    command = ["simulate", "chats:turns=3,think=1", "--requests", "60", "--rate", "20", "--prompt-tokens", "40..400"]
    return CliRunner().invoke(app, [*command, *options])


def events_of(file: Path) -> list[dict[str, Any]]:
    found = json.loads(file.read_text())
    assert found["displayTimeUnit"] == "ms"
    return found["traceEvents"]


def check_trace(events: list[dict[str, Any]]) -> None:
    """Hold the rules of Chrome's trace-event format that viewers rely on."""
    for event in events:
        assert event["ph"] in PHASES and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    open_spans: dict[tuple[Any, ...], list[tuple[str, float]]] = {}
    for event in events:  # asynchronous events of one id nest: what begins last ends first, and not before it began
        if event["ph"] not in "be":
            continue
        stack = open_spans.setdefault((event["cat"], event["id"], event["pid"]), [])
        if event["ph"] == "b":
            assert not stack or stack[-1][1] <= event["ts"]
            stack.append((event["name"], event["ts"]))
        else:
            name, begun = stack.pop()
            assert name == event["name"] and begun <= event["ts"]
    assert not any(open_spans.values())
    for pid in {event["pid"] for event in events}:  # steps of a device do not overlap
        steps = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid)
        assert all(a + dur <= b + 0.002 for (a, dur), (b, _) in pairwise(steps))


def test_a_trace_file_keeps_the_rules_of_its_format_and_has_every_step_and_request(tmp_path: Path) -> None:
    file, out = tmp_path / "trace.json", tmp_path / "out.json"
    result = simulated(tmp_path, "--role", "prefill=1,decode=2", "--perfetto", str(file), "--json", str(out))
    assert result.exit_code == 0, result.output
    events = events_of(file)
    check_trace(events)
    kinds, summary = Counter(event["ph"] for event in events), json.loads(out.read_text())
    assert kinds["X"] == summary["steps"] > 60 and kinds["b"] == kinds["e"] == 4 * 60
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"replica 0, prefill", "replica 1, decode", "replica 2, decode"}
    assert summary["sent_bytes"] > 0 and "KV sent to decode replicas" in result.output


def test_a_full_trace_file_is_still_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.simulation.trace_file.MOST_EVENTS", 300)
    file = tmp_path / "trace.json"
    result = simulated(tmp_path, "--perfetto", str(file))
    assert result.exit_code == 0
    assert f"{file} has the first 300 events: later steps and requests are left out" in " ".join(result.output.split())
    events = events_of(file)
    check_trace(events)
    assert 300 <= len(events) < 320


class Page(HTMLParser):
    """Collects what a page would fetch, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_has_its_plots_in_itself_and_fetches_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    result = simulated(tmp_path, "--html", str(file), "--target", "ttft:1000", "--replicas", "2")
    assert result.exit_code == 0, result.output
    text, page = file.read_text(), Page()
    page.feed(text)
    assert page.fetched == [] and page.tags["script"] == page.tags["link"] == 0 and page.tags["svg"] >= 5
    for title in ("Latency by share of requests", "Batch: sequences that run", "KV cache in use"):
        assert title in text
    assert "60 finished" in text and "TTFT target" in text


def test_every_output_says_why_requests_were_rejected(tmp_path: Path) -> None:
    html, out = tmp_path / "report.html", tmp_path / "out.json"
    result = simulated(tmp_path, "--kv-tokens", "1024", "--html", str(html), "--json", str(out))
    found = json.loads(out.read_text())
    assert [each["requests"] for each in found["rejections"]] == [found["requests"]["rejected"]] != [0]
    for text in (result.output, html.read_text(), found["rejections"][0]["example"]):
        assert re.search(r"the prompt has \d+ tokens and the context holds 1024", text)


def test_a_chart_is_xml_even_with_odd_names_and_gaps() -> None:
    lines = {"<a & b>": [(0.0, 1.0), (1.0, float("nan")), (2.0, 1e6)], "zero": [(0.0, 0.0)]}
    for is_log in (False, True):
        root = ElementTree.fromstring(chart("x < y", "ms", lines, is_log=is_log, is_marked=True, limits={"t": 5.0}))
        assert "<a & b>" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert chart("nothing", "ms", {"a": []}) == ""


def test_long_names_stay_within_the_picture_and_above_the_plot() -> None:
    names = [
        "chairlift serve org/model --replicas 2 --quantization fp8" + " --prefill splitfuse" * n for n in (0, 1, 9)
    ]
    root = ElementTree.fromstring(chart("x", "ms", {name: [(0.0, 1.0), (1.0, 2.0)] for name in names}))
    shown = [each for each in root.iter() if (each.text or "").startswith("chairlift")]
    assert len({each.get("y") for each in shown}) == 3
    assert all(float(each.get("x", "")) + 5.6 * len(each.text or "") <= 720 for each in shown)
    grid = [float(each.get("d", "").split()[1].split("H")[0]) for each in root.iter() if "H" in each.get("d", "")]
    assert min(grid) > max(float(each.get("y", "")) for each in shown)


@pytest.mark.parametrize("option", ["--html", "--perfetto", "--json"])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, option: str) -> None:
    result = simulated(tmp_path, option, str(tmp_path / "no" / "file"))
    assert result.exit_code != 0 and "cannot be written" in str(result.exception)
    result = simulated(tmp_path, option, "/dev/full")
    assert result.exit_code != 0 and "cannot be written: No space left" in str(result.exception)
