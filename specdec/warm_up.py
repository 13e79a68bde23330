"""Captures the graphs of usual steps before the first request comes."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.draft_heads.draft_shape import DraftShape
from specdec.model_runner import ModelRunner
from specdec.step_graphs import TOKEN_BUCKETS

# Of the rows: how the attention cuts its work, and so the graph, depends on it.
CONTEXTS = (16, 128, 1024, 4096)


def capture_steps(runner: ModelRunner, max_rows: int, longest: int, shape: DraftShape | None) -> None:
    """Run plain steps and steps of the largest trees, of 1, 2, 4 … rows; others are captured when they come.

    Args:
        max_rows: requests of a step.
        longest: tokens of a request.
        shape: of trees, None where nothing drafts.
    """
    counts = [1 << power for power in range(max_rows.bit_length())]
    nodes = [0] if shape is None else [0, shape.nodes]
    steps = [
        (rows, context, tree)
        for rows in counts
        for tree in nodes
        for context in CONTEXTS
        if rows * (1 + tree) <= TOKEN_BUCKETS[-1][0] and context + 1 + tree <= longest
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for step in progress.track(steps, description="capturing graphs"):
            runner.run_dummy_rows(*step)
