"""Families: the metric families of one HTTP process, made once and shared by all models and engines; and their page.

Several HTTP processes count into files in PROMETHEUS_MULTIPROC_DIR, and each of them can render the sum. The metrics
under vLLM's names are computed at each scrape and cost nothing per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from chairlift.core.errors import SettingsError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # every version of Prometheus reads it

# vLLM's bucket edges. Metrics adds finer ones, for small models on fast machines.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

# Metrics that vLLM also has, and its bucket edges where Chairlift has more.
VLLM: dict[str, Sequence[float] | None] = {
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions")),
    **dict.fromkeys(("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")),
    **dict.fromkeys(("request_success", "iteration_tokens_total", "time_to_first_token_seconds")),
    **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens")),
    **dict.fromkeys(("request_params_n", "request_params_max_tokens")),
    **dict.fromkeys(("inter_token_latency_seconds", "request_time_per_output_token_seconds"), PER_TOKEN),
    **dict.fromkeys(("e2e_request_latency_seconds", "request_queue_time_seconds"), REQUEST),
    **dict.fromkeys(("request_prefill_time_seconds", "request_decode_time_seconds"), REQUEST),
    "request_inference_time_seconds": REQUEST,
}
# vLLM's counts the longest of n answers, this one their sum: the same if n is 1.
_UNDER_ANOTHER_NAME = {"request_max_num_generation_tokens": "request_generation_tokens"}


def as_vllm(families: Iterable[Metric]) -> Iterator[Metric]:
    """Return the values under vLLM's names, labels and bucket edges."""
    ours = {family.name: family for family in families}
    for name, edges in VLLM.items():
        family = ours[f"chairlift:{_UNDER_ANOTHER_NAME.get(name, name)}"]
        copy = Metric(f"vllm:{name}", family.documentation, family.type)
        kept = None if edges is None else {*edges, float("inf")}
        for sample in family.samples:
            edge = sample.labels.get("le")
            # Buckets are cumulative: dropping an edge changes no other bucket.
            if kept is None or edge is None or float(edge) in kept:
                suffix = sample.name.removeprefix(family.name)
                labels = {name: text for name, text in sample.labels.items() if name != "replica"}
                engine = sample.labels.get("replica", "0")
                copy.add_sample(copy.name + suffix, {**labels, "engine": engine}, sample.value)
        yield copy


COMPAT: dict[str, Callable[[Iterable[Metric]], Iterator[Metric]]] = {"vllm": as_vllm}


class _Page(Collector):
    """All metrics of one scrape."""

    def __init__(self, source: Collector, compat: str | None) -> None:
        self._source = source
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        families = list(self._source.collect())
        for family in families:
            # _created samples add a third to the size, and Prometheus does not read them in this format.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield from families
        if self._compat is not None:
            yield from COMPAT[self._compat](families)


class Families:
    """Counters, gauges and histograms by name; every series has the label `model_name`."""

    def __init__(self, *, compat: str | None = None, registry: CollectorRegistry | None = None) -> None:
        if compat is not None and compat not in COMPAT:
            raise SettingsError(f"metrics compat is {compat!r}: choose one of {', '.join(COMPAT)}, or none")
        self.is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if self.is_shared and values.ValueClass is values.MutexValue:
            # prometheus_client chose memory at import, before the first process created the folder.
            values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        self._compat = compat
        self._registry = registry or CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a family of counters."""
        if name not in self._counters:
            given = ("model_name", *labels)
            self._counters[name] = Counter(f"chairlift:{name}", text, given, registry=self._registry)
        return self._counters[name]

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a family of gauges."""
        if name not in self._gauges:
            # Only the process that receives the statistics sets gauges, so the most recent value is the right one.
            self._gauges[name] = Gauge(
                f"chairlift:{name}",
                text,
                ("model_name", *labels),
                registry=self._registry,
                multiprocess_mode="mostrecent",
            )
        return self._gauges[name]

    def histogram(self, name: str, text: str, edges: Sequence[float], *labels: str) -> Histogram:
        """Return a family of histograms."""
        if name not in self._histograms:
            given = ("model_name", *labels)
            self._histograms[name] = Histogram(f"chairlift:{name}", text, given, buckets=edges, registry=self._registry)
        return self._histograms[name]

    def render(self) -> tuple[bytes, str]:
        """Return the metrics of all HTTP processes as text, and the content type."""
        source = self._registry
        # If the files were removed, render only this process's metrics.
        if self.is_shared and Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).is_dir():
            source = CollectorRegistry()
            MultiProcessCollector(source)  # type: ignore[no-untyped-call]
        return generate_latest(_Page(source, self._compat)), CONTENT_TYPE
