"""One simulated replica beside a real server, under a drawn arrival trace.

    python -m benchmarks.simulate

First the costs of a replica are measured on this machine: steps with and without drafts at several batch sizes, prompt
tokens, and what a request costs outside the engine. Then the trace is sent to a real server with one replica, and to
the simulated one with these costs; the difference is what the model gets wrong. Costs are measured before and after,
because other programs may use the machine. `benchmarks.replicas` simulates many replicas with these costs.

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

import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.arrival_trace import TRACE, Arrival, read, traced
from benchmarks.capacity import Costs, cache_tokens, kv_bytes_per_token
from benchmarks.report import read_prompts, write
from benchmarks.serving import server
from benchmarks.simulated_replicas import Engine, figures, hit_share, job_seconds, jobs_of, simulate
from specdec import LLM, SamplingParams
from specdec.config import DEMO
from specdec.core.outputs import SpeculationStats
from specdec.models.llama import read_llama_config
from specdec.scheduling.scheduler_config import SchedulerConfig

BATCHES = (1, 2, 4, 8, 16)
CACHE_BYTES, BLOCK = 1 << 30, 16
# Tokens of prompts and outputs with which steps are timed; the trace's means are near.
PROMPT, NEW_TOKENS = 640, 48
# Requests that decode at once, for the capacity model, and the load as a share of what that allows.
ROWS, LOAD = 8, 0.5


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
    requests = traced(trace, BLOCK)
    jobs = jobs_of(requests, 1, 1.0)
    simulate(jobs, 1, calibration.costs(), "prefix", engine)
    uncached = statistics.fmean(job.size - job.cached for job in jobs)
    speed = LOAD * calibration.costs().requests_per_second(ROWS, uncached, answer) / rate

    command = [sys.executable, "-m", "specdec", "serve", "--threads", str(args.threads)]
    with server(command) as port:
        slower = [replace(each, at=each.at / speed) for each in trace]
        wait, real, hits = asyncio.run(replay(port, slower, calibration.tokens))
    calibration.measure()
    costs = calibration.costs()
    costs = replace(costs, overhead=max(0.0, wait - costs.step(0, 16)))
    jobs = jobs_of(requests, 1, speed)
    simulate(jobs, 1, costs, "prefix", engine)
    found, wanted = figures([job_seconds(job) for job in jobs]), figures(real)
    found["prefix_hits"], wanted["prefix_hits"] = hit_share(jobs), hits
    check = {
        name: {"real": wanted[name], "simulated": found[name], "ratio": round(found[name] / wanted[name], 3)}
        for name in found
    }

    _show(check)
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
        },
    )


def _show(check: dict[str, dict[str, float]]) -> None:
    table = Table("one replica", "real", "simulated", "ratio")
    for name, each in check.items():
        table.add_row(name, *(f"{value:.2f}" for value in each.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
