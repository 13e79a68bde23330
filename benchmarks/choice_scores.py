"""Scoring 100 choices: forward passes, rows, and the time in plain steps.

    python -m benchmarks.choice_scores
    python -m benchmarks.choice_scores --model FOLDER

The choices are phrases that share beginnings, phrases that share none, and single tokens. Each set is scored in turn
with plain decoding, of which a step has one row, and the same prompt, which is cached but for its last token.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import write
from specdec import LLM, SamplingParams
from specdec.config import DEMO
from specdec.execution.model_runner import PreparedPass
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.upload import Packet

PROMPT = "I would like to find a cheap restaurant in the centre of town. The assistant asks about"
WORDS = (" the", " a", " your", " my", " this")
KINDS = (" food", " area", " price", " number of people", " time", " name", " phone", " postcode", " booking", " day")
PLAIN_STEPS = 32


def choice_sets() -> dict[str, list[str] | list[list[int]]]:
    """Return 100 choices of each kind."""
    ends = [kind + mark for kind in KINDS for mark in ".?"]
    return {
        "phrases with shared beginnings": [word + end for word in WORDS for end in ends],
        "phrases of four tokens without": [[100 + i, 7, 11 + i, 5] for i in range(100)],
        "single tokens": [[100 + i] for i in range(100)],
    }


class Passes:
    """The target's passes of an engine, counted by their rows."""

    def __init__(self, llm: LLM) -> None:
        self.rows: list[int] = []
        runner = llm.engine.worker.runner
        self._prepare = runner.prepare
        runner.prepare = self._count  # type: ignore[method-assign]

    def _count(self, parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> PreparedPass:
        self.rows.append(sum(len(part.tokens) for part in parts) + sum(trees.sizes))
        return self._prepare(parts, trees, packet)


def timed(llm: LLM, prompt: list[int], params: SamplingParams) -> float:
    """Return the seconds of a request."""
    began = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "target", help="folder of the target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", default="choice_scores", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    llm = LLM(args.model, draft=None, dtype=args.dtype, max_num_seqs=4)
    passes = Passes(llm)
    tokens = llm.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    # Whole blocks and the last token.
    size = llm.engine.worker.cache.block_size
    prompt = (tokens * size)[: 4 * size + 1]
    plain = SamplingParams(temperature=0, max_tokens=PLAIN_STEPS, ignore_eos=True)
    scored = {name: SamplingParams(choices=choices) for name, choices in choice_sets().items()}
    counts: dict[str, dict[str, int]] = {}
    ratios: dict[str, list[float]] = {name: [] for name in scored}
    for params in (plain, *scored.values()):
        timed(llm, prompt, params)
    for _ in range(args.rounds):
        step = timed(llm, prompt, plain) / PLAIN_STEPS
        for name, params in scored.items():
            passes.rows.clear()
            ratios[name].append(timed(llm, prompt, params) / step)
            counts[name] = {"choices": len(params.choices or ()), "passes": len(passes.rows), "rows": sum(passes.rows)}
    llm.close()
    table = Table("choices", "passes", "rows", "time in plain steps")
    rows: list[dict[str, Any]] = []
    for name, count in counts.items():
        rows.append({"kind": name, **count, "plain_steps": round(median(ratios[name]), 2)})
        table.add_row(name, str(count["passes"]), str(count["rows"]), f"{rows[-1]['plain_steps']:.2f}")
    Console().print(table)
    write(args.name, {"dtype": args.dtype, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
