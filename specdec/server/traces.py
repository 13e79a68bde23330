"""OpenTelemetry spans of requests, with vLLM's names (vllm/tracing/utils.py). Needs the extra `otel`."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Protocol

from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams

_PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
}


class RequestSpan(Protocol):
    """The span of a prompt."""

    def finish(self, state: RequestOutput, first_token: float | None, seconds: float) -> None:
        """Note the last state.

        Args:
            first_token: seconds to the first token, None if there was none.
            seconds: those of the whole request.
        """
        ...

    def end(self) -> None:
        """End the span, which was finished or not."""
        ...


class Traces(Protocol):
    """Makes spans."""

    def start(self, headers: Mapping[str, str], request_id: str, model: str, params: SamplingParams) -> RequestSpan:
        """Begin the span of a prompt, under that which the request's headers name, if any."""
        ...

    def close(self) -> None:
        """Send what is not sent yet."""
        ...


def traces_to(endpoint: str | None) -> Traces | None:
    """Return what sends spans to a collector, None for no address.

    Args:
        endpoint: its address for OTLP over HTTP, such as http://localhost:4318/v1/traces.

    Raises:
        ValueError: packages are missing, or the address is none.
    """
    if endpoint is None:
        return None
    if missing := [package for module, package in _PACKAGES.items() if not _is_there(module)]:
        needs = f"--otlp-traces-endpoint needs {', '.join(missing)}"
        raise ValueError(f"{needs}; run: pip install 'specdec[otel]'")
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}; it must begin with http:// or https://")
    from specdec.server.otel_traces import OtelTraces

    return OtelTraces(endpoint)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
