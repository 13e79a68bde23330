"""Counts and the state of an engine as metrics, by vLLM's names, and `specdec:` for what vLLM has no name for."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.core.engine_stats import EngineStats, TreeCount

# Per metric the field of `EngineStats`, and help.
GAUGES = {
    "vllm:num_requests_running": ("running", "Requests in the running batch."),
    "vllm:num_requests_waiting": ("waiting", "Requests waiting for a seat."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the cache's blocks that are held, from 0 to 1."),
    "specdec:num_requests_waiting_for_kv": ("waiting_for_kv", "Waiting requests whose blocks a connector fetches."),
    "specdec:step_tokens": ("step_tokens", "Tokens of the last step, known ones and draft nodes."),
}
COUNTERS = {
    "vllm:prefix_cache_queries": ("prefix_queries", "Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Tokens found in the prefix cache."),
    "vllm:external_prefix_cache_queries": (
        "external_prefix_queries",
        "Tokens that the prefix cache lacked and the connector was asked for.",
    ),
    "vllm:external_prefix_cache_hits": ("external_prefix_hits", "Tokens whose blocks the connector loaded."),
    "vllm:num_preemptions": ("preemptions", "Preemptions of running requests."),
    "vllm:spec_decode_num_drafts": ("trees_verified", "Draft trees verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafts_verified", "Draft nodes verified."),
    "vllm:spec_decode_num_accepted_tokens": ("drafts_accepted", "Draft tokens that became output."),
    "specdec:steps": ("steps", "Forward passes of the target."),
    "specdec:passes_wasted": ("passes_wasted", "Rows of passes launched ahead for requests that had ended."),
    "specdec:known_tokens": ("known_tokens", "Tokens of prompts and outputs that the target computed."),
    "specdec:draft_nodes_asked": ("drafts_asked", "Draft nodes of the largest trees allowed, in steps with drafts."),
    "specdec:draft_nodes_granted": ("drafts_granted", "Draft nodes that the scheduler granted."),
    "specdec:draft_seconds": ("draft_seconds", "Time of drafting."),
    "specdec:verify_seconds": ("verify_seconds", "Time of steps without drafting."),
    "specdec:tree_tokens": ("tree_tokens", "Output tokens of steps with a draft tree; per draft, this is tau."),
    "specdec:requests_queued": ("queued", "Requests that reached the engine; each sample of a prompt is one."),
    "specdec:requests_aborted": ("aborted", "Requests ended from outside."),
}
# A server counts them where answers leave it.
_GENERATED = "vllm:generation_tokens"
# Of each adapter, with and without one of the draft model: per metric the field of `TreeCount`, and help.
ADAPTER_COUNTERS = {
    "specdec:adapter_drafts": ("trees", "Draft trees verified of the requests with an adapter."),
    "specdec:adapter_tree_tokens": ("tokens", "Output tokens of steps with these trees; per draft, this is tau."),
}
ADAPTER_LABELS = ("lora_name", "draft_model")
# Of each draft source without a model: per metric the field of `SourceCount`, and help.
SOURCE_COUNTERS = {
    "specdec:draft_source_tokens": ("tokens", "Tokens that a draft source without a model knew, drafted or not."),
    "specdec:draft_source_right_tokens": ("right", "Those of them that became output."),
}
SOURCE_LABELS = ("source",)
PER_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Metric:
    """A figure of an engine, in the shape of vLLM's `LLM.get_metrics`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A count since the start."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A present value."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counts by position."""

    values: list[int]


def engine_metrics(stats: EngineStats, model: str) -> Iterator[Metric]:
    """Yield the metrics of an engine.

    Args:
        model: value of the label `model_name`.
    """
    labels = {"model_name": model, "engine": "0"}
    for name, (field, _) in GAUGES.items():
        yield Gauge(name, labels, getattr(stats, field))
    for name, (field, _) in COUNTERS.items():
        yield Counter(name, labels, getattr(stats, field))
    for *own, count in adapter_counts(stats):
        for name, (field, _) in ADAPTER_COUNTERS.items():
            yield Counter(name, {**labels, **dict(zip(ADAPTER_LABELS, own, strict=True))}, getattr(count, field))
    for source, known in stats.sources.items():
        for name, (field, _) in SOURCE_COUNTERS.items():
            yield Counter(name, {**labels, "source": source}, getattr(known, field))
    yield Counter(_GENERATED, labels, stats.generated_tokens)
    yield Vector(PER_DEPTH, labels, list(stats.accepted_per_depth))


def adapter_counts(stats: EngineStats) -> Iterator[tuple[str, str, TreeCount]]:
    """Yield values of `ADAPTER_LABELS` with their trees, as far as there are any."""
    for name, own in stats.adapters.items():
        for draft_model, count in (("plain", own.plain), ("adapted", own.adapted)):
            if count.trees:
                yield name, draft_model, count
