"""Metrics: the server's Prometheus metrics; docs/metrics.md has the table.

Several HTTP processes count into files in PROMETHEUS_MULTIPROC_DIR, and each of them can render the sum. The metrics
under vLLM's names are computed at each scrape and cost nothing per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.errors import SettingsError
from chairlift.core.settings import SchedulingSettings
from chairlift.serving.messages import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # every version of Prometheus reads it
REASONS = ("stop", "length", "abort", "error")
WAITS = ("rows", "blocks", "tokens", "gate")  # the scheduler's reasons not to admit the next request
NOT_PLANNED = "next_step"  # no reason: the requests arrived after the last step was planned
CHOICES = ("policy", "batching", "prefill", "preemption", "predictor")
# Error codes of requests that would exceed a bound on memory.
OVERLOADED = ("too_many_bodies", "text_queue_full", "too_many_logprobs")
REFUSALS = (
    *OVERLOADED,
    "queue_full",
    "long_wait",
    "tenant_limit",
    "tenant_rate",
    "draining",
    "engine_down",
    "invalid",
    "timeout",
    "connections",
)
CLOSED = ("evicted", "no_head", "unread")  # reasons to close a connection

# vLLM's bucket edges. Chairlift adds finer ones below, for small models on fast machines.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FINE_PER_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.0075, *_PER_TOKEN[:1], 0.015, 0.02, *_PER_TOKEN[1:])
_FINE_REQUEST = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *_REQUEST)
_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

# Metrics that vLLM also has, and its bucket edges where Chairlift has more.
VLLM: dict[str, Sequence[float] | None] = {
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions")),
    **dict.fromkeys(("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")),
    **dict.fromkeys(("request_success", "iteration_tokens_total", "time_to_first_token_seconds")),
    **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens")),
    **dict.fromkeys(("request_params_n", "request_params_max_tokens")),
    **dict.fromkeys(("inter_token_latency_seconds", "request_time_per_output_token_seconds"), _PER_TOKEN),
    **dict.fromkeys(("e2e_request_latency_seconds", "request_queue_time_seconds"), _REQUEST),
    **dict.fromkeys(("request_prefill_time_seconds", "request_decode_time_seconds"), _REQUEST),
    "request_inference_time_seconds": _REQUEST,
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
                copy.add_sample(copy.name + suffix, {**sample.labels, "engine": "0"}, sample.value)
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


class Metrics:
    """The metrics of one HTTP process; each method records one kind of event.

    >>> metrics = Metrics("smollm2")
    >>> metrics.first_token(0.05)
    >>> b'chairlift:generation_tokens_total{model_name="smollm2"} 1.0' in metrics.render()[0]
    True
    """

    def __init__(
        self,
        model: str,
        *,
        compat: str | None = None,
        scheduling: SchedulingSettings | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        if compat is not None and compat not in COMPAT:
            raise SettingsError(f"metrics compat is {compat!r}: choose one of {', '.join(COMPAT)}, or none")
        self._model = model
        self._compat = compat
        self._registry = registry or CollectorRegistry()
        self._is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if self._is_shared and values.ValueClass is values.MutexValue:
            # prometheus_client chose memory at import, before the first process created the folder.
            values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        self._up = self._has_been_up = self._hears_engine = False

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests that had a token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._n = self._histogram("request_params_n", "Answers per request.", (1, 2, 5, 10, 20))
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens, where given.", _TOKENS)
        self._request_prompt = self._histogram("request_prompt_tokens", "A request's prompt tokens.", _TOKENS)
        self._request_output = self._histogram("request_generation_tokens", "A request's output tokens.", _TOKENS)

        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self._itl = self._histogram("inter_token_latency_seconds", "From one token to the next.", _FINE_PER_TOKEN)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", _FINE_PER_TOKEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _FINE_REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission.", _FINE_REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token.", _FINE_REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token.", _FINE_REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", "Admission to last token.", _FINE_REQUEST)
        self._ended = self._family("request_success", "Requests that have ended, by reason.", "finished_reason")
        self._refused = self._family("requests_refused", "Requests rejected before the engine, by reason.", "reason")
        # A series must start at 0: a rate does not show the event with which a series appears.
        self._closed = self._family("connections_closed", "Connections closed by the server, by reason.", "reason")
        for family, reasons in ((self._ended, REASONS), (self._refused, REFUSALS), (self._closed, CLOSED)):
            for reason in reasons:
                family.labels(model, reason)

        self._running = self._gauge("num_requests_running", "Sequences in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences in the queue.")
        self._kv = self._gauge("kv_cache_usage_perc", "Share of KV blocks that running sequences hold, 1 is all.")
        self._kv_cached = self._gauge("kv_cache_cached_perc", "Share of KV blocks that are only cached, 1 is all.")
        returns = self._family("prefix_cache_returns", "KV blocks copied back to the device, by tier.", "tier")
        drafts = (
            self._family("spec_decode_num_draft_tokens_per_pos", "Draft tokens checked, by position.", "position"),
            self._family("spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", "position"),
        )
        self._engine_counters = (
            self._counter("requests_submitted", "Requests that reached the engine."),
            self._counter("requests_finished", "Requests that the engine finished."),
            self._counter("requests_aborted", "Requests aborted by a disconnect or a timeout."),
            self._counter("requests_rejected", "Requests that the engine rejected."),
            self._counter("requests_failed", "Requests that ended in an error of the engine."),
            self._counter("num_preemptions", "Preemptions of sequences."),
            self._counter("kv_blocks_swapped_out", "KV blocks swapped out to host memory."),
            self._counter("kv_blocks_swapped_in", "KV blocks swapped in from host memory."),
            self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            self._counter("prefix_cache_evictions", "KV blocks evicted from the prefix cache."),
            self._counter("prefix_cache_copies", "KV blocks copied from the prefix cache for a partial hit."),
            *(returns.labels(model, tier) for tier in ("host", "disk")),
            self._counter("spec_decode_num_drafts", "Checks of draft tokens: slices of more than a token in a decode."),
            *(family.labels(model, str(place + 1)) for family in drafts for place in range(MAX_DRAFTS)),
        )
        # With several processes, a replacement must not count again what its predecessor counted.
        self._totals: tuple[int, ...] | None = None if self._is_shared else (0,) * len(self._engine_counters)
        waits = self._gauges("num_requests_waiting_by_reason", "Sequences in the queue, by blocking reason.", "reason")
        self._waits = {reason: waits.labels(model, reason or NOT_PLANNED) for reason in ("", *WAITS)}
        self._wait = self._waits[""]
        # These three have no series until they have a value.
        self._correlations = self._gauges("predictor_rank_correlation", "Spearman's, of predicted and true lengths.")
        self._services = self._gauges("tenant_service_tokens", "A tenant's service under the fair policy.", "tenant")
        self._policies = self._gauges("policy_stats", "The scheduling policy's own numbers.", "stat")
        self._correlation: float | None = None
        self._service: Mapping[str, float] = {}
        self._policy: Mapping[str, float] = {}
        chosen = scheduling or SchedulingSettings()
        info = self._gauges("scheduling_info", "Scheduling settings as labels; always 1.", *CHOICES)
        info.labels(model, *(getattr(chosen, name) for name in CHOICES)).set(1)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens in a step.", _STEP_TOKENS)
        self._step = self._histogram("step_seconds", "Time of a step.", _STEP)
        self._engine_up = self._gauge("engine_up", "1 while the engine is connected.")
        self._restarts = self._counter("engine_restarts", "Restarts of the engine.")

        self._lag = self._histogram("event_loop_lag_seconds", "Delay of the HTTP process's event loop.", _LAG)
        self._http = self._family("http_requests", "HTTP responses.", "route", "status")
        self._http_seconds = Histogram(
            "chairlift:http_request_seconds",
            "From an HTTP request to the last byte of its response.",
            ("model_name", "route"),
            buckets=_FINE_REQUEST,
            registry=self._registry,
        )

    # ---- a request

    def submitted(self, prompt_tokens: int, answers: int, max_tokens: int | None) -> None:
        """Record a request that is sent to the engine."""
        self._n.observe(answers)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def first_token(self, ttft: float) -> None:
        """Record the first token of an answer, `ttft` seconds after its request arrived; once per answer."""
        self._ttft.observe(ttft)
        self._generation_tokens.inc()

    def between_tokens(self, seconds: float) -> None:
        """Record a further token of an answer, `seconds` after the previous one."""
        self._itl.observe(seconds)
        self._generation_tokens.inc()

    def ended(
        self,
        reason: str,
        *,
        e2e: float,
        output_tokens: int,
        prompt_tokens: int,
        queue: float | None,
        prefill: float | None,
        decode: float | None,
    ) -> None:
        """Record the end of a request; times of phases that it did not reach are None."""
        self._ended.labels(self._model, reason).inc()
        self._e2e.observe(e2e)
        self._request_prompt.observe(prompt_tokens)
        self._request_output.observe(output_tokens)
        if queue is not None:
            self._queue.observe(queue)
        if prefill is not None:
            self._prompt_tokens.inc(prompt_tokens)
            self._prefill.observe(prefill)
            self._inference.observe(prefill + (decode or 0.0))
        if decode is not None:
            self._decode.observe(decode)
            if output_tokens > 1:
                self._tpot.observe(decode / (output_tokens - 1))

    def refused(self, reason: str) -> None:
        """Record a request that was rejected before it reached the engine."""
        self._refused.labels(self._model, reason).inc()

    def closed(self, reason: str) -> None:
        """Record a connection that the server closed."""
        self._closed.labels(self._model, reason).inc()

    # ---- the engine

    def engine(self, stats: Stats) -> None:
        """Record the engine's statistics, after a step or a change of its counts."""
        s = stats
        if not self._hears_engine:
            self._hears_engine = True
            for gauge in self._waits.values():  # with several processes, a gauge that was never set is not rendered
                gauge.set(0)
        self._running.set(s.running)
        self._waiting.set(s.waiting)
        total = s.total_blocks or 1
        self._kv.set((s.total_blocks - s.free_blocks - s.cached_blocks) / total)
        self._kv_cached.set(s.cached_blocks / total)
        if s.step_seconds:
            self._step.observe(s.step_seconds)
            self._step_tokens.observe(s.step_tokens)
        self._set_waiting_by_reason(s.waiting, s.blocked_by)
        if s.correlation != self._correlation:
            self._correlation = s.correlation
            self._correlations.labels(self._model).set(nan if s.correlation is None else s.correlation)
        if s.service != self._service:
            self._set_changed(self._services, self._service, s.service)
            self._service = s.service
        if s.policy != self._policy:
            self._set_changed(self._policies, self._policy, s.policy)
            self._policy = s.policy
        counts = (s.submitted, s.finished, s.aborted, s.rejected, s.failed)  # in the order that _lose_engine expects
        cache = (s.queried_tokens, s.cached_tokens, s.evicted_blocks, s.copied_blocks, s.from_host, s.from_disk)
        none = (0,) * MAX_DRAFTS
        drafts = (s.checks, *(s.drafted or none), *(s.accepted or none))
        totals = (*counts, s.preemptions, s.swapped_out, s.swapped_in, *cache, *drafts)
        if totals != self._totals:
            self._count_up(totals)

    def _set_waiting_by_reason(self, waiting: int, reason: str) -> None:
        """Set all waiting requests under the reason that blocks the next one."""
        before, self._wait = self._wait, self._waits.get(reason, self._waits[""])
        if before is not self._wait:
            before.set(0)
        self._wait.set(waiting)

    def _set_changed(self, gauges: Gauge, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        """Set the gauges with a changed value; one without a value, such as an idle tenant's, is 0."""
        for name in {**before, **now}:
            if (value := now.get(name, 0.0)) != before.get(name):
                gauges.labels(self._model, name).set(value)

    def engine_state(self, up: bool) -> None:
        """Record a start or an end of the engine."""
        self._engine_up.set(up)
        if not up:
            for gauge in (self._running, self._waiting, self._kv, self._kv_cached):
                gauge.set(0)
            self._set_waiting_by_reason(0, "")
            self._set_changed(self._services, self._service, {})
            self._service = {}
            self._lose_engine()
        # Of several processes, only the one that receives the statistics counts the restart.
        if up and not self._up and self._has_been_up and (self._hears_engine or not self._is_shared):
            self._restarts.inc()
        self._up = up
        self._has_been_up |= up

    def _lose_engine(self) -> None:
        """Count the requests that were live when the engine ended as failed; the next engine counts from 0."""
        if self._totals is not None:
            submitted, *ends = self._totals[:5]
            self._engine_counters[4].inc(submitted - sum(ends))
            self._totals = (0,) * len(self._totals)

    def _count_up(self, totals: tuple[int, ...]) -> None:
        if any(new < old for new, old in zip(totals, self._totals or totals, strict=True)):
            self._lose_engine()  # a new engine: its start was not reported
        before = totals if self._totals is None else self._totals
        for counter, new, old in zip(self._engine_counters, totals, before, strict=True):
            if new > old:
                counter.inc(new - old)
        self._totals = totals

    # ---- the HTTP process

    def loop_lag(self, seconds: float) -> None:
        """Record a delay of the event loop."""
        self._lag.observe(seconds)

    def responded(self, route: str, status: int, seconds: float) -> None:
        """Record an HTTP response; `route` is the template, never the raw path."""
        self._http.labels(self._model, route, status).inc()
        self._http_seconds.labels(self._model, route).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics of all HTTP processes as text, and the content type."""
        source = self._registry
        # If the files were removed, render only this process's metrics.
        if self._is_shared and Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).is_dir():
            source = CollectorRegistry()
            MultiProcessCollector(source)  # type: ignore[no-untyped-call]
        return generate_latest(_Page(source, self._compat)), CONTENT_TYPE

    # ---- construction, with labels resolved once

    def _family(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"chairlift:{name}", text, ("model_name", *labels), registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(name, text).labels(self._model)

    def _gauges(self, name: str, text: str, *labels: str) -> Gauge:
        # Only the process that receives the statistics sets gauges, so the most recent value is the right one.
        return Gauge(
            f"chairlift:{name}",
            text,
            ("model_name", *labels),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._gauges(name, text).labels(self._model)

    def _histogram(self, name: str, text: str, edges: Sequence[float]) -> Histogram:
        histogram = Histogram(f"chairlift:{name}", text, ("model_name",), buckets=edges, registry=self._registry)
        return histogram.labels(self._model)
