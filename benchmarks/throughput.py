"""64 requests together, against the same requests one by one and against transformers' `generate` in batches of 8.

    python -m benchmarks.throughput

"eagle" has adaptive trees, the default; "fixed" always drafts the largest tree. Requests arrive all at once, or by a
Poisson process in wall-clock time that takes about a third of the batch's time. transformers gets left-padded batches
in the order of arrival. All runs share one process and one dtype, decode greedily to the same number of new tokens, and
have no prefix cache, so no round profits from another. The figures to read are the ratios, medians over rounds. Goals:
at least 3 times the speed of one by one, and 1.5 times that of transformers.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.config import DEMO, DEMO_HEAD


def run_arriving(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, times: Sequence[float]) -> float:
    """Seconds until all have ended, each queued when its time, in ascending seconds, has come."""
    engine = llm.engine
    groups = [llm.new_group(prompt, params) for prompt in prompts]
    arrived = 0
    start = time.perf_counter()
    while arrived < len(groups) or engine.has_unfinished:
        now = time.perf_counter() - start
        while arrived < len(groups) and times[arrived] <= now:
            engine.add_request(groups[arrived].requests[0])
            arrived += 1
        if engine.has_unfinished:
            engine.step()
        else:
            time.sleep(times[arrived] - now)
    seconds = time.perf_counter() - start
    for group in groups:
        assert len(group.output().token_ids) == params.max_tokens
    return seconds


def run_one_by_one(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> float:
    return sum(run_arriving(llm, [prompt], params, [0.0]) for prompt in prompts)


@torch.inference_mode()
def run_transformers(model: PreTrainedModel, prompts: Sequence[list[int]], max_tokens: int, size: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0
        )
        assert out.shape == (len(batch), longest + max_tokens)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "target"), help="target folder")
    parser.add_argument("--draft", default=str(DEMO_HEAD), help="head folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", help="depth,branching,nodes and min_reach if any; default: the device's own")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--padded", type=int, default=8, help="requests in a batch of transformers")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = parse_shape(args.shape) if args.shape else None
    engines = {
        name: LLM(
            args.model, draft, dtype=args.dtype, shape=shape, enable_prefix_caching=False, adaptive_drafts=adaptive
        )
        for name, draft, adaptive in (("plain", None, True), ("eagle", args.draft, True), ("fixed", args.draft, False))
    }
    plain = engines["plain"]
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=plain.config.dtype).eval()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    prompts = [
        plain.chat_prompt(messages)
        for name in ("gsm8k-eval", "sgd-eval")
        for messages in read_prompts(name)[: args.prompts]
    ]
    random.Random(0).shuffle(prompts)
    together = [0.0] * len(prompts)
    ways = ("at once", "Poisson", "one by one")
    seconds: dict[str, list[float]] = {"transformers": []}
    seconds |= {f"{name}, {way}": [] for name in engines for way in ways}
    run_transformers(reference, prompts[: args.padded], args.max_tokens, args.padded)
    for llm in engines.values():
        run_arriving(llm, prompts, params, together)
    for round_number in range(args.rounds):
        seconds["transformers"].append(run_transformers(reference, prompts, args.max_tokens, args.padded))
        for name, llm in engines.items():
            at_once = run_arriving(llm, prompts, params, together)
            chance, rate = random.Random(round_number), 3 * len(prompts) / at_once
            times = list(accumulate(chance.expovariate(rate) for _ in prompts))
            measured = (at_once, run_arriving(llm, prompts, params, times), run_one_by_one(llm, prompts, params))
            for way, value in zip(ways, measured, strict=True):
                seconds[f"{name}, {way}"].append(value)

    def sooner(name: str, other: str) -> float:
        return round(statistics.median(y / x for x, y in zip(seconds[name], seconds[other], strict=True)), 2)

    ratios = {}
    table = Table("", "s, median", "tok/s", "than one by one", "than transformers")
    for name, values in seconds.items():
        median = statistics.median(values)
        alone = f"{name.partition(',')[0]}, one by one"
        ratios[name] = {"sooner_than_transformers": sooner(name, "transformers")}
        if alone in seconds:
            ratios[name]["sooner_than_one_by_one"] = sooner(name, alone)
        ratio = f"{ratios[name]['sooner_than_one_by_one']:.2f}" if alone in seconds else ""
        tokens = len(prompts) * args.max_tokens
        table.add_row(name, f"{median:.2f}", f"{tokens / median:.0f}", ratio, f"{sooner(name, 'transformers'):.2f}")
    Console().print(table)
    write(
        "throughput",
        {
            "dtype": plain.config.dtype,
            "shape": vars(engines["eagle"].config.shape),
            "requests": len(prompts),
            "max_tokens": args.max_tokens,
            "padded": args.padded,
            "rounds": args.rounds,
            "seconds_median": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
            "ratios": ratios,
            "eagle_sooner_than_plain_at_once": sooner("eagle, at once", "plain, at once"),
        },
    )


if __name__ == "__main__":
    main()
