"""A simulation, not a measurement: 1, 8 and 64 replicas under a recorded arrival trace, routed by prefix or in turn.

    python -m benchmarks.simulate

First the costs of a replica are measured on this machine: steps with and without drafts at several batch sizes, prompt
tokens, and what a request costs outside the engine. Then the trace is sent to a real server with one replica, and to
the simulated one with these costs; the difference is what the model gets wrong. Costs are measured before and after,
because other programs may use the machine. Then 1, 8 and 64 replicas are simulated, each with its own copy of the
trace, so that all have the same load: half of what the capacity model allows, and nearly all of it. The same is done
with the costs of an 8B Llama on a GPU, which are computed from its weights and the GPU's data sheet. These, tau and c
there, and the network between router and replicas (0.2 ms, 1 GB/s) are assumed, not measured.

Needs simpy (`pip install -e '.[simulate]'`).
"""

import argparse
import asyncio
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.arrival_trace import TRACE, Arrival, read
from benchmarks.capacity import Costs, cache_tokens, kv_bytes_per_token, roofline_costs
from benchmarks.report import read_prompts, write
from benchmarks.serving import server
from benchmarks.simulated_replicas import BLOCK, Engine, Job, job_seconds, jobs_of, simulate
from specdec import LLM, SamplingParams
from specdec.config import DEMO
from specdec.core.outputs import SpeculationStats
from specdec.models.llama import read_llama_config
from specdec.scheduling.scheduler_config import SchedulerConfig

BATCHES = (1, 2, 4, 8, 16)
REPLICAS = (1, 8, 64)
POLICIES = ("prefix", "round robin")
CACHE_BYTES = 1 << 30
# Seconds to a replica, and bytes per second: assumed.
NETWORK = (0.0002, 1e9)
# Tokens of prompts and outputs with which steps are timed; the trace's means are near.
PROMPT, NEW_TOKENS = 640, 48
# Requests that decode at once, for the capacity model.
ROWS = 8
# An 8B Llama in bfloat16 on a GPU of 80 GB: its data sheet, of which half is taken to be reached, and assumed drafts.
PARAMETERS, GPU_MEMORY, GPU_BANDWIDTH, GPU_FLOPS = 8.0e9, 72e9, 3.35e12 / 2, 0.99e15 / 2
GPU_KV_BYTES = kv_bytes_per_token(32, 8, 128, 2)
GPU_TAU, GPU_C = 3.0, 1.3
# Loads as shares of what the capacity model allows; the first is the real server's too.
LOADS = (0.5, 0.9)


def cut(tokens: Sequence[int], start: int, size: int) -> list[int]:
    """Return a piece of a text that begins anew at its end."""
    return [tokens[(start + index) % len(tokens)] for index in range(size)]


def _seconds(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, SpeculationStats]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - began, SpeculationStats.total(output.stats for output in outputs)


class Calibration:
    """Costs of an engine of the demo model, measured in rounds; without those outside the engine.

    Attributes:
        tokens: a text.
    """

    def __init__(self, threads: int) -> None:
        self._engines = {"plain": LLM(draft=None, threads=threads), "drafting": LLM(threads=threads)}
        texts = ["\n".join(turn["content"] for turn in messages) for messages in read_prompts("sgd-eval")]
        tokenizer = self._engines["plain"].tokenizer
        assert tokenizer is not None
        self.tokens = [token for text in texts for token in tokenizer.encode(text)]
        self._steps: dict[tuple[str, int], list[float]] = {}
        self._taus: dict[int, list[float]] = {}
        self._token: list[float] = []

    def measure(self) -> None:
        """Add a round."""
        for batch in BATCHES:
            prompts = [cut(self.tokens, 997 * (batch + index), PROMPT) for index in range(batch)]
            for name, llm in self._engines.items():
                # From the second time on, the prompts are cached.
                _seconds(llm, prompts, 1)
                short, _ = _seconds(llm, prompts, 1)
                long, stats = _seconds(llm, prompts, 1 + NEW_TOKENS)
                tau = stats.tau if name == "drafting" else 1.0
                self._steps.setdefault((name, batch), []).append((long - short) / (NEW_TOKENS / tau))
                if name == "drafting":
                    self._taus.setdefault(batch, []).append(tau)
        for name, llm in self._engines.items():
            start = 331 * len(self._token) + len(name)
            few, _ = _seconds(llm, [cut(self.tokens, start, 256)], 1)
            many, _ = _seconds(llm, [cut(self.tokens, start + 50, 1024)], 1)
            self._token.append((many - few) / 768)

    def costs(self) -> Costs:
        """Return the means over all rounds."""
        mean = {key: statistics.fmean(values) for key, values in self._steps.items()}
        return Costs(
            BATCHES,
            tuple(mean["plain", batch] for batch in BATCHES),
            tuple(mean["drafting", batch] / mean["plain", batch] for batch in BATCHES),
            tuple(statistics.fmean(self._taus[batch]) for batch in BATCHES),
            statistics.fmean(self._token),
        )


async def _ask(client: AsyncOpenAI, prompt: list[int], max_tokens: int) -> tuple[float, float]:
    """Return the moments of the first and the last event of a streamed answer."""
    parts = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    first = 0.0
    async for _ in parts:
        first = first or time.perf_counter()
    return first, time.perf_counter()


async def replay(
    port: int, trace: Sequence[Arrival], tokens: Sequence[int]
) -> tuple[float, list[tuple[float, float]], float]:
    """Send a trace to a server.

    Returns:
        Seconds of a request of one token; per request of the trace the seconds to the first and to the last token; the
        share of prompt tokens found in the cache.
    """

    async def one(client: AsyncOpenAI, index: int, each: Arrival, began: float) -> tuple[float, float]:
        prompt = cut(tokens, 5003 * each.group, each.prefix) + cut(tokens, 89 * index + 7, each.question)
        await asyncio.sleep(began + each.at - time.perf_counter())
        first, end = await _ask(client, prompt, each.answer)
        return first - began - each.at, end - began - each.at

    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        waits = list[float]()
        for index in range(24):
            began = time.perf_counter()
            await _ask(client, cut(tokens, 31 * index, 16), 1)
            waits.append(time.perf_counter() - began)
        before = cache_counts(port)
        began = time.perf_counter() + 0.5
        times = await asyncio.gather(*(one(client, index, each, began) for index, each in enumerate(trace)))
    queries, hits = (after - first for after, first in zip(cache_counts(port), before, strict=True))
    return statistics.median(waits), times, round(hits / queries, 3)


def cache_counts(port: int) -> tuple[float, float]:
    """Return the prompt tokens that a server has looked up in its cache, and found there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    found = [
        re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (.*)$", text, re.MULTILINE) for name in ("queries", "hits")
    ]
    return float(found[0][0]), float(found[1][0])


def figures(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return milliseconds: mean, median and nine in ten of the times to the first and to the last token."""
    found: dict[str, float] = {}
    for name, values in zip(("first", "last"), zip(*times, strict=True), strict=True):
        found[f"{name}_ms_mean"] = round(1000 * statistics.fmean(values), 1)
        found[f"{name}_ms_median"] = round(1000 * statistics.median(values), 1)
        found[f"{name}_ms_nine_in_ten"] = round(1000 * statistics.quantiles(values, n=10)[-1], 1)
    return found


def many_replicas(
    trace: Sequence[Arrival], costs: Costs, engine: Engine
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Simulate all numbers of replicas, policies and loads.

    Returns:
        A row of figures of each, and what the capacity model says beside what one simulated replica reaches.
    """
    # What is cached depends little on the speed.
    jobs = jobs_of(trace, 1, 1.0)
    simulate(jobs, 1, costs, "prefix", engine)
    uncached = statistics.fmean(job.size - job.cached for job in jobs)
    answer = statistics.fmean(each.answer for each in trace)
    most = costs.requests_per_second(ROWS, uncached, answer)
    rate = len(trace) / trace[-1].at
    rows = []
    for load in LOADS:
        for num_replicas in REPLICAS:
            for policy in POLICIES:
                jobs = jobs_of(trace, num_replicas, load * most / rate)
                busy = simulate(jobs, num_replicas, costs, policy, engine)
                row: dict[str, Any] = {"load": load, "replicas": num_replicas, "policy": policy}
                row |= {
                    "prefix_hits": hit_share(jobs),
                    "busy": round(busy, 3),
                    **figures([job_seconds(job) for job in jobs]),
                }
                rows.append(row)
    jobs = jobs_of(trace, 1, 1e6)
    simulate(jobs, 1, costs, "prefix", replace(engine, seats=ROWS))
    return rows, {
        "decoding_at_once": ROWS,
        "uncached_prompt_tokens": round(uncached, 1),
        "answer_tokens": round(answer, 1),
        "model_requests_per_s": round(most, 2),
        "simulated_requests_per_s": round(len(trace) / max(job.end for job in jobs), 2),
    }


def hit_share(jobs: Sequence[Job]) -> float:
    """Return the share of prompt tokens that were found in a cache."""
    return round(sum(job.cached for job in jobs) / sum(job.size for job in jobs), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trace = read()
    rate = len(trace) / trace[-1].at
    answer = statistics.fmean(each.answer for each in trace)
    calibration = Calibration(args.threads)
    calibration.measure()

    model = read_llama_config(DEMO / "target")
    kv_bytes = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, 2)
    limits = SchedulerConfig()
    engine = Engine(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.prefill_stretch,
        cache_tokens(CACHE_BYTES, 0, kv_bytes) // BLOCK,
    )
    # What is cached does not depend on the speed, as one replica's cache holds the trace.
    jobs = jobs_of(trace, 1, 1.0)
    simulate(jobs, 1, calibration.costs(), "prefix", engine)
    uncached = statistics.fmean(job.size - job.cached for job in jobs)
    speed = LOADS[0] * calibration.costs().requests_per_second(ROWS, uncached, answer) / rate

    command = [sys.executable, "-m", "specdec", "serve", "--threads", str(args.threads)]
    with server(command) as port:
        slower = [replace(each, at=each.at / speed) for each in trace]
        wait, real, hits = asyncio.run(replay(port, slower, calibration.tokens))
    calibration.measure()
    costs = calibration.costs()
    costs = replace(costs, overhead=max(0.0, wait - costs.step(0, 16)))
    jobs = jobs_of(trace, 1, speed)
    simulate(jobs, 1, costs, "prefix", engine)
    found, wanted = figures([job_seconds(job) for job in jobs]), figures(real)
    found["prefix_hits"], wanted["prefix_hits"] = hit_share(jobs), hits
    check = {
        name: {"real": wanted[name], "simulated": found[name], "ratio": round(found[name] / wanted[name], 3)}
        for name in found
    }

    costs = replace(costs, network=NETWORK)
    rows, capacity = many_replicas(trace, costs, engine)
    gpu_engine = replace(engine, capacity=cache_tokens(GPU_MEMORY, 2 * PARAMETERS, GPU_KV_BYTES) // BLOCK)
    gpu = roofline_costs(BATCHES, 2 * PARAMETERS, PARAMETERS, PROMPT * GPU_KV_BYTES, GPU_BANDWIDTH, GPU_FLOPS)
    gpu = replace(gpu, cycle=(GPU_C,) * len(BATCHES), tau=(GPU_TAU,) * len(BATCHES), network=NETWORK)
    gpu_rows, gpu_capacity = many_replicas(trace, gpu, gpu_engine)
    _show(check, rows + gpu_rows)
    write(
        "simulate",
        {
            "is_simulation": True,
            "trace": TRACE.name,
            "requests": len(trace),
            "costs": asdict(costs),
            "engine": asdict(engine),
            "kv_bytes_per_token": kv_bytes,
            "speed_of_one_replica": round(speed, 3),
            "one_replica": check,
            "capacity": capacity,
            "rows": rows,
            "assumed_gpu": {
                "costs": asdict(gpu),
                "engine": asdict(gpu_engine),
                "kv_bytes_per_token": GPU_KV_BYTES,
                "capacity": gpu_capacity,
                "rows": gpu_rows,
            },
        },
    )


def _show(check: dict[str, dict[str, float]], rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    table = Table("one replica", "real", "simulated", "ratio")
    for name, each in check.items():
        table.add_row(name, *(f"{value:.2f}" for value in each.values()))
    console.print(table)
    console.width = 160
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
