"""20,000 short requests of every kind on a cache too small for them: nothing is lost, and nothing grows.

    python -m benchmarks.soak

Prompts of 1 to 60 tokens, in part with common beginnings, outputs of 1 to 12, random parameters, priorities, salts and
aborts, also from within a step. All along, each request ends once and by a reason, all blocks are accounted for, and
at the end free. Resident memory is sampled every 500 requests, and what of it the heap has handed out, which tells a
leak from fragmentation. Asked: no growth beyond 2 % after the first 2,000. In bfloat16 a CPU's oneDNN compiles kernels
for each row count it meets and keeps up to 1,024, which fill later than that; so float32 is the default.
"""

import argparse
import gc
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from benchmarks.report import in_use_mib, read_prompts, resident_mib, write
from specdec import LLM, SamplingParams
from specdec.core.engine_stats import EngineStats
from specdec.core.request import Request
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.upload import Packet
from specdec.scheduling.integrity import check_scheduler

# Requests in a row that are alike in how much they grow: many that grow at once are what preempts.
PHASE = 64
ABORT_BETWEEN_STEPS = 0.1
ABORT_WITHIN_STEP = 0.1


@dataclass(frozen=True)
class Traffic:
    """Limits of what is drawn.

    Attributes:
        outstanding: requests at once.
        prompt, output: tokens of a request, 6 and 8 or more.
    """

    outstanding: int = 48
    prompt: int = 60
    output: int = 12


@dataclass
class Report:
    """Outcome of a soak.

    Attributes:
        reasons: how many requests ended by each `finish_reason`.
        stats: of the engine, at the end.
        aborted_within: requests aborted from within a step.
        resident_mib, in_use_mib: of this process and of its heap, after so many requests.
    """

    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    stats: EngineStats = field(default_factory=EngineStats)
    aborted_within: int = 0
    resident_mib: dict[int, float] = field(default_factory=dict)
    in_use_mib: dict[int, float] = field(default_factory=dict)


class AbortingDrafter:
    """A drafter that now and then aborts a request, usually a running one, in the middle of a step."""

    def __init__(self, llm: LLM, chance: random.Random) -> None:
        self.llm, self.drafter, self.chance, self.aborted = llm, llm.engine.worker.drafter, chance, 0
        self.prepare_ahead = self.drafter.prepare_ahead

    def propose(self, rows: Sequence[DraftRow], packet: Packet | None = None) -> DraftTrees:
        if self.chance.random() < ABORT_WITHIN_STEP:
            request = self.chance.choice([*self.llm.engine.scheduler.queues])
            self.aborted += not request.finished
            self.llm.engine.scheduler.abort(request)
        return self.drafter.propose(rows, packet)


def soak(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    num_requests: int,
    seed: int,
    sample_every: int = 500,
    traffic: Traffic = Traffic(),
) -> Report:
    """Run random requests whose prompts begin like `texts`, which are as long as a prompt may be, checking all along.

    Raises:
        AssertionError: a request is lost or ends twice, blocks leak, or the engine's counts do not add up.
    """
    chance, engine, report = random.Random(seed), llm.engine, Report()
    before = replace(engine.scheduler.stats())
    drafter: Drafter = engine.worker.drafter
    aborting = engine.worker.drafter = AbortingDrafter(llm, chance)
    alive: dict[Request, None] = {}
    queued, sampled = 0, 0
    start = time.perf_counter()
    while queued < num_requests or alive:
        for _ in range(chance.randint(0, 12)):
            if queued < num_requests and len(alive) < traffic.outstanding:
                for request in _requests(llm, texts, chance, traffic, growing=queued // PHASE % 2 == 0):
                    engine.scheduler.add(request)
                    alive[request] = None
                    queued += 1
        if alive and chance.random() < ABORT_BETWEEN_STEPS:
            engine.scheduler.abort(chance.choice([*alive]))
        for request in engine.step():
            assert request in alive, "a request that has ended got a token"
        for request in [request for request in alive if request.finished]:
            assert request.finish_reason in ("stop", "length", "abort"), request.error
            assert request.finish_reason == "abort" or request.num_output > 0, "ended without a token"
            assert len(request.token_ids) <= request.max_length, "more tokens than asked"
            report.reasons[request.finish_reason] += 1
            del alive[request]
        assert {*engine.scheduler.queues} == {*alive}, "a request is lost, or is kept after its end"
        if queued - len(alive) >= sampled + sample_every:
            sampled += sample_every
            check_scheduler(engine.scheduler)
            # Samples of a prompt know each other, so it is the collector that frees them.
            gc.collect()
            report.resident_mib[sampled] = round(resident_mib(), 1)
            report.in_use_mib[sampled] = round(in_use_mib(), 1)
            print(f"{sampled} requests, {report.resident_mib[sampled]} MiB", flush=True)
    report.seconds = time.perf_counter() - start
    engine.worker.drafter, report.aborted_within = drafter, aborting.aborted
    check_scheduler(engine.scheduler)
    stats = report.stats = replace(engine.scheduler.stats())
    manager = engine.scheduler.manager
    assert manager.pool.num_free == manager.pool.num_blocks, "blocks are held at the end"
    assert report.reasons.total() == queued == stats.queued - before.queued, "requests are lost"
    assert report.reasons["abort"] == stats.aborted - before.aborted
    assert stats.queued == stats.finished + stats.aborted
    return report


def _requests(
    llm: LLM, texts: Sequence[Sequence[int]], chance: random.Random, traffic: Traffic, growing: bool
) -> list[Request]:
    """The samples of a random prompt; of a short one with a long output, if they shall grow."""
    vocab, pick = llm.model.config.vocab_size, chance.choice
    prompt = list(pick(texts)[: chance.randint(1, 6 if growing else traffic.prompt)])
    if chance.random() < 0.3:
        place = chance.randrange(len(prompt))
        prompt[place:] = [chance.randrange(vocab) for _ in prompt[place:]]
    temperature = pick([0.0, 0.0, 0.5, 1.0])
    params = SamplingParams(
        n=pick([1, 1, 2]) if temperature else 1,
        temperature=temperature,
        top_k=pick([0, 0, 20]),
        top_p=pick([1.0, 1.0, 0.8]),
        repetition_penalty=pick([1.0, 1.0, 1.2]),
        presence_penalty=pick([0.0, 0.0, 0.5]),
        frequency_penalty=pick([0.0, 0.0, -0.5]),
        seed=chance.randrange(1 << 63),
        max_tokens=chance.randint(8 if growing else 1, traffic.output),
        stop=pick([None, None, None, "e", [" the", "."]]) if llm.tokenizer else None,
        stop_token_ids=pick([(), (), (chance.randrange(vocab),)]),
        ignore_eos=pick([True, False]),
    )
    requests = llm.engine.new_group(llm.request_maker.add(prompt, params)).requests
    salt, priority = pick([None, None, "a"]), pick([-1, 0, 0, 0, 1])
    for request in requests:
        request.cache_salt = salt
        request.priority = priority if llm.config.scheduler.scheduling_policy == "priority" else 0
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft", default="eagle", help='head, or "none"')
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=2_000, help="requests after which memory may not grow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-mib", type=float, default=2.4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(
        adaptive_drafts=False,
        draft=args.draft,
        dtype=args.dtype,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        scheduling_policy="priority",
        max_model_len=256,
        watermark=0.0,
        block_size=8,
        kv_cache_memory=int(args.cache_mib * 2**20),
    )
    text = [*chain.from_iterable(llm.chat_prompt(messages) for messages in read_prompts("sgd-eval"))]
    report = soak(llm, [text[start : start + 60] for start in range(0, 60 * 24, 60)], args.requests, args.seed)
    stats: dict[str, Any] = asdict(report.stats)

    def growth(samples: dict[int, float]) -> float | None:
        settled = [size for count, size in samples.items() if count >= args.warm_up]
        return round(max(settled) / settled[0] - 1, 4) if settled and settled[0] else None

    write(
        "soak",
        {
            "dtype": llm.config.dtype,
            "requests": args.requests,
            "seed": args.seed,
            "blocks": llm.engine.worker.cache.num_blocks,
            "seconds": round(report.seconds, 1),
            "requests_per_s": round(stats["queued"] / report.seconds, 1),
            "finish_reasons": dict(report.reasons),
            "aborted_within_a_step": report.aborted_within,
            "stats": stats,
            "resident_mib": report.resident_mib,
            "in_use_mib": report.in_use_mib,
            "resident_growth": growth(report.resident_mib),
            "in_use_growth": growth(report.in_use_mib),
        },
    )
    assert stats["preemptions"] > 0, "no request has been preempted"


if __name__ == "__main__":
    main()
