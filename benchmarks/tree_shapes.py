"""Which tree pays on this machine: speed-up over plain decoding at batch 1, for several shapes in one run.

    python -m benchmarks.tree_shapes

Trees are fixed. The default, `specdec.config.CPU_SHAPE`, bounds adaptive trees and is chosen with these on.
"""

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.interleaved import run_rounds
from specdec.bench.timed_run import EngineContender

SHAPES = [
    "2,4,8",
    "3,3,6",
    "3,4,10",
    "5,4,16",
    "6,10,60",
    "6,3,8,0.5",
    "6,3,8,0.6",
    "6,3,8,0.7",
    "5,3,10,0.6",
    "8,4,12,0.6",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target folder; default: the demo model")
    parser.add_argument("--draft", default="eagle", help="head folder; default: the demo head")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="depth,branching,nodes and min_reach if any")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engines = {"plain": LLM(args.model, None)}
    for shape in args.shapes:
        engines[shape] = LLM(args.model, args.draft, shape=parse_shape(shape), adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    prompts = [
        engines["plain"].chat_prompt(messages)
        for name in ("sgd-eval", "gsm8k-eval")
        for messages in read_prompts(name)[: args.prompts]
    ]
    contenders = {name: EngineContender(llm, params) for name, llm in engines.items()}
    rounds = run_rounds(contenders, [[prompt] for prompt in prompts], args.rounds, warmup=1)
    answers = {name: [sample for one in measured for sample in one.samples] for name, measured in rounds.items()}
    rows: list[dict[str, Any]] = []
    for name in engines:
        pairs = zip(answers["plain"], answers[name], strict=True)
        speedup = statistics.median(plain.seconds / own.seconds for plain, own in pairs)
        tau = statistics.mean(sample.stats.tau for sample in answers[name])
        rows.append({"shape": name, "tau": round(tau, 3), "speedup": round(speedup, 3), "c": round(tau / speedup, 3)})
    rows.sort(key=lambda row: -row["speedup"])
    table = Table("depth,branching,nodes", "tau", "c", "speed-up")
    for row in rows:
        table.add_row(str(row["shape"]), f"{row['tau']:.2f}", f"{row['c']:.2f}", f"{row['speedup']:.2f}")
    Console().print(table)
    write("tree_shapes", {"dtype": engines["plain"].config.dtype, "rows": rows})


if __name__ == "__main__":
    main()
