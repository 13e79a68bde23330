"""Spans at a collector that stands in for a real one, and logs as JSON."""

import gzip
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specdec.server.json_log import JsonFormatter
from specdec.server.traces import traces_to
from tests.specdec.server.running import PATIENCE, Served

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        is_packed = self.headers.get("Content-Encoding") == "gzip"
        body = ExportTraceServiceRequest.FromString(gzip.decompress(raw) if is_packed else raw)
        self.server.spans += [s for r in body.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def test_each_prompt_has_a_span(engine: Served, collector: Collector) -> None:
    """Finished or refused, and under the client's span if it names one."""
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with engine.again(otlp_traces_endpoint=endpoint) as server:
        body = {"prompt": ["a", "bc"], "max_tokens": 3, "ignore_eos": True, "temperature": 0.5, "n": 2}
        server.send("POST", "/v1/completions", body, {"traceparent": PARENT, "X-Request-Id": "mine"})
        assert server.send("POST", "/v1/completions", {"prompt": [10**6]})[0] == 400
    # Spans are sent at the end of the server at the latest.
    assert {span.name for span in collector.spans} == {"llm_request"}
    first, second, refused = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert [span.trace_id.hex() for span in (first, second)] == [PARENT.split("-")[1]] * 2
    assert first.parent_span_id.hex() == PARENT.split("-")[2]
    assert refused.trace_id != first.trace_id
    found = [_attributes(span) for span in (first, second, refused)]
    assert "gen_ai.latency.e2e" not in found[2]
    for own in found[:2]:
        assert own["gen_ai.request.id"].startswith("cmpl-mine-")
        assert own["gen_ai.response.model"] == "tiny"
        assert (own["gen_ai.request.n"], own["gen_ai.usage.num_sequences"]) == (2, 2)
        assert (own["gen_ai.request.max_tokens"], own["gen_ai.usage.completion_tokens"]) == (3, 6)
        assert (own["gen_ai.request.temperature"], own["gen_ai.request.top_p"]) == (0.5, 1)
        assert own["gen_ai.usage.prompt_tokens"] >= 1
        assert 0 < own["gen_ai.latency.time_to_first_token"] <= own["gen_ai.latency.e2e"]


def _attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_invalid_addresses_are_told() -> None:
    with pytest.raises(ValueError, match="must begin with http"):
        traces_to("localhost:4318")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.types.extras.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs opentelemetry-sdk, .*; run: pip install 'specdec\[otel\]'"):
        traces_to("http://localhost:4318/v1/traces")


def test_the_log_as_json_has_the_request(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    found, end = list[logging.LogRecord](), time.monotonic() + PATIENCE
    with caplog.at_level(logging.INFO, "specdec.server.gate"):
        server.send("GET", "/version", None, {"X-Request-Id": "mine-7"})
        # It is written behind the answer.
        while not found and time.monotonic() < end:
            time.sleep(0.01)
            found = [record for record in caplog.records if "mine-7" in record.getMessage()]
    (line,) = [json.loads(JsonFormatter().format(record)) for record in found]
    assert line["request_id"] == "mine-7"
    assert (line["method"], line["path"], line["status"]) == ("GET", "/version", 200)
    assert line["level"] == "INFO"
    assert line["seconds"] > 0
