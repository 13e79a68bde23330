"""Spans sent by OpenTelemetry's package over HTTP, in batches from a thread of its own."""

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams


class OtelSpan:
    """The span of a prompt, whose attributes have vLLM's names."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def finish(self, state: RequestOutput, first_token: float | None, seconds: float) -> None:
        """Note the last state.

        Args:
            first_token: seconds to the first token, None if there was none.
            seconds: those of the whole request.
        """
        span = self._span
        span.set_attribute("gen_ai.usage.prompt_tokens", len(state.prompt_token_ids))
        span.set_attribute("gen_ai.usage.completion_tokens", sum(len(output.token_ids) for output in state.outputs))
        span.set_attribute("gen_ai.usage.num_sequences", len(state.outputs))
        span.set_attribute("gen_ai.latency.e2e", seconds)
        if first_token is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first_token)

    def end(self) -> None:
        """End the span, which was finished or not."""
        self._span.end()


class OtelTraces:
    """Sends spans to a collector.

    Args:
        endpoint: address for OTLP over HTTP.
    """

    def __init__(self, endpoint: str) -> None:
        # OTEL_SERVICE_NAME replaces the name.
        resource = Resource({"service.name": "specdec"}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("specdec")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, headers: Mapping[str, str], request_id: str, model: str, params: SamplingParams) -> OtelSpan:
        """Begin the span of a prompt, under that which the request's headers name, if any."""
        span = self._tracer.start_span("llm_request", self._propagator.extract(headers), SpanKind.SERVER)
        span.set_attribute("gen_ai.request.id", request_id)
        span.set_attribute("gen_ai.response.model", model)
        span.set_attribute("gen_ai.request.n", params.n)
        span.set_attribute("gen_ai.request.temperature", params.temperature)
        span.set_attribute("gen_ai.request.top_p", params.top_p)
        if params.max_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
        return OtelSpan(span)

    def close(self) -> None:
        """Send what is not sent yet."""
        self._provider.shutdown()
