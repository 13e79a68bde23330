"""Prometheus metrics: vLLM's names and labels, and `specdec:` for what vLLM has no name for."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specdec.core.engine_stats import EngineStats
from specdec.core.metrics import (
    ADAPTER_COUNTERS,
    ADAPTER_LABELS,
    COUNTERS,
    GAUGES,
    PER_DEPTH,
    SOURCE_COUNTERS,
    SOURCE_LABELS,
    adapter_counts,
)
from specdec.core.outputs import RequestMetrics, RequestOutput
from specdec.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    # It needs the extra `otel`.
    from specdec.server.otel_traces import OtelSpan

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
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Clients may invent methods, and each would be a series of its own.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_LABELS = ("model_name", "engine")
_Family = CounterMetricFamily | GaugeMetricFamily


class ServerMetrics:
    """All metrics of a server, in a registry of their own.

    Args:
        model: value of the label `model_name`.
        max_model_len: largest bucket of the counts of tokens.
        cache: labels of `vllm:cache_config_info`, but for the number of blocks.
    """

    def __init__(self, model: str, max_model_len: int, cache: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
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
        self.request_longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest sample.", sizes
        )
        times = {
            "queue": "Time in the queue.",
            "prefill": "Time from the first step to the first token.",
            "decode": "Time from the first to the last token.",
            "inference": "Time from the first step to the last token.",
        }
        self.request_times = {
            name: self._histogram(f"vllm:request_{name}_time_seconds", text, _REQUEST) for name, text in times.items()
        }
        # Names and labels of prometheus-fastapi-instrumentator, as in vLLM.
        self._http = Counter(
            "http_requests", "Answered HTTP requests.", ("method", "status", "handler"), registry=self.registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Time of HTTP requests.", ("method", "handler"), registry=self.registry
        )
        self._refused = Counter(
            "specdec:http_requests_refused",
            "HTTP requests that failed, by status.",
            ("status",),
            registry=self.registry,
        )
        labels = (*_LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Finished requests.", labels, registry=self.registry)
        # There before the first, so that its increase is seen.
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)
        self._engine = _EngineCollector(self._labels, cache)
        self.registry.register(self._engine)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, _LABELS, registry=self.registry, buckets=buckets).labels(*self._labels)

    def finished(self, reason: str) -> None:
        """Count a finished sample."""
        self._success.labels(*self._labels, reason).inc()

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an HTTP request by its route; 499 is the status of one whose client went away."""
        known = method if method in _METHODS else "other"
        self._http.labels(known, f"{status // 100}xx", handler).inc()
        self._http_seconds.labels(known, handler).observe(seconds)
        if status >= 400:
            self._refused.labels(str(status)).inc()

    def page(self, stats: EngineStats | None, restarts: int) -> bytes:
        """Return all metrics in Prometheus' text format.

        Args:
            stats: what is known of the engine; None before it has told anything.
            restarts: how often its process was started again.
        """
        self._engine.stats, self._engine.restarts = stats, restarts
        return generate_latest(self.registry)


class RequestTimer:
    """Times of one request and counts of its tokens, which go into the metrics as it runs."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams, span: "OtelSpan | None") -> None:
        self._metrics, self._params, self._span = metrics, params, span
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        # Samples that have not ended, and seconds of all samples since the first token.
        self._running, self._spent = params.n, 0.0
        self._tokens = 0
        self._has_ended = False

    def saw(self, state: RequestOutput) -> None:
        """Count the tokens of a new state."""
        metrics, moment = self._metrics, time.perf_counter()
        total = sum(len(output.token_ids) for output in state.outputs)
        new = total - self._tokens
        if self._first is not None:
            self._spent += (moment - self._last) * self._running
        if self._first is None and new:
            self._first = moment
            metrics.first_token.observe(moment - self._began)
            metrics.prompt_tokens.inc(len(state.prompt_token_ids))
        elif new:
            metrics.inter_token.observe((moment - self._last) * self._running / new)
        elif state.choices is not None:
            # A request that scores gets no token.
            metrics.prompt_tokens.inc(len(state.prompt_token_ids))
        metrics.generation_tokens.inc(new)
        self._tokens, self._last = total, moment
        self._running = sum(output.finish_reason is None for output in state.outputs)
        if state.finished:
            self._end(state, moment)

    def end_early(self, reason: str) -> None:
        """Count a request that ends without a last state: "abort" for a client that has gone, "error" for a failure."""
        if not self._has_ended:
            self._has_ended = True
            for _ in range(self._params.n):
                self._metrics.finished(reason)

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
        metrics.request_longest.observe(max(len(output.token_ids) for output in state.outputs))
        if state.metrics is not None:
            self._observe_times(state.metrics)
        if self._first is not None and self._tokens > samples:
            metrics.per_token.observe(self._spent / (self._tokens - samples))
        for output in state.outputs:
            metrics.finished(output.finish_reason or "abort")

    def _observe_times(self, times: RequestMetrics) -> None:
        """Take the times of events that happened; a request that scores gets no token."""
        spans = {"queue": (times.queued_ts, times.scheduled_ts)}
        if times.first_token_ts:
            spans["prefill"] = (times.scheduled_ts, times.first_token_ts)
            spans["decode"] = (times.first_token_ts, times.last_token_ts)
            spans["inference"] = (times.scheduled_ts, times.last_token_ts)
        for name, (begin, end) in spans.items():
            if begin and end:
                self._metrics.request_times[name].observe(end - begin)


class _EngineCollector(Collector):
    """Metrics that the engine counts itself."""

    def __init__(self, labels: tuple[str, str], cache: Mapping[str, str]) -> None:
        self._labels, self._cache = labels, cache
        self.stats: EngineStats | None = None
        self.restarts = 0

    def collect(self) -> Iterator[Metric]:
        restarts, stats = [(self.restarts,)], self.stats
        yield self._family(CounterMetricFamily, "specdec:engine_restarts", "Starts after a failure.", restarts)
        if stats is None:
            return
        yield self._cache_config(stats.num_blocks)
        yield self._step_tokens(stats.steps_by_tokens)
        for kind, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (attribute, help) in figures.items():
                yield self._family(kind, name, help, [(getattr(stats, attribute),)])
        for name, (attribute, help) in ADAPTER_COUNTERS.items():
            rows = [(*own, getattr(trees, attribute)) for *own, trees in adapter_counts(stats)]
            yield self._family(CounterMetricFamily, name, help, rows, ADAPTER_LABELS)
        for name, (attribute, help) in SOURCE_COUNTERS.items():
            rows = [(source, getattr(known, attribute)) for source, known in stats.sources.items()]
            yield self._family(CounterMetricFamily, name, help, rows, SOURCE_LABELS)
        accepted = "Draft tokens that became output, by depth in the tree; position 0 is depth 1."
        rows = [(str(depth), count) for depth, count in enumerate(stats.accepted_per_depth)]
        yield self._family(CounterMetricFamily, PER_DEPTH, accepted, rows, ["position"])

    def _family(
        self, kind: type[_Family], name: str, help: str, rows: Iterable[Sequence[Any]], labels: Iterable[str] = ()
    ) -> Metric:
        """Return a metric with a value for each row, which has the values of further labels before it."""
        family = kind(name, help, labels=(*_LABELS, *labels))
        for *own, value in rows:
            family.add_metric((*self._labels, *own), value)
        return family

    def _cache_config(self, num_blocks: int) -> Metric:
        labels = {"engine": self._labels[1], "num_gpu_blocks": str(num_blocks), **self._cache}
        info = GaugeMetricFamily("vllm:cache_config_info", "Settings of the cache, as labels.", labels=tuple(labels))
        info.add_metric(tuple(labels.values()), 1)
        return info

    def _step_tokens(self, steps_by_tokens: Mapping[int, int]) -> Metric:
        help = "Tokens of a step, known ones and draft nodes."
        tokens = HistogramMetricFamily("vllm:iteration_tokens_total", help, labels=_LABELS)
        buckets = [
            (bound, sum(steps for size, steps in steps_by_tokens.items() if size <= float(bound)))
            for bound in (*map(floatToGoString, _STEP_TOKENS), "+Inf")
        ]
        total = sum(size * steps for size, steps in steps_by_tokens.items())
        tokens.add_metric(self._labels, buckets, total)
        return tokens


def _sizes(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    powers = (10**digits for digits in range(len(str(most))))
    return [step * power for power in powers for step in (1, 2, 5) if step * power <= most]
