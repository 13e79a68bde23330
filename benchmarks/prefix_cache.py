"""Cost of requests that share a prefix, and acceptance of drafts on cached prefixes.

    python -m benchmarks.prefix_cache

32 requests share 1,024 tokens and end differently. They arrive all at once, or one after another. Each round has its
own `cache_salt`, so it finds nothing of an earlier round. "Cold" is the same with prefix caching off. Counted: prompt
tokens that passed the target, of the sum of all prompts; goal: the shared tokens once. Also tau warm over cold; goal:
within 2 %. Cold requests that arrive at once get fewer drafts while other prompts fill the steps, so warm tau is
compared with cold requests one by one. In bfloat16 texts, and so tau, can differ at near ties, whatever is cached; in
float32 they hardly do.
"""

import argparse
import statistics
import time
from itertools import chain
from typing import Any, NamedTuple

import torch

from benchmarks.report import finish, parse_shape, read_prompts
from specdec import LLM, SamplingParams


class Run(NamedTuple):
    """All requests once.

    Attributes:
        computed: tokens of prompts that passed the target.
        hits: tokens of prompts that were found instead.
        tau: mean tokens a target step, over all requests.
        texts: what each said.
    """

    computed: int
    hits: int
    tau: float
    seconds: float
    texts: list[list[int]]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str, at_once: bool) -> Run:
    engine, stats = llm.engine, llm.engine.scheduler.stats()
    known, hits = stats.known_tokens, stats.prefix_hits
    groups = [llm.engine.new_group(llm.request_maker.add(prompt, params)) for prompt in prompts]
    start = time.perf_counter()
    for batch in [groups] if at_once else [[group] for group in groups]:
        for group in batch:
            for request in group.requests:
                request.cache_salt = salt
                engine.scheduler.add(request)
        while not all(group.finished for group in batch):
            engine.step()
    seconds = time.perf_counter() - start
    stats = engine.scheduler.stats()
    outputs = [group.output() for group in groups]
    steps = sum(output.stats.steps for output in outputs)
    assert not stats.preemptions, "a preempted request computes tokens twice; give the cache more memory"
    return Run(
        # Each step after the prompt's has one known token.
        computed=stats.known_tokens - known - steps,
        hits=stats.prefix_hits - hits,
        tau=sum(output.stats.tokens for output in outputs) / steps,
        seconds=seconds,
        texts=[output.token_ids for output in outputs],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "auto"])
    parser.add_argument("--shape", help="depth,branching,nodes and min_reach if any; default: the device's own")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the common beginning")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="after one whose times do not count")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = parse_shape(args.shape) if args.shape else None
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for drafts in (None, "eagle"):
            warm = LLM(draft=drafts, dtype=dtype, shape=shape, adaptive_drafts=False)
            cold = LLM(draft=drafts, dtype=dtype, shape=shape, adaptive_drafts=False, enable_prefix_caching=False)
            text = chain.from_iterable(warm.chat_prompt(messages) for messages in read_prompts("sgd-eval"))
            shared = [token for _, token in zip(range(args.shared), text, strict=False)]
            endings = sorted((warm.chat_prompt(messages) for messages in read_prompts("gsm8k-eval")), key=len)
            prompts = [shared + ending for ending in endings[: args.requests]]
            pairs: dict[bool, list[tuple[Run, Run]]] = {True: [], False: []}
            for round_number in range(args.rounds + 1):
                for at_once, done in pairs.items():
                    salt = f"{round_number} {at_once}"
                    done.append((run(warm, prompts, params, salt, at_once), run(cold, prompts, params, salt, at_once)))
            total = sum(map(len, prompts))
            for at_once, done in pairs.items():
                assert all(w.computed + w.hits == total for w, _ in done), "tokens are lost or counted twice"
                assert all((c.computed, c.hits) == (total, 0) for _, c in done), "hits with prefix caching off"
                equal = [a == b for w, c in done for a, b in zip(w.texts, c.texts, strict=True)]
                tau = statistics.mean(w.tau for w, _ in done)
                undisturbed = statistics.mean(c.tau for _, c in pairs[False])
                rows.append(
                    {
                        "dtype": warm.config.dtype,
                        "drafts": drafts or "none",
                        "arrival": "at once" if at_once else "one by one",
                        "prompt_tokens": total,
                        "computed": max(w.computed for w, _ in done),
                        "computed_at_least": total - args.shared * (len(prompts) - 1),
                        "prefix_hits": min(w.hits for w, _ in done),
                        "tau_warm": round(tau, 3),
                        "tau_cold": round(statistics.mean(c.tau for _, c in done), 3),
                        "tau_warm_over_cold_one_by_one": round(tau / undisturbed, 4),
                        "equal_texts": f"{sum(equal)} of {len(equal)}",
                        "cold_over_warm_seconds": round(
                            statistics.median(c.seconds / w.seconds for w, c in done[1:]), 2
                        ),
                    }
                )
    shown = ("dtype", "drafts", "arrival", "computed", "prompt_tokens", "tau_warm_over_cold_one_by_one", "equal_texts")
    figures = {"requests": args.requests, "shared": args.shared, "max_tokens": args.max_tokens, "rounds": args.rounds}
    finish("prefix_cache", figures, rows, (*shown, "cold_over_warm_seconds"))


if __name__ == "__main__":
    main()
