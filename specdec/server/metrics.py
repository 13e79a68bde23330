"""Prometheus metrics: vLLM's names and labels, and `specdec:` for what vLLM has no name for."""

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.core.engine_stats import EngineStats
from specdec.core.metrics import ADAPTER_COUNTERS, ADAPTER_LABELS, COUNTERS, GAUGES, PER_DEPTH, adapter_counts
from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.server.traces import RequestSpan

# Buckets are vLLM's, so that its dashboards fit.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_SAMPLES = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")


class ServerMetrics:
    """All metrics of a server, in a registry of their own.

    Args:
        model: value of the label `model_name`.
        max_model_len: largest bucket of the counts of tokens.
    """

    def __init__(self, model: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = (model, "0")
        sizes = _sizes(max_model_len)
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that got their first token."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN)
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between outputs of a request, per token.", _PER_TOKEN
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _PER_TOKEN
        )
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "Time of a whole request.", _REQUEST)
        self.request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self.request_generation = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", sizes
        )
        self.request_n = self._histogram("vllm:request_params_n", "Parameter n of a request.", _SAMPLES)
        self.request_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Parameter max_tokens of a request.", sizes
        )
        labels = (*_LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Finished requests.", labels, registry=self.registry)
        self._engine = _EngineCollector(self._labels)
        self.registry.register(self._engine)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, _LABELS, registry=self.registry, buckets=buckets).labels(*self._labels)

    def finished(self, reason: str) -> None:
        """Count a finished sample."""
        self._success.labels(*self._labels, reason).inc()

    def page(self, stats: EngineStats | None) -> bytes:
        """Return all metrics in Prometheus' text format; without those of the engine while it does not run."""
        self._engine.stats = stats
        return generate_latest(self.registry)


class RequestTimer:
    """Times of one request and counts of its tokens, which go into the metrics as it runs."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams, span: RequestSpan | None) -> None:
        self._metrics, self._params, self._span = metrics, params, span
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0
        self._has_ended = False

    def saw(self, state: RequestOutput) -> None:
        """Count the tokens of a new state."""
        metrics, moment = self._metrics, time.perf_counter()
        total = sum(len(output.token_ids) for output in state.outputs)
        new = total - self._tokens
        if self._first is None and new:
            self._first = moment
            metrics.first_token.observe(moment - self._began)
            metrics.prompt_tokens.inc(len(state.prompt_token_ids))
        elif new:
            metrics.inter_token.observe((moment - self._last) * len(state.outputs) / new)
        elif state.choices is not None:
            # A request that scores gets no token.
            metrics.prompt_tokens.inc(len(state.prompt_token_ids))
        metrics.generation_tokens.inc(new)
        self._tokens, self._last = total, moment
        if state.finished:
            self._end(state, moment)

    def abort(self) -> None:
        """Count a request whose client has gone, unless it has finished."""
        if not self._has_ended:
            self._has_ended = True
            for _ in range(self._params.n):
                self._metrics.finished("abort")

    def close(self) -> None:
        """End the request's span, however the request ended."""
        if self._span is not None:
            self._span.end()

    def _end(self, state: RequestOutput, moment: float) -> None:
        self._has_ended = True
        if self._span is not None:
            first = None if self._first is None else self._first - self._began
            self._span.finish(state, first, moment - self._began)
        metrics, samples = self._metrics, len(state.outputs)
        metrics.request_n.observe(samples)
        if self._params.max_tokens is not None:
            metrics.request_max_tokens.observe(self._params.max_tokens)
        metrics.end_to_end.observe(moment - self._began)
        metrics.request_prompt.observe(len(state.prompt_token_ids))
        metrics.request_generation.observe(self._tokens)
        if self._first is not None and self._tokens > samples:
            metrics.per_token.observe((moment - self._first) * samples / (self._tokens - samples))
        for output in state.outputs:
            metrics.finished(output.finish_reason or "abort")


class _EngineCollector(Collector):
    """Metrics that the engine counts itself."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels = labels
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, (attribute, help) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help, labels=_LABELS)
            gauge.add_metric(self._labels, getattr(stats, attribute))
            yield gauge
        for name, (attribute, help) in COUNTERS.items():
            counter = CounterMetricFamily(name, help, labels=_LABELS)
            counter.add_metric(self._labels, getattr(stats, attribute))
            yield counter
        for name, (attribute, help) in ADAPTER_COUNTERS.items():
            counter = CounterMetricFamily(name, help, labels=(*_LABELS, *ADAPTER_LABELS))
            for *own, trees in adapter_counts(stats):
                counter.add_metric((*self._labels, *own), getattr(trees, attribute))
            yield counter
        accepted = "Draft tokens that became output, by depth in the tree; position 0 is depth 1."
        depths = CounterMetricFamily(PER_DEPTH, accepted, labels=(*_LABELS, "position"))
        for depth, count in enumerate(stats.accepted_per_depth):
            depths.add_metric((*self._labels, str(depth)), count)
        yield depths


def _sizes(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    sizes: list[float] = []
    power = 1
    while power <= most:
        sizes += [step * power for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return sizes
