"""OpenTelemetry spans of requests, with vLLM's names (vllm/tracing/utils.py). Needs the extra `otel`."""

from typing import TYPE_CHECKING

from specdec.kernels.types.extras import lacking

if TYPE_CHECKING:
    from specdec.server.otel_traces import OtelTraces

_PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
}


def traces_to(endpoint: str | None) -> "OtelTraces | None":
    """Return what sends spans to a collector, None for no address.

    Args:
        endpoint: its address for OTLP over HTTP, such as http://localhost:4318/v1/traces.

    Raises:
        ValueError: packages are missing, or the address is none.
    """
    if endpoint is None:
        return None
    if problem := lacking("--otlp-traces-endpoint", "otel", _PACKAGES):
        raise ValueError(problem)
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}; it must begin with http:// or https://")
    from specdec.server.otel_traces import OtelTraces

    return OtelTraces(endpoint)
