"""OpenTelemetry spans of requests, with vLLM's names (vllm/tracing/utils.py). Needs the extra `otel`."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

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
    # A module within a package that is missing may not be asked for.
    has_any = find_spec("opentelemetry") is not None
    if missing := [package for module, package in _PACKAGES.items() if not (has_any and find_spec(module))]:
        needs = f"--otlp-traces-endpoint needs {', '.join(missing)}"
        raise ValueError(f"{needs}; run: pip install 'specdec[otel]'")
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}; it must begin with http:// or https://")
    from specdec.server.otel_traces import OtelTraces

    return OtelTraces(endpoint)
