"""Metrics: the Prometheus metrics of one model's requests; docs/metrics.md has the table."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from chairlift.core.settings import SchedulingSettings
from chairlift.serving.engine_metrics import EngineMetrics
from chairlift.serving.families import FIRST_TOKEN, PER_TOKEN, REQUEST, Families

REASONS = ("stop", "length", "abort", "error")
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

_FINE_PER_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.0075, *PER_TOKEN[:1], 0.015, 0.02, *PER_TOKEN[1:])
_FINE_REQUEST = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *REQUEST)
_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """The metrics of one model in one HTTP process; each method records one kind of event.

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
        families: Families | None = None,
    ) -> None:
        self.families = families or Families(compat=compat, registry=registry)  # one process has one, for all models
        self._model = model
        self._engines: dict[str, EngineMetrics] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests that had a token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._n = self._histogram("request_params_n", "Answers per request.", (1, 2, 5, 10, 20))
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens, where given.", _TOKENS)
        self._request_prompt = self._histogram("request_prompt_tokens", "A request's prompt tokens.", _TOKENS)
        self._request_output = self._histogram("request_generation_tokens", "A request's output tokens.", _TOKENS)

        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self._itl = self._histogram("inter_token_latency_seconds", "From one token to the next.", _FINE_PER_TOKEN)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", _FINE_PER_TOKEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _FINE_REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission.", _FINE_REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token.", _FINE_REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token.", _FINE_REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", "Admission to last token.", _FINE_REQUEST)
        self._ended = self.families.counter(
            "request_success", "Requests that have ended, by reason.", "finished_reason"
        )
        self._refused = self.families.counter(
            "requests_refused", "Requests rejected before the engine, by reason.", "reason"
        )
        # A series must start at 0: a rate does not show the event with which a series appears.
        self._closed = self.families.counter(
            "connections_closed", "Connections closed by the server, by reason.", "reason"
        )
        for family, reasons in ((self._ended, REASONS), (self._refused, REFUSALS), (self._closed, CLOSED)):
            for reason in reasons:
                family.labels(model, reason)

        chosen = scheduling or SchedulingSettings()
        info = self.families.gauge("scheduling_info", "Scheduling settings as labels; always 1.", *CHOICES)
        info.labels(model, *(getattr(chosen, name) for name in CHOICES)).set(1)
        self._lag = self._histogram("event_loop_lag_seconds", "Delay of the HTTP process's event loop.", _LAG)
        self._http = self.families.counter("http_requests", "HTTP responses.", "route", "status")
        self._http_seconds = self.families.histogram(
            "http_request_seconds", "From an HTTP request to the last byte of its response.", _FINE_REQUEST, "route"
        )

    def of_engine(self, replica: str = "0") -> EngineMetrics:
        """Return the metrics of one of the model's engines."""
        if replica not in self._engines:
            self._engines[replica] = EngineMetrics(self.families, self._model, replica)
        return self._engines[replica]

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

    # ---- the HTTP process

    def loop_lag(self, seconds: float) -> None:
        """Record a delay of the event loop."""
        self._lag.observe(seconds)

    def responded(self, route: str, status: int, seconds: float) -> None:
        """Record an HTTP response; `route` is the template, never the raw path."""
        self._http.labels(self._model, route, status).inc()
        self._http_seconds.labels(self._model, route).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics of all models and all HTTP processes as text, and the content type."""
        return self.families.render()

    # ---- construction, with labels resolved once

    def _counter(self, name: str, text: str) -> Counter:
        return self.families.counter(name, text).labels(self._model)

    def _histogram(self, name: str, text: str, edges: Sequence[float]) -> Histogram:
        return self.families.histogram(name, text, edges).labels(self._model)
