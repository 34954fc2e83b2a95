"""Traces: a span says what a request was, how it ended and which trace it belongs to."""

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from chairlift.serving.traces import Traces
from chairlift.text.outputs import Answer, RequestMetrics, RequestOutput


def test_a_request_becomes_a_span_in_its_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces("http://127.0.0.1:9/v1/traces", "a-model", exporter)
    output = RequestOutput(
        "r1", None, [1, 2, 3], [Answer(0, "ab", [7, 8], finish_reason="stop")], RequestMetrics(1.0, 1.5, 2.0, 3.0, 2)
    )
    caller = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    traces.record("/v1/completions", 200, 2.0, "name", caller, [output])
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "/v1/completions"
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.end_time - span.start_time == 2_000_000_000
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.latency.time_to_first_token"] == 1.0
    assert span.attributes["gen_ai.latency.time_in_queue"] == 0.5
