"""Arrivals: equal seeds give equal send times, and recordings of all formats are read."""

from __future__ import annotations

import json
import math
import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from chairlift.core.errors import ChairliftError
from chairlift.traffic.arrivals import Demand, send_times
from chairlift.traffic.query import Query
from chairlift.traffic.traces import read_trace
from chairlift.traffic.workloads import Lengths

SHORT = Lengths(3, 5, 4)


def gaps(kind: str, rate: float, burstiness: float | None = None, seed: int = 0, n: int = 20000) -> list[float]:
    return [b - a for a, b in pairwise(islice(send_times(kind, rate, burstiness, seed), n))]


def written(folder: Path, name: str, *lines: str) -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(("kind", "burstiness"), [("poisson", None), ("constant", None), ("burst", 0.5)])
def test_arrivals_are_the_same_for_the_same_seed(kind: str, burstiness: float | None) -> None:
    assert gaps(kind, 3, burstiness, seed=7) == gaps(kind, 3, burstiness, seed=7)
    assert (gaps(kind, 3, burstiness, seed=7) == gaps(kind, 3, burstiness, seed=8)) is (kind == "constant")
    assert next(send_times(kind, 3, burstiness)) == 0


def test_poisson_gaps_have_the_mean_and_the_spread_of_their_rate() -> None:
    found = gaps("poisson", 4)
    assert fmean(found) == pytest.approx(1 / 4, rel=0.05) and pstdev(found) == pytest.approx(1 / 4, rel=0.05)
    assert set(gaps("constant", 4, n=9)) == {1 / 4}
    assert next(islice(send_times("constant", 10), 3000, None)) == 300


@pytest.mark.parametrize("burstiness", [0.25, 1, 4])
def test_burstiness_changes_the_spread_and_not_the_mean(burstiness: float) -> None:
    found = gaps("burst", 10, burstiness)
    assert fmean(found) == pytest.approx(1 / 10, rel=0.05)
    assert pstdev(found) == pytest.approx(1 / 10 / math.sqrt(burstiness), rel=0.1)


def test_an_infinite_rate_is_all_at_once() -> None:
    for kind in ("poisson", "constant", "burst"):
        assert gaps(kind, math.inf, n=5) == [0] * 4


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (Demand(arrivals="nothing"), "there are no arrivals 'nothing'"),
        (Demand(rate=0), "the rate is 0"),
        (Demand(rate=math.nan), "the rate is nan"),
        (Demand(rate=2, burstiness=1), "burstiness shapes the gaps of burst"),
        (Demand(arrivals="burst", burstiness=1), "burstiness shapes the gaps of burst"),
        (Demand(arrivals="burst", rate=2, burstiness=0), "the burstiness is 0"),
        (Demand(workload="nothing"), "there is no workload 'nothing'"),
    ],
)
def test_invalid_demands_are_refused(demand: Demand, message: str) -> None:
    with pytest.raises(ChairliftError, match=message):
        demand.queries()


def test_a_duration_or_a_count_limits_the_requests() -> None:
    constant = {"prompt": SHORT, "output": SHORT, "arrivals": "constant"}
    assert len(Demand(**constant).queries()) == 64
    assert [each.at for each in Demand(**constant, rate=2, duration=2).queries()] == [0, 0.5, 1, 1.5]
    assert len(Demand(**constant, rate=2, duration=2, requests=3).queries()) == 3
    assert len(Demand(**constant, rate=2, duration=2, requests=9).queries()) == 4
    assert len(Demand(**constant, duration=2, requests=9).queries()) == 9, "time 0 is within any duration"
    assert len(Demand("cpu64").queries()) == 64 and len(Demand("cpu64", requests=5).queries()) == 5
    assert len(Demand("cpu64", arrivals="constant", rate=10, duration=1).queries()) == 10


def test_a_workload_gives_prompts_within_the_vocabulary() -> None:
    found = Demand(prompt=SHORT, output=SHORT, requests=50, vocab_size=9).queries()
    for query in found:
        assert isinstance(query.prompt, list) and max(query.prompt) < 9
        assert 3 <= query.prompt_tokens <= 5 and 3 <= query.output_tokens <= 5


def test_a_text_of_a_file_is_kept_for_the_servers_tokenizer(tmp_path: Path) -> None:
    lines = ['{"prompt": "one", "output_tokens": 1}', '{"prompt_tokens": [4, 5], "output_tokens": 2}']
    file = written(tmp_path, "work.jsonl", *lines, '{"prompt": "two", "output_tokens": 3}')
    assert [each.prompt for each in Demand(str(file), vocab_size=5).queries()] == ["one", [4, 0], "two"]


def test_a_prompt_is_drawn_as_tokens_or_as_words() -> None:
    r = random.Random(0)
    drawn = Query(40, 1).drawn(r, 7).ids
    assert len(drawn) == 40 and set(drawn) <= set(range(7))
    assert len(Query(40, 1).text(r).split()) == 40 and len(Query([1, 2, 3], 1).text(r).split()) == 3
    assert Query("as it is", 1).text(r) == Query("as it is", 1).drawn(r, 7).prompt == "as it is"


EXPECTED = [Query(10, 20), Query(30, 1, 1.5), Query(50, 60, 4)]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "ours.jsonl",
            [
                '{"timestamp": 100, "prompt_tokens": 10, "output_tokens": 20}',
                "",
                '{"timestamp": 101.5, "prompt_tokens": 30, "output_tokens": 1}',
                '{"timestamp": 104, "prompt_tokens": 50, "output_tokens": 60}',
            ],
        ),
        (
            "mooncake.jsonl",
            [
                '{"timestamp": 0, "input_length": 10, "output_length": 20, "hash_ids": [0]}',
                '{"timestamp": 4000, "input_length": 50, "output_length": 60, "hash_ids": [0, 1]}',
                '{"timestamp": 1500, "input_length": 30, "output_length": 1, "hash_ids": []}',
            ],
        ),
        (
            "azure.csv",
            [
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2023-11-16 18:15:46.5000000,10,20",
                "2023-11-16 18:15:48.0000000,30,0",
                "2023-11-16 18:15:50.5000000,50,60",
            ],
        ),
        (
            "azure2024.csv",
            [
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2024-05-10 00:00:00.500000+00:00,10,20",
                "2024-05-10 00:00:02+00:00,30,1",
                "2024-05-10 00:00:04.500000+00:00,50,60",
            ],
        ),
        (
            "burstgpt.csv",
            [
                "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
                "5,ChatGPT,10,20,30,Conversation log",
                "6.5,ChatGPT,30,0,30,Conversation log",
                "9,GPT-4,50,60,110,API log",
            ],
        ),
    ],
)
def test_recordings_of_all_formats_are_read(name: str, lines: list[str], tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, name, *lines))
    assert [each.at for each in found] == pytest.approx([each.at for each in EXPECTED])
    assert [(each.prompt, each.output_tokens) for each in found] == [(e.prompt, e.output_tokens) for e in EXPECTED]


def test_a_recording_is_cut_and_brought_to_a_rate(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "prompt_tokens": 5, "output_tokens": 5} for at in (0, 1, 2, 8)]
    file = str(written(tmp_path, "trace.jsonl", *map(json.dumps, rows)))

    def times(**changes: float) -> list[float]:
        return [each.at for each in Demand(arrivals=file, **changes).queries()]

    assert times() == [0, 1, 2, 8]
    assert times(requests=3) == [0, 1, 2] and times(duration=2) == [0, 1]
    assert times(rate=3) == [0, 0.125, 0.25, 1] and times(rate=3, duration=1) == [0, 0.125, 0.25]
    assert times(rate=math.inf) == [0] * 4
    for wrong in ({"rate": -1}, {"burstiness": 2}):
        with pytest.raises(ChairliftError, match=r"rate is -1|leave one of them out"):
            times(**wrong)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("x", "Expecting value"),
        ("[1]", "not an object"),
        ('{"timestamp": 1}', "it has timestamp, and needs one of"),
        ('{"timestamp": "soon", "prompt_tokens": 5, "output_tokens": 5}', "its time is 'soon'"),
        ('{"timestamp": null, "prompt_tokens": 5, "output_tokens": 5}', "its time is None"),
        ('{"timestamp": NaN, "prompt_tokens": 5, "output_tokens": 5}', "its time is nan"),
        ('{"timestamp": 1, "prompt_tokens": -5, "output_tokens": 5}', "prompt_tokens is -5"),
        ('{"timestamp": 1, "prompt_tokens": 5, "output_tokens": "x"}', "output_tokens is 'x'"),
    ],
)
def test_an_invalid_arrival_is_named_by_its_line(line: str, reason: str, tmp_path: Path) -> None:
    good = '{"timestamp": 1, "prompt_tokens": 5, "output_tokens": 5}'
    with pytest.raises(ChairliftError, match=f"line 3, is not a valid arrival: .*{reason}") as told:
        read_trace(written(tmp_path, "trace.jsonl", good, good, line))
    assert "\n" not in str(told.value)


def test_an_invalid_row_of_a_csv_is_named_too(tmp_path: Path) -> None:
    file = written(tmp_path, "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,10,20", "now,1,1")
    with pytest.raises(ChairliftError, match=r"t\.csv, line 3, is not a valid arrival: its time is 'now'"):
        read_trace(file)
    with pytest.raises(ChairliftError, match="holds no arrivals"):
        read_trace(written(tmp_path, "empty.csv", "TIMESTAMP,ContextTokens,GeneratedTokens"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ChairliftError, match="cannot be read"):
        read_trace(tmp_path / "bytes.jsonl")
