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
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.peers import PeerSetup
from specdec.bench.timed_run import EngineContender
from specdec.bench.transformers_peer import TransformersPeer
from specdec.config import DEMO, DEMO_HEAD


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
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    prompts = [
        plain.chat_prompt(messages)
        for name in ("gsm8k-eval", "sgd-eval")
        for messages in read_prompts(name)[: args.prompts]
    ]
    random.Random(0).shuffle(prompts)
    setup = PeerSetup(
        label="transformers",
        model=Path(args.model),
        dtype=plain.config.dtype,
        longest=max(map(len, prompts)) + args.max_tokens,
        max_tokens=args.max_tokens,
        end_tokens=frozenset(),
        draft=None,
        settings={"batch": str(args.padded)},
    )
    reference = TransformersPeer(setup)
    contenders = {name: EngineContender(llm, params) for name, llm in engines.items()}
    ways = ("at once", "Poisson", "one by one")
    seconds: dict[str, list[float]] = {"transformers": []}
    seconds |= {f"{name}, {way}": [] for name in engines for way in ways}
    reference.run(prompts[: args.padded])
    for contender in contenders.values():
        contender.run(prompts)
    for round_number in range(args.rounds):
        seconds["transformers"].append(reference.run(prompts).seconds)
        for name, contender in contenders.items():
            at_once = contender.run(prompts).seconds
            chance, rate = random.Random(round_number), 3 * len(prompts) / at_once
            times = list(accumulate(chance.expovariate(rate) for _ in prompts))
            alone = sum(contender.run([prompt]).seconds for prompt in prompts)
            measured = (at_once, contender.run(prompts, times).seconds, alone)
            for way, value in zip(ways, measured, strict=True):
                seconds[f"{name}, {way}"].append(value)

    def sooner(name: str, other: str) -> float:
        return round(statistics.median(y / x for x, y in zip(seconds[name], seconds[other], strict=True)), 2)

    ratios = {}
    table = Table("", "s, median", "tok/s", "than one by one", "than transformers")
    for name, values in seconds.items():
        median = statistics.median(values)
        base = f"{name.partition(',')[0]}, one by one"
        ratios[name] = {"sooner_than_transformers": sooner(name, "transformers")}
        if base in seconds:
            ratios[name]["sooner_than_one_by_one"] = sooner(name, base)
        ratio = f"{ratios[name]['sooner_than_one_by_one']:.2f}" if base in seconds else ""
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
