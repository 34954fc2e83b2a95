"""EngineMetrics: the Prometheus metrics of one engine, with its replica's name as a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

from prometheus_client import Counter, Gauge, Histogram

from chairlift.core.drafting import MAX_DRAFTS
from chairlift.serving.families import Families
from chairlift.serving.messages import Stats

WAITS = ("rows", "blocks", "tokens", "gate")  # the scheduler's reasons not to admit the next request
NOT_PLANNED = "next_step"  # no reason: the requests arrived after the last step was planned
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class EngineMetrics:
    """Records the statistics and the state of one engine."""

    def __init__(self, families: Families, model: str, replica: str) -> None:
        self._families = families
        self._labels = labels = (model, replica)
        self._is_shared = families.is_shared
        self._up = self._has_been_up = self._hears_engine = False

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
            *(returns.labels(*labels, tier) for tier in ("host", "disk")),
            self._counter("kv_blocks_sent", "KV blocks sent to other engines and to the KV store."),
            self._counter("kv_blocks_received", "KV blocks received from other engines and from the KV store."),
            self._counter("spec_decode_num_drafts", "Checks of draft tokens: slices of more than a token in a decode."),
            *(family.labels(*labels, str(place + 1)) for family in drafts for place in range(MAX_DRAFTS)),
        )
        # With several processes, a replacement must not count again what its predecessor counted.
        self._totals: tuple[int, ...] | None = None if self._is_shared else (0,) * len(self._engine_counters)
        waits = self._gauges("num_requests_waiting_by_reason", "Sequences in the queue, by blocking reason.", "reason")
        self._waits = {reason: waits.labels(*labels, reason or NOT_PLANNED) for reason in ("", *WAITS)}
        self._wait = self._waits[""]
        # These three have no series until they have a value.
        self._correlations = self._gauges("predictor_rank_correlation", "Spearman's, of predicted and true lengths.")
        self._services = self._gauges("tenant_service_tokens", "A tenant's service under the fair policy.", "tenant")
        self._policies = self._gauges("policy_stats", "The scheduling policy's own numbers.", "stat")
        self._correlation: float | None = None
        self._service: Mapping[str, float] = {}
        self._policy: Mapping[str, float] = {}
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens in a step.", _STEP_TOKENS)
        self._step = self._histogram("step_seconds", "Time of a step.", _STEP)
        self._engine_up = self._gauge("engine_up", "1 while the engine is connected.")
        self._restarts = self._counter("engine_restarts", "Restarts of the engine.")
        self._moved = self._counter("requests_moved", "Requests without a token that went to another replica.")

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
            self._correlations.labels(*self._labels).set(nan if s.correlation is None else s.correlation)
        if s.service != self._service:
            self._set_changed(self._services, self._service, s.service)
            self._service = s.service
        if s.policy != self._policy:
            self._set_changed(self._policies, self._policy, s.policy)
            self._policy = s.policy
        counts = (s.submitted, s.finished, s.aborted, s.rejected, s.failed)  # in the order that _lose_engine expects
        cache = (s.queried_tokens, s.cached_tokens, s.evicted_blocks, s.copied_blocks, s.from_host, s.from_disk)
        moved = (s.sent_blocks, s.received_blocks)
        none = (0,) * MAX_DRAFTS
        drafts = (s.checks, *(s.drafted or none), *(s.accepted or none))
        totals = (*counts, s.preemptions, s.swapped_out, s.swapped_in, *cache, *moved, *drafts)
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
                gauges.labels(*self._labels, name).set(value)

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

    def moved(self) -> None:
        """Record a request that lost this engine before its first token and was sent to another."""
        self._moved.inc()

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

    # ---- construction, with labels resolved once

    def _family(self, name: str, text: str, *labels: str) -> Counter:
        return self._families.counter(name, text, "replica", *labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(name, text).labels(*self._labels)

    def _gauges(self, name: str, text: str, *labels: str) -> Gauge:
        return self._families.gauge(name, text, "replica", *labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._gauges(name, text).labels(*self._labels)

    def _histogram(self, name: str, text: str, edges: Sequence[float]) -> Histogram:
        return self._families.histogram(name, text, edges, "replica").labels(*self._labels)
