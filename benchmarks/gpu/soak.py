"""Run drawn traffic on the demo with CUDA graphs: device memory stays flat, and no graph is captured after start.

A stage of `benchmarks.gpu.day`. Rounds of `benchmarks.soak`, each with its own drawn batch, lengths of prompts and of
outputs, which also set the sizes of the trees, as the tokens of a step are few. Temperatures, parameters, preemptions
and aborts are drawn in each. Between rounds the draft head is replaced now and then. One run for each kind of trees:
those of coupled sampling, and drawn ones, whose graphs hold draft probabilities.
"""

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu.stage import Stage
from benchmarks.report import read_prompts, resident_mib
from benchmarks.soak import Traffic, soak
from specdec import LLM, DraftShape

RULES = ("coupled", "rejection")
# Share of a run after which memory may not grow.
WARM_UP = 0.25
# Growth allowed, for fragmentation in torch's allocator.
GROWTH_MIB = {"allocated_mib": 2, "reserved_mib": 64}


@dataclass(frozen=True)
class Sizes:
    """Traffic and engine of a run.

    Attributes:
        seconds: of traffic with each rule, at most.
        requests: of a round.
        outstanding, prompts, outputs: limits of a round's traffic, of which each draws one.
        updates: how often the draft head is replaced.
        engine: keywords of `LLM`.
    """

    seconds: float
    requests: int
    outstanding: tuple[int, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: int
    engine: dict[str, Any]


FULL = Sizes(
    seconds=220,
    requests=192,
    outstanding=(1, 4, 16, 48),
    prompts=(6, 60, 400, 900),
    outputs=(8, 24, 96),
    updates=4,
    engine={
        "max_model_len": 1024,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 512,
        "kv_cache_memory": 48 << 20,
    },
)
TINY = Sizes(
    seconds=6,
    requests=3,
    outstanding=(1, 2),
    prompts=(6,),
    outputs=(8,),
    updates=1,
    engine={
        "dtype": "float32",
        "shape": DraftShape(2, 2, 4),
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "kv_cache_memory": 1 << 20,
    },
)


def run(stage: Stage) -> None:
    sizes = TINY if stage.rehearse else FULL
    stage.table = Table("rule", "rounds", "requests", "steps", "captured", "updates", "allocated grew", "reserved grew")
    runs = stage.figures["runs"] = []
    for number, rule in enumerate(RULES):
        # The rules share the remaining time equally, including the start of their engines.
        until = time.monotonic() + stage.seconds_left / (len(RULES) - number)
        figures = run_rule(rule, sizes, stage.device, until)
        runs.append(figures)
        stage.failures += [f"{rule}: {failure}" for failure in failures_of(figures)]
        names = ("requests", "steps", "captured_in_traffic", "updates", "allocated_mib_grew", "reserved_mib_grew")
        stage.table.add_row(rule, str(len(figures["rounds"])), *(str(figures[name]) for name in names))


def run_rule(rule: str, sizes: Sizes, device: torch.device, until: float) -> dict[str, Any]:
    """Run rounds until their time is over, or `until` of `time.monotonic`, and return what they did to memory."""
    chance, rounds = random.Random(rule), list[dict[str, Any]]()
    with LLM(
        draft="eagle3",
        verify=rule,
        device=str(device),
        kernels="triton",
        adaptive_drafts=False,
        prefill_stretch=0,
        scheduling_policy="priority",
        watermark=0.0,
        **sizes.engine,
    ) as llm:
        longest = max(sizes.prompts)
        text = [*chain.from_iterable(llm.chat_prompt(turns) for turns in read_prompts("sgd-eval"))]
        texts = [text[start : start + longest] for start in range(0, len(text) - longest, longest)]
        start, updates = time.monotonic(), 0
        seconds = min(sizes.seconds, until - start)
        at_start = captures(llm, device)
        while not rounds or time.monotonic() < start + seconds:
            traffic = Traffic(*(chance.choice(each) for each in (sizes.outstanding, sizes.prompts, sizes.outputs)))
            before = captures(llm, device)
            soak(llm, texts, sizes.requests, chance.randrange(1 << 32), traffic=traffic)
            captured = captures(llm, device) - before
            # Evenly over the time.
            due = time.monotonic() - start >= seconds * (updates + 1) / (sizes.updates + 1)
            if due and updates < sizes.updates:
                assert llm.config.draft is not None
                llm.update_draft(llm.config.draft)
                updates += 1
            rounds.append({"seconds": round(time.monotonic() - start, 1), "captured": captured, **vars(traffic)})
            rounds[-1] |= memory(device)
            print(rounds[-1], flush=True)
        stats = llm.stats()
        return {
            "rule": rule,
            "requests": stats.queued,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "drafts_verified": stats.drafts_verified,
            "updates": updates,
            "captured_at_start": at_start,
            "captured_in_traffic": sum(each["captured"] for each in rounds),
            "captured_at_end": captures(llm, device),
            **{f"{name}_grew": growth(rounds, name, WARM_UP * seconds) for name in GROWTH_MIB},
            "rounds": rounds,
        }


def captures(llm: LLM, device: torch.device) -> int:
    """Return how many CUDA graphs the engine has captured so far; a CPU has none."""
    worker: Any = llm.engine.worker
    return int(worker.graphs.num_captures) if device.type == "cuda" else 0


def memory(device: torch.device) -> dict[str, float]:
    """Return MiB of the device that torch has handed out and that it holds, and of this process."""
    # Samples of a prompt know each other, so it is the collector that frees them.
    gc.collect()
    on_device = (0, 0)
    if device.type == "cuda":
        on_device = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    allocated, reserved = (round(size / 2**20, 2) for size in on_device)
    return {"allocated_mib": allocated, "reserved_mib": reserved, "resident_mib": round(resident_mib(), 1)}


def growth(rounds: Sequence[dict[str, Any]], name: str, settled: float) -> float | None:
    """Return by how much a figure has grown after `settled` seconds; None if no round ended after them."""
    before = [each[name] for each in rounds if each["seconds"] < settled] or [rounds[0][name]]
    after = [each[name] for each in rounds if each["seconds"] >= settled]
    return round(max(0.0, max(after) - max(before)), 2) if after else None


def failures_of(figures: dict[str, Any]) -> list[str]:
    """Return the reasons why a run fails."""
    failures = []
    if figures["captured_in_traffic"]:
        failures.append(f"{figures['captured_in_traffic']} CUDA graphs were captured after start")
    if not figures["drafts_verified"]:
        failures.append("nothing was drafted")
    for name, limit in GROWTH_MIB.items():
        grew = figures[f"{name}_grew"]
        if grew is None or grew > limit:
            failures.append(f"{name} grew by {grew}, where {limit} is allowed after {WARM_UP:.0%} of the time")
    return failures
