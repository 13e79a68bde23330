"""Time of one drafted tree by depth: a head that drafts level by level beside block heads, which draft by one pass.

    python -m benchmarks.drafting_cost --draft eagle FOLDER

The first head is the measure: a level's time is what each of its levels after the first adds.
"""

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import write
from specdec import LLM, DraftShape
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.execution.dummy_rows import dummy_draft_rows

CONTEXT = 128


def draft_seconds(llm: LLM, rows: int, depth: int, count: int) -> float:
    """Return the least time of `count` calls that draft greedy trees of so many rows and levels."""
    worker = llm.engine.worker
    assert isinstance(worker.drafter, TreeDrafter)
    given = dummy_draft_rows(worker.cache, rows, CONTEXT, worker.drafter.shape, depth)
    least = float("inf")
    with torch.inference_mode():
        for _ in range(count):
            start = time.perf_counter()
            worker.drafter.propose(given)
            least = min(least, time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target folder; default: the demo model")
    parser.add_argument("--draft", nargs="+", default=["eagle"], help="head folders, the one by levels first")
    parser.add_argument("--shape", type=int, nargs=3, default=[7, 3, 8], help="depth, branching and nodes of the trees")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests in a batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=50, help="per round")
    parser.add_argument("--rounds", type=int, default=5, help="in which the heads take turns")
    parser.add_argument("--name", default="drafting_cost", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    depth = args.shape[0]
    llms = {
        draft: LLM(
            args.model,
            draft,
            shape=DraftShape(*args.shape),
            adaptive_drafts=False,
            max_model_len=2 * CONTEXT,
            max_num_seqs=max(args.rows),
        )
        for draft in args.draft
    }
    found: list[dict[str, Any]] = []
    table = Table("requests", "draft", "1 level, ms", f"{depth} levels, ms", f"{depth} levels, in levels of the first")
    for rows in args.rows:
        least = {(draft, levels): float("inf") for draft in llms for levels in (1, depth)}
        for _ in range(args.rounds):
            for draft, levels in least:
                seconds = draft_seconds(llms[draft], rows, levels, args.calls)
                least[draft, levels] = min(least[draft, levels], seconds)
        first = args.draft[0]
        level = (least[first, depth] - least[first, 1]) / (depth - 1)
        for draft in llms:
            one, all_levels = 1e3 * least[draft, 1], 1e3 * least[draft, depth]
            ratio = all_levels / 1e3 / level
            found.append({"rows": rows, "draft": draft, "ms": [round(one, 4), round(all_levels, 4)]})
            found[-1]["levels"] = round(ratio, 2)
            table.add_row(str(rows), draft, f"{one:.3f}", f"{all_levels:.3f}", f"{ratio:.2f}")
    Console().print(table)
    dtype = llms[args.draft[0]].config.dtype
    write(args.name, {"dtype": dtype, "shape": args.shape, "context": CONTEXT, "rows": found})


if __name__ == "__main__":
    main()
