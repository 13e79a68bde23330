"""A simulation, not a measurement: 1, 8 and 64 replicas under a recorded arrival trace, routed by prefix or in turn.

    python -m benchmarks.replicas

The trace is an excerpt of Mooncake's conversation trace (`traces/README.md`). N replicas get N copies of it, each with
prefixes of its own and begun at another place, and time is stretched so that all have the same load: half of what the
capacity model allows a replica with the trace's cached prefixes, and nearly all of it. Then all requests come at once,
with as many seats as the capacity model has, which shows what it leaves out.

Costs are those of an 8B Llama on a GPU, computed from its weights and the GPU's data sheet, with an assumed tau and c;
and those of the demo model that `benchmarks.simulate` has measured (`results/simulate.json`), for which all lengths are
divided by 16, and requests left out that then exceed its positions. The network between router and replicas (0.2 ms,
1 GB/s) is assumed. Attention over long prompts is taken to cost nothing beside the products.

Needs simpy (`pip install -e '.[simulate]'`).
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arrival_trace import TracedRequest
from benchmarks.capacity import Costs, cache_tokens, kv_bytes_per_token, roofline_costs
from benchmarks.recorded_trace import BLOCK, TRACE, read
from benchmarks.report import RESULTS, write
from benchmarks.simulated_replicas import Engine, figures, hit_share, job_seconds, jobs_of, simulate
from specdec.config import DEMO
from specdec.models.llama import read_llama_config
from specdec.scheduling.scheduler_config import SchedulerConfig

REPLICAS = (1, 8, 64)
POLICIES = ("prefix", "round robin")
# Loads as shares of what the capacity model allows, and requests that decode at once in it.
LOADS, ROWS = (0.5, 0.9), 8
# Seconds to a replica, and bytes per second: assumed.
NETWORK = (0.0002, 1e9)
# An 8B Llama in bfloat16 on a GPU of 80 GB: its data sheet, of which half is taken to be reached, and assumed drafts.
PARAMETERS, GPU_MEMORY, GPU_BANDWIDTH, GPU_FLOPS = 8.0e9, 72e9, 3.35e12 / 2, 0.99e15 / 2
GPU_BATCHES, GPU_TAU, GPU_C = (1, 2, 4, 8, 16, 32), 3.0, 1.3
GPU_KV_BYTES = kv_bytes_per_token(32, 8, 128, 2)
# The demo model's lengths over the trace's.
DEMO_SCALE = 16


def gpu_case() -> dict[str, Any]:
    """Return figures of the GPU."""
    trace = read()
    context = statistics.fmean(each.size + each.answer / 2 for each in trace)
    costs = roofline_costs(GPU_BATCHES, 2 * PARAMETERS, PARAMETERS, context * GPU_KV_BYTES, GPU_BANDWIDTH, GPU_FLOPS)
    ones = (1.0,) * len(GPU_BATCHES)
    costs = replace(costs, cycle=tuple(GPU_C * one for one in ones), tau=tuple(GPU_TAU * one for one in ones))
    engine = engine_of(cache_tokens(GPU_MEMORY, 2 * PARAMETERS, GPU_KV_BYTES), BLOCK)
    return case(trace, replace(costs, network=NETWORK), engine, GPU_KV_BYTES)


def demo_case() -> dict[str, Any]:
    """Return figures of the demo model, with the costs that were measured."""
    measured = json.loads((RESULTS / "simulate.json").read_text(encoding="utf-8"))
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in measured["costs"].items()
    }
    limit = read_llama_config(DEMO / "target").max_position
    trace = read(scale=DEMO_SCALE, longest=limit)
    tokens = measured["engine"]["capacity"] * measured["engine"].get("block", 16)
    found = case(
        trace,
        replace(Costs(**given), network=NETWORK),
        engine_of(tokens, BLOCK // DEMO_SCALE),
        measured["kv_bytes_per_token"],
    )
    return {"costs_measured_at": measured["commit"], "lengths_divided_by": DEMO_SCALE, **found}


def engine_of(tokens: int, block: int) -> Engine:
    """Return an engine with the default limits.

    Args:
        tokens: that its cache holds.
        block: tokens of a block.
    """
    limits = SchedulerConfig()
    budget = limits.max_num_batched_tokens
    return Engine(limits.max_num_seqs, budget, limits.prefill_stretch, tokens // block, block)


def case(trace: Sequence[TracedRequest], costs: Costs, engine: Engine, kv_bytes: int) -> dict[str, Any]:
    """Return a row of figures for each load, number of replicas and policy, and the capacity model beside them."""
    # What is cached depends little on the speed.
    jobs = jobs_of(trace, 1, 1.0)
    simulate(jobs, 1, costs, "prefix", engine)
    uncached = statistics.fmean(job.size - job.cached for job in jobs)
    kept = jobs_of(trace, 1, 1.0)
    simulate(kept, 1, costs, "prefix", replace(engine, capacity=sys.maxsize))
    answer = statistics.fmean(each.answer for each in trace)
    most = costs.requests_per_second(ROWS, uncached, answer)
    rate = len(trace) / trace[-1].at
    rows = []
    for load in LOADS:
        for num_replicas in REPLICAS:
            # One replica leaves no choice.
            for policy in POLICIES if num_replicas > 1 else POLICIES[:1]:
                jobs = jobs_of(trace, num_replicas, load * most / rate)
                busy = simulate(jobs, num_replicas, costs, policy, engine)
                row: dict[str, Any] = {"load": load, "replicas": num_replicas, "policy": policy}
                row |= {"prefix_hits": hit_share(jobs), "busy": round(busy, 3)}
                rows.append(row | figures([job_seconds(job) for job in jobs]))
                print(rows[-1], flush=True)
    served: dict[str, dict[str, float]] = {}
    for num_replicas in REPLICAS:
        jobs = jobs_of(trace, num_replicas, 1e6)
        simulate(jobs, num_replicas, costs, "prefix", replace(engine, seats=ROWS))
        own = statistics.fmean(job.size - job.cached for job in jobs)
        end = max(job.end for job in jobs)
        served[str(num_replicas)] = {
            "uncached_prompt_tokens": round(own, 1),
            "model_requests_per_s": round(num_replicas * costs.requests_per_second(ROWS, own, answer), 2),
            "simulated_requests_per_s": round(len(jobs) / end, 2),
        }
        print(served, flush=True)
    return {
        "requests": len(trace),
        "prompt_tokens": round(statistics.fmean(each.size for each in trace), 1),
        "answer_tokens": round(answer, 1),
        "recorded_requests_per_s": round(rate, 2),
        "decoding_at_once": ROWS,
        "prefix_hits_without_eviction": hit_share(kept),
        "uncached_prompt_tokens": round(uncached, 1),
        "model_requests_per_s": round(most, 2),
        "all_at_once": served,
        "kv_bytes_per_token": kv_bytes,
        "costs": asdict(costs),
        "engine": asdict(engine),
        "rows": rows,
    }


def main() -> None:
    found = {"demo": demo_case(), "assumed_gpu": gpu_case()}
    for each in found.values():
        table = Table(*each["rows"][0])
        for row in each["rows"]:
            table.add_row(*map(str, row.values()))
        Console(width=160).print(table)
    write("replicas", {"is_simulation": True, "trace": TRACE.name, **found})


if __name__ == "__main__":
    main()
