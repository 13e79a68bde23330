"""Latency of decoding requests while a long prompt is computed in chunks.

    python -m benchmarks.chunked_prefill

Eight requests decode when a prompt of 2,000 tokens arrives. The figure is the longest time between two tokens of any
of them until the prompt yields its first token, over the median step before the prompt came, in the same run. Goal: at
most 3 with chunks of 256. The table also shows the median over rounds, the time that nine in ten of those steps
stay below, the best round, and the noise: the longest over the median of the 60 steps before the prompt came. The last
column is the number of tokens that the eight requests got in that time.
"""

import argparse
import statistics
import time
from itertools import chain
from typing import Any, NamedTuple

import torch

from benchmarks.report import finish, parse_shape, read_prompts
from specdec import LLM, SamplingParams

# Of a row, what its table leaves out.
UNSHOWN = ("gap_over_step_per_round", "step_ms_median")


class Run(NamedTuple):
    """One arrival.

    Attributes:
        normal: seconds, the median step of the decoding requests alone.
        noise: seconds, the longest such step: what the machine does by itself.
        gap: seconds, the longest between two tokens of one of them meanwhile.
        usual: seconds, what nine in ten of the steps meanwhile stay below.
        prefill: seconds from the long prompt's arrival to its first token.
        steps: target passes in that time.
        tokens: what the decoding requests got in that time.
    """

    normal: float
    noise: float
    gap: float
    usual: float
    prefill: float
    steps: int
    tokens: int


def arrival(llm: LLM, short: list[list[int]], long: list[int], steps_before: int) -> Run:
    """Decode, let the long prompt arrive after `steps_before` steps, and stop at its first token."""
    engine = llm.engine
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    requests = [llm.engine.new_group(llm.request_maker.add(prompt, endless)).requests[0] for prompt in short]
    (late,) = llm.engine.new_group(llm.request_maker.add(long, SamplingParams(temperature=0, max_tokens=1))).requests
    for request in requests:
        engine.scheduler.add(request)
    while any(request.num_output == 0 for request in requests):
        engine.step()
    before: list[float] = []
    for _ in range(steps_before):
        start = time.perf_counter()
        engine.step()
        before.append(time.perf_counter() - start)
    begin = time.perf_counter()
    last = dict.fromkeys(requests, begin)
    had = sum(request.num_output for request in requests)
    gap, steps = 0.0, 0
    meanwhile: list[float] = []
    engine.scheduler.add(late)
    while not late.finished:
        start = time.perf_counter()
        news = engine.step()
        now = time.perf_counter()
        meanwhile.append(now - start)
        steps += 1
        for request in news:
            if request is not late:
                gap = max(gap, now - last[request])
                last[request] = now
    end = time.perf_counter()
    gap = max(gap, *(end - seen for seen in last.values()))
    assert not any(request.finished for request in requests), "a request has ended that should decode throughout"
    tokens = sum(request.num_output for request in requests) - had
    usual = sorted(meanwhile)[int(0.9 * len(meanwhile))]
    for request in requests:
        engine.scheduler.abort(request)
    return Run(statistics.median(before), max(before), gap, usual, end - begin, steps, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", help="depth,branching,nodes and min_reach if any; default: the device's own")
    parser.add_argument("--decoding", type=int, default=8, help="requests that decode")
    parser.add_argument("--long", type=int, default=2000, help="tokens of the prompt that arrives")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 4096], help="max_num_batched_tokens")
    parser.add_argument("--steps-before", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = parse_shape(args.shape) if args.shape else None
    engines = {
        (drafts, budget): LLM(
            draft=drafts,
            shape=shape,
            max_num_batched_tokens=budget,
            kv_cache_memory=1 << 28,
            enable_prefix_caching=False,
        )
        for drafts in (None, "eagle")
        for budget in args.budgets
    }
    llm = next(iter(engines.values()))
    length = min(args.long, llm.max_model_len - 1)
    short = [llm.chat_prompt(messages) for messages in read_prompts("gsm8k-eval")[: args.decoding]]
    text = chain.from_iterable(llm.chat_prompt(messages) for messages in read_prompts("sgd-eval"))
    long = [token for _, token in zip(range(length), text, strict=False)]
    assert len(long) == length
    runs: dict[tuple[str | None, int], list[Run]] = {case: [] for case in engines}
    for round_number in range(args.rounds + 1):
        for case, engine in engines.items():
            run = arrival(engine, short, long, args.steps_before)
            if round_number:  # the first round warms up
                runs[case].append(run)
    rows: list[dict[str, Any]] = []
    for (drafts, budget), every in runs.items():
        row = {
            "drafts": drafts or "none",
            "max_num_batched_tokens": budget,
            "gap_over_step": round(statistics.median(run.gap / run.normal for run in every), 2),
            "gap_over_step_per_round": [round(run.gap / run.normal, 2) for run in every],
            "gap_over_step_best": round(min(run.gap / run.normal for run in every), 2),
            "nine_in_ten_over_step": round(statistics.median(run.usual / run.normal for run in every), 2),
            "noise_over_step": round(statistics.median(run.noise / run.normal for run in every), 2),
            "prefill_over_step": round(statistics.median(run.prefill / run.normal for run in every), 2),
            "steps_meanwhile": statistics.median(run.steps for run in every),
            "tokens_meanwhile": statistics.median(run.tokens for run in every),
            "step_ms_median": round(statistics.median(run.normal for run in every) * 1e3, 2),
        }
        rows.append(row)
    figures = {"dtype": llm.config.dtype, "decoding": len(short), "long": length, "rounds": args.rounds}
    finish("chunked_prefill", figures, rows, [name for name in rows[0] if name not in UNSHOWN])


if __name__ == "__main__":
    main()
