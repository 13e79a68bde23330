"""Captures the graphs of usual steps before the first request comes."""

import sys
from collections.abc import Sequence

import torch

from specdec.core.progress import progress_bar
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Drafter
from specdec.execution.cost_measurement import dummy_draft_rows
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_graphs import TOKEN_BUCKETS

# Of the rows: how the attention cuts its work, and so the graph, depends on it.
CONTEXTS = (16, 128, 1024, 4096)


def capture_graphs(
    runner: ModelRunner,
    drafter: Drafter | None,
    max_rows: int,
    longest: int,
    shape: DraftShape | None,
    draft_context: int = sys.maxsize,
    temperatures: Sequence[float] = (0.0,),
) -> None:
    """Run plain steps, steps of the largest trees and the drafting of these, of 1, 2, 4 … rows.

    Other sizes are captured when they come.

    Args:
        drafter: None where nothing drafts.
        max_rows: requests of a step.
        longest: tokens of a request.
        shape: of trees, None likewise.
        draft_context: tokens from which on nothing is drafted.
        temperatures: of the rows that trees are drafted for: rules that weigh have other trees above 0.
    """
    counts = [1 << power for power in range(max_rows.bit_length())]
    nodes = shape.nodes if shape is not None else 0
    slots = shape.slots if shape is not None else 0
    cases = [(rows, context) for rows in counts for context in CONTEXTS if context + 1 + slots <= longest]
    with torch.inference_mode(), progress_bar(len(cases), "capturing graphs") as advance:
        for rows, context in cases:
            for tree in sorted({0, nodes}):
                if rows * (1 + tree) <= TOKEN_BUCKETS[-1][0]:
                    runner.run_dummy_rows(rows, context, tree)
            if drafter is not None and shape is not None and context + 1 < draft_context:
                for temperature in temperatures:
                    drafter.propose(dummy_draft_rows(runner.cache, rows, context, shape, shape.depth, temperature))
            advance()
