"""Traces: one OpenTelemetry span per request (pip install 'chairlift[otel]')."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from chairlift.core.errors import SettingsError
from chairlift.text.outputs import RequestOutput


class Traces:
    """Sends spans to a collector, in the background; the names are OpenTelemetry's conventions for generative AI."""

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise SettingsError(
                f"traces need OpenTelemetry, and {error.name} is not installed: pip install 'chairlift[otel]'"
            ) from None
        self._model = model
        self._parent = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "chairlift"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("chairlift")

    def record(
        self, route: str, status: int, seconds: float, id: str, headers: Mapping[str, str], outputs: list[RequestOutput]
    ) -> None:
        """Record the span of an ended request, as a child of the trace that its headers name, if any."""
        end = time.time_ns()
        span = self._tracer.start_span(
            route, context=self._parent.extract(headers), start_time=end - int(seconds * 1e9)
        )
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("gen_ai.request.model", self._model)
        span.set_attribute("gen_ai.request.id", id)
        if outputs:
            answers = [answer for output in outputs for answer in output.outputs]
            prompt = sum(len(output.prompt_token_ids) for output in outputs)
            span.set_attribute("gen_ai.usage.input_tokens", prompt)
            span.set_attribute("gen_ai.usage.output_tokens", sum(output.metrics.output_tokens for output in outputs))
            span.set_attribute("gen_ai.response.finish_reasons", [str(answer.finish_reason) for answer in answers])
            metrics = outputs[0].metrics
            if metrics.ttft is not None:
                span.set_attribute("gen_ai.latency.time_to_first_token", metrics.ttft)
            if metrics.started is not None:
                span.set_attribute("gen_ai.latency.time_in_queue", metrics.started - metrics.arrival)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
