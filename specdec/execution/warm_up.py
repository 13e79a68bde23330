"""Capture of the graphs of common steps before the first request arrives."""

import sys
from collections.abc import Sequence

import torch

from specdec.core.progress import progress_bar
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Drafter
from specdec.execution.dummy_rows import dummy_draft_rows, dummy_rows
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_graphs import TOKEN_BUCKETS

# Cached tokens of the rows. The attention plan, and so the graph, depends on them.
CONTEXTS = (16, 128, 1024, 4096)


def capture_graphs(
    runner: ModelRunner,
    drafter: Drafter,
    max_rows: int,
    longest: int,
    shape: DraftShape | None,
    draft_context: int = sys.maxsize,
    temperatures: Sequence[float] = (0.0,),
) -> None:
    """Run plain steps, steps with the largest trees, and the drafting of these, for 1, 2, 4 … rows.

    Other sizes are captured when a step needs them.

    Args:
        max_rows: limit of a step's requests.
        longest: limit of a request's tokens.
        shape: bounds of draft trees, None without a drafter.
        draft_context: number of tokens from which on a request gets no drafts.
        temperatures: temperatures of the rows that draft. Rules that need draft probabilities draft differently
            above 0.
    """
    counts = [1 << power for power in range(max_rows.bit_length())]
    nodes, slots = (shape.nodes, shape.slots) if shape is not None else (0, 0)
    cases = [(rows, context) for rows in counts for context in CONTEXTS if context + 1 + slots <= longest]
    with torch.inference_mode(), progress_bar(len(cases), "capturing graphs") as advance:
        for rows, context in cases:
            for tree in sorted({0, nodes}):
                if rows * (1 + tree) <= TOKEN_BUCKETS[-1][0]:
                    runner.run_dummy(*dummy_rows(runner.cache, rows, context, tree))
            if shape is not None and context + 1 < draft_context:
                for temperature in temperatures:
                    drafter.propose(dummy_draft_rows(runner.cache, rows, context, shape, shape.depth, temperature))
            advance()
