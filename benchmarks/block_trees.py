"""Tau of chains and trees of several heads at equal budgets of nodes, on 100 prompts each of two kinds of text.

    python -m benchmarks.block_trees --draft eagle FOLDER

A head that drafts level by level and one that drafts a block are bounded by the same depth. Tau is a property of head
and tree, not of the machine; at temperature 0, trees of all heads verify the same text.
"""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.acceptance import PROMPT_TOKENS, SEATS, measure
from benchmarks.report import write
from specdec import LLM, DraftShape

BUDGETS = (4, 8, 16, 60)
EVALUATIONS = ("sgd-eval", "gsm8k-eval")


def shapes_of(budget: int, depth: int) -> dict[str, DraftShape]:
    """Return the chain and the tree of at most `budget` nodes and `depth` levels; a chain has one node a level."""
    levels = min(budget, depth)
    # As wide as EAGLE-2's where there are nodes for it.
    width = 10 if budget >= 60 else min(4, budget)
    return {"chain": DraftShape(levels, 1, levels), "tree": DraftShape(levels, width, budget)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target folder; default: the demo model")
    parser.add_argument("--draft", nargs="+", default=["eagle"], help="head folders; default: the demo's EAGLE-3 head")
    parser.add_argument("--depth", type=int, default=7, help="most levels of a tree; of a block head, also its block's")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="most nodes of a tree")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--prompts", type=int, help="of each kind of text; default: all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--name", default="block_trees", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for draft in args.draft:
        for budget in args.budgets:
            for kind, shape in shapes_of(budget, args.depth).items():
                llm = LLM(
                    args.model,
                    draft,
                    shape=shape,
                    adaptive_drafts=False,
                    # Every row's whole tree in every step, also beside prompts.
                    max_num_seqs=SEATS,
                    max_num_batched_tokens=SEATS * (1 + shape.nodes) + PROMPT_TOKENS,
                )
                for name in EVALUATIONS:
                    for temperature in args.temperatures:
                        found = measure(llm, name, temperature, args.max_tokens, args.prompts)
                        rows.append({"draft": draft, "budget": budget, "kind": kind, **found})
                        print(rows[-1], flush=True)
    table = Table(
        "draft", "prompts", "nodes", *(f"{kind}, {t:g}" for t in args.temperatures for kind in shapes_of(1, 1))
    )
    for draft in args.draft:
        for name in EVALUATIONS:
            for budget in args.budgets:
                own = [row for row in rows if (row["draft"], row["prompts"], row["budget"]) == (draft, name, budget)]
                own.sort(key=lambda row: (args.temperatures.index(row["temperature"]), row["kind"]))
                table.add_row(draft, name, str(budget), *(f"{row['tau']:.2f}" for row in own))
    Console().print(table)
    write(args.name, {"dtype": llm.config.dtype, "depth": args.depth, "max_tokens": args.max_tokens, "rows": rows})


if __name__ == "__main__":
    main()
