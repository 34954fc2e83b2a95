"""Comparisons of scheduling settings: grids on a tiny real model, and the arithmetic of their bound."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chairlift.bench.compare import Comparison, cells_of
from chairlift.bench.compare_report import bounds, summarize, tables
from chairlift.bench.drive import request_of
from chairlift.core.batching import GATES
from chairlift.core.errors import ChairliftError
from chairlift.core.preemption import PREEMPTIONS
from chairlift.costs.floor import Bound, bound_of
from chairlift.traffic import mixes
from chairlift.traffic.arrivals import Demand
from chairlift.traffic.mixes import MIXES, Mix
from chairlift.traffic.query import Query
from mostly_long import mostly_long
from tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a context for long answers."""
    return str(make_tiny_model(tmp_path_factory.mktemp("compare") / "llama", max_position_embeddings=2048))


def made(name: str, **options: Any) -> Mix:
    demand = {key: options.pop(key) for key in ("requests", "seed", "rate", "arrivals", "duration") if key in options}
    return mixes.make(Demand(name, **demand), **options)


def compared(model: str, mix: Mix, axes: dict[str, list[str]], repeat: int = 1, **settings: Any) -> dict[str, Any]:
    comparison = Comparison(model, {"device": "cpu", **settings}, axes, mix, repeat=repeat)
    told: list[int] = []
    comparison.run(lambda _text: None, told.append)
    assert sum(told) == comparison.tokens
    summary = summarize(comparison)
    assert tables(summary).renderables
    found: dict[str, Any] = json.loads(json.dumps(summary))
    return found


def few(*lengths: int, **fields: Any) -> list[Query]:
    return [Query([3, 5, 7, 9], length, **fields) for length in lengths]


# ---- mixes


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_the_same_each_time_and_another_with_another_seed(name: str) -> None:
    assert made(name) == made(name) != made(name, seed=1)
    assert len(made(name, requests=20).queries) == 20


def test_the_mixes_are_what_their_names_say() -> None:
    lengths = Counter("short" if length < 10 else "long" if length > 500 else "?" for length in made("halves").outputs)
    assert lengths == {"short": 32, "long": 32}
    assert len(set(made("homogeneous").outputs)) == 1
    assert Counter(query.tenant for query in made("flood").queries) == {"loud": 500, "quiet": 5}
    assert sum(query.priority for query in made("priorities").queries) == 8
    assert {query.deadline for query in made("deadlines", deadline=3).queries} == {3, 6, 12, 24}
    *decodes, newcomer = made("longprompt").queries
    assert len(decodes) == 16 and newcomer.prompt_tokens == 2000 and newcomer.after_tokens


def test_in_the_tenants_mix_prompts_of_a_kind_share_a_prefix_and_lengths_depend_on_the_tenant() -> None:
    queries = made("tenants", requests=400).queries
    starts = {query.kind: {tuple(each.ids[:32]) for each in queries if each.kind == query.kind} for query in queries}
    assert len(starts) == 4 and all(len(found) == 1 for found in starts.values())
    mean = {
        (tenant, kind): sum(lengths) / len(lengths)
        for tenant in mixes.TENANTS
        for kind in mixes.KINDS
        if (lengths := [query.output_tokens for query in queries if (query.tenant, query.kind) == (tenant, kind)])
    }
    assert mean["cedar", "story"] > 2 * mean["amber", "story"] > 4 * mean["amber", "label"]


@pytest.mark.parametrize("name", [name for name, recipe in MIXES.items() if not recipe.lengths_are_known])
def test_a_hidden_length_reaches_nothing_but_the_oracle(name: str) -> None:
    mix = made(name)
    requests = [request_of(mix, number, 0.0) for number in range(len(mix.queries))]
    assert len({repr(request.params) for request in requests}) == 1
    assert requests[0].params.max_tokens == mix.cap > max(mix.outputs)
    assert [request.known_length for request in requests] == mix.outputs
    assert {request.endpoint for request in requests} <= {"", "chat", "completions"}


def test_lengths_can_be_known_or_hidden() -> None:
    mix = made("halves", lengths_are_known=False, cap=700)
    assert {mix.max_tokens(query) for query in mix.queries} == {700}
    told = made("tenants", lengths_are_known=True)
    assert [told.max_tokens(query) for query in told.queries] == told.outputs


def test_a_rehearsal_precedes_the_mix_and_has_the_same_kinds() -> None:
    mix = made("tenants", requests=40, rehearse=60, rate=10.0)
    assert len(mix.queries) == 40 and len(mix.rehearsal) == 60 and mix.queries[0].at == mix.rehearsal[0].at == 0
    starts = [{(query.kind, *query.ids[:32]) for query in queries} for queries in (mix.queries, mix.rehearsal)]
    assert starts[0] == starts[1]


def test_requests_are_sent_at_a_rate_or_as_recorded(tmp_path: Path) -> None:
    mix = made("tenants", requests=50, rate=10.0)
    assert not mix.is_at_once and 2 < mix.queries[-1].at < 10
    assert [query.output_tokens for query in mix.queries] == made("tenants", requests=50).outputs
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "prompt_tokens": 7, "output_tokens": 3}\n' * 2)
    recorded = made("halves", arrivals=str(trace))
    assert [(query.prompt_tokens, query.output_tokens, query.at) for query in recorded.queries] == [(7, 3, 0.0)] * 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere", {}, "there is no workload 'nowhere': use halves, "),
        ("halves", {"cap": 9}, "max_tokens is 9, less than the longest answer"),
        ("halves", {"rate": 0.0}, "the rate is 0.0"),
        ("halves", {"arrivals": "sometimes"}, "there are no arrivals 'sometimes'"),
        ("halves", {"rate": 1.0, "duration": 0.0}, "there is no request to run"),
    ],
)
def test_the_error_of_an_impossible_mix_says_why(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ChairliftError, match=message):
        made(name, **options)


# ---- the bound


def test_the_bound_by_hand() -> None:
    # Two batches of two last 8 passes each; 18 tokens in batches of two take 9.
    assert bound_of([1, 8, 1, 8], 2) == Bound(static=16, continuous=9)
    # The longest answer alone takes 10 passes, though all tokens would fit in 7.
    assert bound_of([10, 1, 1, 1], 2) == Bound(static=11, continuous=10)
    # Equal answers: nothing to gain.
    assert bound_of([5] * 6, 3) == Bound(static=10, continuous=10) and bound_of([5] * 6, 3).ratio == 1
    # A last batch that is not full.
    assert bound_of([3, 4, 5], 2) == Bound(static=9, continuous=6)


def cell(batching: str, policy: str, passes: int) -> dict[str, Any]:
    median = {"passes": passes, "output_tok_s": 100.0 / passes}
    return {"name": batching, "choices": {"batching": batching, "policy": policy}, "runs": [1], "median": median}


def test_the_share_of_the_bound_by_hand() -> None:
    mix = Mix("by hand", few(1, 8, 1, 8), 16, lengths_are_known=True)
    pairs = [cell("static", "fcfs", 16), cell("continuous", "fcfs", 10), cell("continuous", "sjf", 9)]
    [found] = bounds(pairs, mix, 2)
    assert found["passes"] == [16, 10] and found["least_passes"] == [16, 9]
    assert found["reached"] == 1.6 and found["bound"] == 16 / 9 and found["share"] == pytest.approx(0.9)
    late = Mix("late", few(1, 8, at=1.0), 16, lengths_are_known=True)
    assert list(bounds(pairs, late, 2)) == [], "the bound holds only if all requests are present from the start"


# ---- grids


def test_cells_are_named_by_what_differs() -> None:
    [alone] = cells_of({"batching": ["continuous"], "policy": ["fcfs"], "predictor": []})
    assert alone.name == "continuous" and alone.choices == {"batching": "continuous", "policy": "fcfs"}
    assert [each.name for each in cells_of({"batching": list(GATES), "policy": ["fcfs"]})] == list(GATES)
    guessing = cells_of({"policy": ["fcfs", "sjf"], "predictor": ["history", "oracle"]})
    assert [each.name for each in guessing] == ["fcfs", "sjf, history", "sjf, oracle"], "fcfs needs no predictor"
    with pytest.raises(ChairliftError, match="policy is 'luck': use one of fcfs"):
        cells_of({"policy": ["fcfs", "luck"]})


@pytest.mark.long
@pytest.mark.parametrize(("is_known", "overlap"), [(True, False), (False, True)])
def test_every_request_gets_exactly_its_hidden_length_in_every_cell(model: str, is_known: bool, overlap: bool) -> None:
    mix = Mix("few", few(1, 30, 2, 17, 40, 3, 9), 64, lengths_are_known=is_known)
    mix = replace(mix, rehearsal=few(4, 2))
    summary = compared(model, mix, {"batching": list(GATES)}, repeat=2, max_sequences=3, overlap=overlap)
    assert [each["name"] for each in summary["cells"]] == list(GATES)
    for cell in summary["cells"]:
        assert len(cell["runs"]) == 2
        for run in cell["runs"]:
            assert [request["tokens"] for request in run["requests"]] == mix.outputs
            assert len(run["steps"]["at"]) == run["metrics"]["passes"] >= max(mix.outputs)
            assert 0 < run["metrics"]["occupancy"] <= 1 and max(run["steps"]["sequences"]) == 3
            assert sum(run["steps"]["tokens"]) == sum(run["service"][""])
            check_slots(run, slots=3)
    assert summary["workload"]["max_tokens"] == (None if is_known else 64)
    [found] = summary["bounds"]
    assert found["reached"] > 1 and found["bound"] == bound_of(mix.outputs, 3).ratio
    if is_known:
        assert found["passes"][0] == found["least_passes"][0], "static batching takes exactly its bound"


def check_slots(run: dict[str, Any], slots: int) -> None:
    """Check that no two requests share a slot at a time, and that stays cover all tokens of a request."""
    taken: dict[int, list[tuple[float, float]]] = {}
    for request in run["requests"]:
        assert request["at"] <= request["stays"][0][1] <= request["first"] <= request["last"]
        for seat, began, ended in request["stays"]:
            assert ended > began
            taken.setdefault(seat, []).append((began, ended))
    assert set(taken) <= set(range(slots))
    for stays in taken.values():
        assert all(before[1] <= after[0] + 1e-5 for before, after in pairwise(sorted(stays)))


@pytest.mark.parametrize("overlap", mostly_long([True, False]))
@pytest.mark.parametrize("preemption", mostly_long(PREEMPTIONS))
def test_a_preempted_request_has_two_stays_and_its_full_length(model: str, preemption: str, overlap: bool) -> None:
    mix = Mix("tight", few(90, 100, 80, 95), 100, lengths_are_known=False)
    axes = {"batching": ["continuous"], "preemption": [preemption]}
    summary = compared(model, mix, axes, max_sequences=4, kv_tokens=256, overlap=overlap)
    [run] = summary["cells"][0]["runs"]
    assert [request["tokens"] for request in run["requests"]] == mix.outputs
    assert run["metrics"]["preemptions"] == sum(len(request["stays"]) - 1 for request in run["requests"]) > 0
    check_slots(run, slots=4)


@pytest.mark.long
def test_a_request_held_for_others_tokens_is_timed_from_its_submission(model: str) -> None:
    queries = [*few(20, 20), Query([2] * 100, 4, after_tokens=10)]
    mix = Mix("joins", queries, 32, lengths_are_known=False)
    summary = compared(model, mix, {"batching": list(GATES)}, max_sequences=3)
    for cell in summary["cells"]:
        *first, joined = cell["runs"][0]["requests"]
        assert joined["at"] > max(request["first"] for request in first)


def test_tenants_and_deadlines_are_reported_separately(model: str) -> None:
    queries = [*few(6, 6, 6, tenant="a", deadline=600.0), *few(6, tenant="b", deadline=0.0)]
    summary = compared(model, Mix("two", queries, 8, lengths_are_known=False), {"batching": ["continuous"]})
    [cell] = summary["cells"]
    assert cell["median"]["in_time"] == 0.75
    assert [cell["tenants"][name]["in_time"] for name in "ab"] == [1, 0]
    assert [cell["tenants"][name]["service"] for name in "ab"] == [30, 10]
    assert set(cell["runs"][0]["service"]) == {"a", "b"}


def test_a_mix_longer_than_the_context_is_refused(model: str) -> None:
    mix = Mix("long", [Query([1] * 1200, 1200)], 2048, lengths_are_known=False)
    with pytest.raises(ChairliftError, match="1200 prompt and 1200 output tokens, and the context holds 2048"):
        compared(model, mix, {"batching": ["continuous"]})


@pytest.mark.long
def test_a_predictor_that_has_learned_puts_short_answers_first(model: str) -> None:
    prompts = {"short": [11] * 40, "long": [12] * 40}
    queries = [Query(prompts[kind], {"short": 2, "long": 60}[kind], kind=kind) for kind in ["long", "short"] * 4]
    mix = Mix("two", queries, 64, lengths_are_known=False, rehearsal=queries * 5)
    axes = {"batching": ["continuous"], "policy": ["fcfs", "sjf"]}
    fcfs, sjf = compared(model, mix, axes, max_sequences=1)["cells"]
    ends = [[request["last"] for request in each["runs"][0]["requests"]] for each in (fcfs, sjf)]
    assert ends[0] == sorted(ends[0]), "in order of arrival"
    assert max(ends[1][1::2]) < min(ends[1][0::2]), "all short answers end before any long one"
    assert sjf["median"]["rank_correlation"] == pytest.approx(1) and "rank_correlation" not in fcfs["median"]


@pytest.mark.long
def test_naive_batches_have_their_own_row(model: str) -> None:
    pytest.importorskip("transformers")
    mix = Mix("few", few(3, 9, 4, 6), 16, lengths_are_known=True)
    settings = {"device": "cpu", "max_sequences": 2}
    comparison = Comparison(model, settings, {"batching": ["static"]}, mix, naive=True)
    comparison.run(lambda _text: None, lambda _count: None)
    ours, naive = summarize(comparison)["cells"]
    assert naive["name"] == "transformers-static" and not naive["unavailable"]
    assert [request["tokens"] for request in naive["runs"][0]["requests"]] == mix.outputs
    assert naive["median"]["passes"] == ours["median"]["passes"] == 15
    late = Mix("late", few(3, at=1.0), 16, lengths_are_known=True)
    with pytest.raises(ChairliftError, match="--naive submits all requests at once"):
        Comparison(model, settings, {"batching": ["static"]}, late, naive=True)


# ---- the command


def command(model: str, *more: str) -> list[str]:
    start = [sys.executable, "-m", "chairlift", "compare", "--model", model, "--device", "cpu"]
    return [*start, "--workload", "flood", "--requests", "12", "--max-sequences", "4", *more]


@pytest.mark.long
def test_the_command_writes_a_table_numbers_and_pictures(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, file = tmp_path / "pictures", tmp_path / "numbers.json"
    asked = command(model, "--output", str(folder), "--json", str(file))
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True)
    assert "flood: 12 requests" in done.stdout and "continuous" in done.stdout and "by tenant" in done.stdout
    names = ("throughput", "utilization", "seats", "latency", "fairness")
    for name in names:
        drawn = (folder / f"{name}.svg").read_text()
        assert "</svg>" in drawn and "continuous" in drawn
    summary = json.loads(file.read_text())
    assert summary == json.loads((folder / "numbers.json").read_text())
    assert [len(run["requests"]) for cell in summary["cells"] for run in cell["runs"]] == [12] * len(summary["cells"])


@pytest.mark.parametrize(
    "flags",
    [
        ("compare", "--output", "pictures"),
        pytest.param(("bench", "cache", "--trace", "x", "--plot", "a.svg"), marks=pytest.mark.long),
    ],
)
def test_without_matplotlib_pictures_are_refused_before_anything_is_measured(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    hide = "import sys; sys.modules['matplotlib'] = None; from chairlift import cli; cli.main()"
    asked = [sys.executable, "-c", hide, *flags]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith(f"error: {flags[-2]} draws with")
    assert "pip install 'chairlift[plots]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_choice_is_a_one_line_error(model: str) -> None:
    done = subprocess.run(command(model, "--policy", "luck"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: --policy is 'luck': use one of fcfs")


def test_a_tenant_alone_keeps_its_send_times() -> None:
    crowd, alone = made("flood", rate=50.0), made("flood", rate=50.0, only="quiet")
    first = next(query.at for query in crowd.queries if query.tenant == "quiet")
    assert [(query.prompt, pytest.approx(query.at)) for query in alone.queries] == [
        (query.prompt, query.at - first) for query in crowd.queries if query.tenant == "quiet"
    ]
    with pytest.raises(ChairliftError, match="no request is from tenant 'nobody': the tenants are loud, quiet"):
        made("flood", only="nobody")
