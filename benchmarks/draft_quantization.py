"""Heads in 8 bits beside the same heads as they are: tau, and tokens a second at batch 1.

    python -m benchmarks.draft_quantization
    python -m benchmarks.draft_quantization --model FOLDER/target --draft FOLDER/eagle3 --name draft_quantization_wide

The prompts are answered by plain decoding and with each head in both forms, in interleaved rounds of one process. Trees
have a fixed size, so that nothing but the weights differs. A ratio is that of the medians of a prompt's rounds, the
median over prompts. Outputs must be equal.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.quantization import EVALS, KINDS
from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams, Speculation
from specdec.bench.environment import shown_path
from specdec.bench.interleaved import run_rounds
from specdec.bench.timed_run import EngineContender
from specdec.config import DEMO

PLAIN = "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "target"), help="target folder")
    parser.add_argument("--draft", action="append", help="head folder; may be given several times")
    parser.add_argument("--name", default="draft_quantization", help="name of the result")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text")
    parser.add_argument("--nodes", type=int, default=4, help="of each tree")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(2)
    heads = args.draft or [str(DEMO / name) for name in ("eagle3", "dspark", "eagle")]
    settings: Any = {"kernels": "native", "enable_prefix_caching": False, "adaptive_drafts": False}
    speculation = Speculation(max_nodes=args.nodes)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, speculation=speculation)
    llms = {PLAIN: LLM(args.model, None, **settings)}
    for head in heads:
        for kind in KINDS:
            llms[f"{Path(head).name} {kind}"] = LLM(args.model, head, draft_quantization=kind, **settings)
    contenders = {name: EngineContender(llm, params) for name, llm in llms.items()}
    prompts = [llms[PLAIN].chat_prompt(messages) for name in EVALS for messages in read_prompts(name)[: args.prompts]]
    measured = run_rounds(contenders, [[prompt] for prompt in prompts], args.rounds, warmup=1)
    samples = {name: list(zip(*(one.samples for one in found), strict=True)) for name, found in measured.items()}
    seconds = {name: [statistics.median(one.seconds for one in own) for own in all_] for name, all_ in samples.items()}
    answers = {name: [one.token_ids for own in all_ for one in own] for name, all_ in samples.items()}
    stats = {name: [one.stats for own in all_ for one in own] for name, all_ in samples.items()}
    assert all(found == answers[PLAIN] for found in answers.values()), "drafts changed the output"

    def ratio(one: str, other: str) -> float:
        return round(float(statistics.median(b / a for a, b in zip(seconds[one], seconds[other], strict=True))), 3)

    rows = []
    table = Table("head", "tau, none", "tau, q8", "over plain, none", "over plain, q8", "q8 over none")
    for name in (Path(head).name for head in heads):
        counts = {kind: stats[f"{name} {kind}"] for kind in KINDS}
        means = {kind: sum(one.tokens for one in own) / sum(one.steps for one in own) for kind, own in counts.items()}
        tau = {kind: round(mean, 3) for kind, mean in means.items()}
        speed = {kind: ratio(f"{name} {kind}", PLAIN) for kind in KINDS}
        gain = ratio(f"{name} q8", f"{name} none")
        rows.append({"head": name, "tau": tau, "over_plain": speed, "q8_over_none": gain})
        table.add_row(name, *map(str, [*tau.values(), *speed.values(), gain]))
    Console(width=120).print(table)
    write(
        args.name,
        {"model": shown_path(args.model), "dtype": llms[PLAIN].config.dtype, "nodes": args.nodes, "rows": rows},
    )


if __name__ == "__main__":
    main()
