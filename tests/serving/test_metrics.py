"""Metrics as a scraper reads them: the real registry, the real text, read back with Prometheus's own parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import timeit
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from chairlift.core.errors import SettingsError
from chairlift.core.settings import SchedulingSettings
from chairlift.serving.families import VLLM
from chairlift.serving.messages import Stats
from chairlift.serving.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
IDLE = Stats(0, 0, 100, 100, 0, 0, 0, 0, 0, 0)
Page = dict[str, dict[frozenset[tuple[str, str]], float]]


def read(text: bytes) -> Page:
    """Each sample's name, and its values by labels without the model's and the first replica's."""
    page: Page = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = frozenset(
                item for item in sample.labels.items() if item[0] != "model_name" and item != ("replica", "0")
            )
            assert sample.labels.get("model_name") in ("tiny", None)
            assert labels not in page.setdefault(sample.name, {}), f"{sample.name} twice"
            page[sample.name][labels] = sample.value
    return page


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return read(metrics.render()[0])[f"chairlift:{name}"][frozenset(labels.items())]


def totals(**counts: int) -> Stats:
    fields = dict.fromkeys(("submitted", "finished", "aborted", "rejected", "failed", "preemptions"), 0)
    return Stats(2, 3, 25, 100, **{**fields, **counts})


def serve_some(metrics: Metrics) -> None:
    """A request that ends well, one that is aborted in the queue, one that is refused, and three steps."""
    metrics.of_engine().engine_state(True)
    metrics.submitted(7, 1, 20)
    metrics.submitted(5, 2, None)
    metrics.of_engine().engine(totals(submitted=2))
    metrics.of_engine().engine(Stats(1, 1, 75, 100, 2, 0, 0, 0, 0, 0, 0.02, 12))
    told: dict[str, Any] = {"correlation": 0.5, "service": {"alice": 20.0, "bob": 7.5}}
    metrics.of_engine().engine(Stats(1, 0, 75, 100, 2, 0, 1, 0, 0, 3, 0.004, 1, **told))
    metrics.first_token(0.05)
    metrics.between_tokens(0.004)
    metrics.between_tokens(0.02)
    metrics.ended("stop", e2e=0.08, output_tokens=3, prompt_tokens=7, queue=0.01, prefill=0.04, decode=0.024)
    metrics.ended("abort", e2e=2.0, output_tokens=0, prompt_tokens=5, queue=None, prefill=None, decode=None)
    metrics.refused("queue_full")
    metrics.loop_lag(0.003)
    metrics.responded("/v1/models", 200, 0.002)
    metrics.responded("/v1/chat/completions", 429, 0.001)


def test_a_request_is_counted_and_timed() -> None:
    metrics = Metrics("tiny")
    serve_some(metrics)
    assert value(metrics, "prompt_tokens_total") == 7, "a prompt that was never computed does not count"
    assert value(metrics, "generation_tokens_total") == 3
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.04") == 0
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.06") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.005") == 1
    assert value(metrics, "request_time_per_output_token_seconds_sum") == pytest.approx(0.012)
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(2.08)
    assert value(metrics, "request_queue_time_seconds_count") == 1
    assert value(metrics, "request_inference_time_seconds_sum") == pytest.approx(0.064)
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "request_success_total", finished_reason="error") == 0
    assert value(metrics, "request_params_n_sum") == 3
    assert value(metrics, "request_params_max_tokens_count") == 1, "only where one was given"
    assert value(metrics, "requests_refused_total", reason="queue_full") == 1
    assert value(metrics, "requests_refused_total", reason="draining") == 0
    assert value(metrics, "http_requests_total", route="/v1/chat/completions", status="429") == 1
    assert value(metrics, "http_request_seconds_count", route="/v1/models") == 1


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    metrics = Metrics("tiny")
    metrics.ended("length", e2e=0.1, output_tokens=1, prompt_tokens=2, queue=0.0, prefill=0.1, decode=0.0)
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_decode_time_seconds_count") == 1


def test_the_engine_shows_its_last_state_and_every_step() -> None:
    metrics = Metrics("tiny")
    serve_some(metrics)
    assert value(metrics, "num_requests_running") == 1
    assert value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.25)
    assert value(metrics, "requests_submitted_total") == 2
    assert value(metrics, "requests_aborted_total") == 1
    assert value(metrics, "num_preemptions_total") == 3
    assert value(metrics, "iteration_tokens_total_sum") == 13
    assert value(metrics, "iteration_tokens_total_count") == 2, "a report without a step is no step"
    assert value(metrics, "step_seconds_sum") == pytest.approx(0.024)


def waiting(metrics: Metrics) -> dict[str, float]:
    """The queue by reason, where there is one."""
    found = read(metrics.render()[0])["chairlift:num_requests_waiting_by_reason"]
    assert len(found) == 5
    return {reason: number for [(_, reason)], number in found.items() if number}


def test_all_that_wait_wait_for_what_holds_up_the_first() -> None:
    metrics = Metrics("tiny")
    metrics.of_engine()
    assert waiting(metrics) == {}
    for reason, number in (("rows", 3), ("rows", 4), ("blocks", 5), ("tokens", 1), ("gate", 2)):
        metrics.of_engine().engine(Stats(1, number, 1, 1, 0, 0, 0, 0, 0, 0, blocked_by=reason))
        assert waiting(metrics) == {reason: number}
    metrics.of_engine().engine(Stats(1, 2, 1, 1, 0, 0, 0, 0, 0, 0))
    assert waiting(metrics) == {"next_step": 2}, "no step has looked at them yet"
    metrics.of_engine().engine(Stats(1, 2, 1, 1, 0, 0, 0, 0, 0, 0, blocked_by="rows"))
    metrics.of_engine().engine_state(False)
    assert waiting(metrics) == {}


def test_a_predictor_s_correlation_is_shown_while_it_is_known() -> None:
    metrics = Metrics("tiny")
    metrics.of_engine().engine(IDLE)
    assert "chairlift:predictor_rank_correlation" not in read(metrics.render()[0])
    metrics.of_engine().engine(msgspec.structs.replace(IDLE, correlation=-0.25))
    assert value(metrics, "predictor_rank_correlation") == -0.25
    metrics.of_engine().engine(IDLE)  # another engine, which knows nothing yet
    assert isnan(value(metrics, "predictor_rank_correlation"))


def test_a_tenant_s_service_is_shown_while_it_has_requests() -> None:
    metrics = Metrics("tiny")
    metrics.of_engine().engine(IDLE)
    assert "chairlift:tenant_service_tokens" not in read(metrics.render()[0])
    metrics.of_engine().engine(msgspec.structs.replace(IDLE, service={"alice": 20.0, "bob": 7.5}))
    metrics.of_engine().engine(msgspec.structs.replace(IDLE, service={"alice": 21.0}))
    assert value(metrics, "tenant_service_tokens", tenant="alice") == 21
    assert value(metrics, "tenant_service_tokens", tenant="bob") == 0
    metrics.of_engine().engine_state(False)
    assert value(metrics, "tenant_service_tokens", tenant="alice") == 0


def test_a_policy_shows_numbers_of_its_own() -> None:
    metrics = Metrics("tiny")
    metrics.of_engine().engine(IDLE)
    assert "chairlift:policy_stats" not in read(metrics.render()[0])
    metrics.of_engine().engine(msgspec.structs.replace(IDLE, policy={"bins": 3.0}))
    assert value(metrics, "policy_stats", stat="bins") == 3


def test_blocks_that_were_swapped_are_counted_each_way() -> None:
    metrics = Metrics("tiny")
    for out, back in ((8, 0), (8, 8), (12, 8), (2, 1)):  # the last is another engine
        metrics.of_engine().engine(msgspec.structs.replace(IDLE, swapped_out=out, swapped_in=back))
    assert value(metrics, "kv_blocks_swapped_out_total") == 14
    assert value(metrics, "kv_blocks_swapped_in_total") == 9


def test_a_block_that_nobody_holds_is_not_in_use_though_the_prefix_cache_keeps_it() -> None:
    metrics = Metrics("tiny")
    metrics.of_engine().engine(Stats(1, 0, 25, 100, 1, 0, 0, 0, 0, 0, cached_blocks=65))
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.1)
    assert value(metrics, "kv_cache_cached_perc") == pytest.approx(0.65)
    metrics.of_engine().engine(Stats(0, 0, 35, 100, 1, 0, 0, 0, 0, 0, cached_blocks=65))
    assert value(metrics, "kv_cache_usage_perc") == 0
    metrics.of_engine().engine_state(False)
    assert value(metrics, "kv_cache_cached_perc") == 0


def test_what_the_prefix_cache_does_is_counted_over_all_engines() -> None:
    metrics = Metrics("tiny", compat="vllm")
    fields = ("queried_tokens", "cached_tokens", "evicted_blocks", "copied_blocks", "from_host", "from_disk")
    for counts in ((200, 96, 3, 1, 2, 0), (300, 192, 4, 1, 2, 5), (100, 0, 0, 0, 1, 0)):  # the last is another engine
        metrics.of_engine().engine(msgspec.structs.replace(IDLE, **dict(zip(fields, counts, strict=True))))
    names = ("queries", "hits", "evictions", "copies")
    assert [value(metrics, f"prefix_cache_{name}_total") for name in names] == [400, 192, 4, 1]
    assert [value(metrics, "prefix_cache_returns_total", tier=tier) for tier in ("host", "disk")] == [3, 5]
    theirs = read(metrics.render()[0])
    engine = frozenset({("engine", "0")})
    assert [theirs[f"vllm:prefix_cache_{name}_total"][engine] for name in names[:2]] == [400, 192]


def test_how_requests_are_scheduled_is_shown() -> None:
    usual = {"policy": "fcfs", "batching": "continuous", "prefill": "chunked"}
    usual |= {"preemption": "recompute", "predictor": "history"}
    assert value(Metrics("tiny"), "scheduling_info", **usual) == 1
    chosen = Metrics("tiny", scheduling=SchedulingSettings(policy="fair", preemption="swap"))
    assert value(chosen, "scheduling_info", **{**usual, "policy": "fair", "preemption": "swap"}) == 1


def test_an_engine_that_starts_again_never_turns_a_counter_back() -> None:
    metrics = Metrics("tiny")
    seen = []
    for stats in (
        totals(submitted=10, finished=8, preemptions=1),
        totals(submitted=12, finished=9, preemptions=1),
        totals(),  # another engine
        totals(submitted=3, finished=1),
        totals(submitted=1),  # and another, with late first words
        totals(submitted=20, finished=19, failed=1),
    ):
        metrics.of_engine().engine(stats)
        seen.append([value(metrics, f"requests_{name}_total") for name in ("submitted", "finished", "failed")])
    # What an engine had not ended when it was lost has failed.
    assert seen == [[10, 8, 0], [12, 9, 0], [12, 9, 3], [15, 10, 3], [16, 10, 5], [35, 29, 6]]
    assert value(metrics, "num_preemptions_total") == 1


def test_coming_up_again_is_a_restart_and_coming_up_is_none() -> None:
    metrics = Metrics("tiny")
    assert metrics.of_engine() is metrics.of_engine()
    assert value(metrics, "engine_up") == 0
    for up, restarts in ((False, 0), (True, 0), (True, 0), (False, 0), (False, 0), (True, 1), (False, 1), (True, 2)):
        metrics.of_engine().engine_state(up)
        assert value(metrics, "engine_up") == up
        assert value(metrics, "engine_restarts_total") == restarts


def test_an_engine_that_is_down_runs_nothing() -> None:
    metrics = Metrics("tiny")
    metrics.of_engine().engine(totals())
    metrics.of_engine().engine_state(False)
    assert value(metrics, "num_requests_running") == value(metrics, "kv_cache_usage_perc") == 0


def test_the_text_is_what_every_prometheus_reads() -> None:
    metrics = Metrics("tiny")
    serve_some(metrics)
    text, content_type = metrics.render()
    assert b"vllm:" not in text, "unless asked for"
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"_created" not in text
    assert text.count(b"# TYPE chairlift:request_success_total counter") == 1


def test_a_registry_of_ones_own_is_rendered_whole() -> None:
    registry = CollectorRegistry()
    Gauge("room_temperature", "Degrees.", registry=registry).set(21)
    assert read(Metrics("tiny", registry=registry).render()[0])["room_temperature"] == {frozenset(): 21}


# ---- vLLM's names


def test_vllms_names_have_equal_values_and_its_labels() -> None:
    metrics = Metrics("tiny", compat="vllm")
    serve_some(metrics)
    page = read(metrics.render()[0])
    theirs = {name for name in page if name.startswith("vllm:")}
    for name in theirs - {name for name in theirs if "max_num_generation" in name}:
        for labels, number in page[name].items():
            assert ("engine", "0") in labels
            assert page[name.replace("vllm:", "chairlift:")][labels - {("engine", "0")}] == number, name
    assert {name.removeprefix("vllm:") for name in theirs} >= {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "prefix_cache_hits_total"),
        *("iteration_tokens_total_count", "request_max_num_generation_tokens_sum", "request_params_n_bucket"),
    }
    assert len({re.sub("_(total|sum|count|bucket)$", "", name) for name in theirs}) == len(VLLM)


@pytest.mark.parametrize(
    ("name", "first", "number"),
    [
        ("time_to_first_token_seconds", [0.001, 0.005, 0.01, 0.02], 22),
        ("inter_token_latency_seconds", [0.01, 0.025, 0.05, 0.075], 19),
        ("e2e_request_latency_seconds", [0.3, 0.5, 0.8, 1.0], 21),
        ("iteration_tokens_total", [1, 8, 16, 32], 13),
        ("request_prompt_tokens", [1, 2, 5, 10], 19),
    ],
)
def test_vllms_histograms_have_its_edges(name: str, first: list[float], number: int) -> None:
    metrics = Metrics("tiny", compat="vllm")
    serve_some(metrics)
    page = read(metrics.render()[0])
    buckets = {float(dict(labels)["le"]): count for labels, count in page[f"vllm:{name}_bucket"].items()}
    assert sorted(buckets)[:4] == first
    assert len(buckets) == number + 1, "and +Inf"
    assert buckets[float("inf")] == page[f"vllm:{name}_count"][frozenset({("engine", "0")})]


def test_an_unknown_compat_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingsError, match="'sglang': choose one of vllm"):
        Metrics("tiny", compat="sglang")


def test_two_engines_of_a_model_have_series_of_their_own_and_vllm_s_label() -> None:
    metrics = Metrics("tiny", compat="vllm")
    for replica, submitted in (("0", 3), ("1", 5)):
        metrics.of_engine(replica).engine(totals(submitted=submitted))
    assert value(metrics, "requests_submitted_total") == 3
    assert value(metrics, "requests_submitted_total", replica="1") == 5
    page = read(metrics.render()[0])
    assert page["vllm:num_requests_waiting"] == {frozenset({("engine", each)}): 3 for each in "01"}


# ---- several HTTP processes

WORKER = """
import sys
from test_metrics import IDLE, serve_some, totals
from chairlift.serving.metrics import Metrics
metrics = Metrics("tiny", compat="vllm")
match sys.argv[1]:
    case "first":
        metrics.of_engine().engine(IDLE)
        serve_some(metrics)
        metrics.of_engine().engine_state(False)
        metrics.of_engine().engine_state(True)
        metrics.of_engine().engine(totals(submitted=2, aborted=1, preemptions=3))
    case "second":  # it hears nothing of the engine but that it comes and goes
        for up in (True, False, True):
            metrics.of_engine().engine_state(up)
        metrics.first_token(3.0)
        metrics.refused("queue_full")
    case "replacement":  # of the first, with the engine still running
        metrics.of_engine().engine(totals(submitted=2, aborted=1, preemptions=3))
        metrics.of_engine().engine(totals(submitted=5, aborted=1, preemptions=3))
    case "scraped":
        sys.stdout.buffer.write(metrics.render()[0])
"""


def run_worker(role: str, folder: Path) -> bytes:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", WORKER, role], env=environment, capture_output=True, check=True).stdout


def test_one_process_answers_for_all(tmp_path: Path) -> None:
    run_worker("first", tmp_path)
    run_worker("second", tmp_path)
    page = read(run_worker("scraped", tmp_path))
    one: frozenset[tuple[str, str]] = frozenset()
    assert page["chairlift:generation_tokens_total"][one] == 4
    assert page["chairlift:time_to_first_token_seconds_count"][one] == 2
    assert page["chairlift:time_to_first_token_seconds_sum"][one] == pytest.approx(3.05)
    assert page["chairlift:requests_refused_total"][frozenset({("reason", "queue_full")})] == 2
    assert page["chairlift:requests_submitted_total"][one] == 4, "two of the engine that was lost, two of the next"
    assert page["chairlift:engine_restarts_total"][one] == 1, "though both saw it"
    assert page["chairlift:engine_up"] == {one: 1}, "one engine, not one for each process"
    assert len(page["chairlift:num_requests_waiting_by_reason"]) == 5
    assert page["chairlift:tenant_service_tokens"] == {frozenset({("tenant", name)}): 0 for name in ("alice", "bob")}
    assert list(page["chairlift:scheduling_info"].values()) == [1]
    assert page["vllm:generation_tokens_total"][frozenset({("engine", "0")})] == 4


def test_a_process_that_replaces_another_does_not_count_again(tmp_path: Path) -> None:
    run_worker("first", tmp_path)
    run_worker("replacement", tmp_path)
    page = read(run_worker("scraped", tmp_path))
    assert page["chairlift:requests_submitted_total"][frozenset()] == 7, "four of two engines, and three more"
    assert page["chairlift:num_requests_waiting"] == {frozenset(): 3}
    assert page["chairlift:num_requests_waiting_by_reason"][frozenset({("reason", "next_step")})] == 3


# ---- what it costs, and what is written about it


def test_a_token_costs_next_to_nothing() -> None:
    metrics = Metrics("tiny", compat="vllm")
    took = min(timeit.repeat(lambda: metrics.between_tokens(0.012), number=1000, repeat=5)) / 1000
    assert took < 50e-6, "3 us on a quiet machine"


def names_exposed() -> set[str]:
    metrics = Metrics("tiny")
    serve_some(metrics)
    metrics.of_engine().engine(
        msgspec.structs.replace(IDLE, policy={"bins": 1.0}, service={"alice": 1.0}, correlation=0.5)
    )
    return set(read(metrics.render()[0]))


def test_every_query_of_the_dashboard_asks_for_what_there_is() -> None:
    board: dict[str, Any] = json.loads((DOCS / "grafana" / "chairlift.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [variable["definition"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    asked = [re.findall(r"chairlift:\w+", query) for query in queries]
    assert all(asked)
    assert {name for names in asked for name in names} <= names_exposed()
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        *("Latency", "Throughput", "The batch", "Trouble"),
    ]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)


def test_the_table_names_every_metric_and_no_other() -> None:
    text = (DOCS / "metrics.md").read_text()
    written = set(re.findall(r"^\| `chairlift:(\w+)`", text, re.MULTILINE))
    exposed = {re.sub("_(sum|count|bucket)$", "", name.removeprefix("chairlift:")) for name in names_exposed()}
    assert written == exposed
    for name in VLLM:
        assert re.search(rf"`vllm:{name}(_total)?`", text), name
