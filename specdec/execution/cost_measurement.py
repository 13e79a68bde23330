"""Times the parts of a step on the still empty cache."""

import time
from collections.abc import Callable, Sequence

import torch

from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.execution.model_runner import ModelRunner
from specdec.scheduling.step_cost import Curve, StepCost
from specdec.verify.sampling import Context, Sampling


def dummy_draft_rows(
    cache: KVCache, count: int, context: int, shape: DraftShape, depth: int, temperature: float = 0.0
) -> list[DraftRow]:
    """Rows that ask for trees of `depth` levels after `context` tokens and one that the head has yet to read."""
    known = context + 1
    table = cache.null_block_table(known + shape.slots)
    requests = [Context(Sampling(temperature), [0] * known, context) for _ in range(count)]
    return [DraftRow(table, context, known, shape.nodes, depth, request) for request in requests]


ROUNDS = 5
CONTEXT = 128
TOKENS = (1, 4, 16, 64, 256)
ROWS = (1, 8, 32)
# A part that takes longer is not measured at the next size; the curve goes straight on.
LONGEST = 0.5


def measure_step_cost(
    runner: ModelRunner, longest: int, drafter: Drafter | None = None, shape: DraftShape | None = None
) -> StepCost:
    """What steps of this target and drafter cost here.

    Args:
        longest: positions that target and drafter have.
        drafter: one that always goes to the depth it is allowed, None where nothing drafts.
        shape: its bounds.
    """
    depth = shape.depth if shape else 1
    # Rows have read so many tokens before the one they are measured with.
    context = max(1, min(CONTEXT, longest - 1 - depth))
    passes = _curve(runner.run_dummy, [n for n in TOKENS if n <= longest])
    rows = _curve(lambda rows: runner.run_dummy_rows(rows, context), ROWS)
    cost = StepCost(passes, Curve([(x, max(0.0, y - passes(x))) for x, y in zip(rows.xs, rows.ys, strict=True)]))
    if drafter is not None and shape is not None:
        cost.depth = depth
        cost.first_level = _curve(_drafting(runner, drafter, shape, 1, context), ROWS)
        cost.all_levels = _curve(_drafting(runner, drafter, shape, depth, context), ROWS)
        cost.reading = _curve(_reading(runner, drafter), [n for n in TOKENS if n < longest])
    return cost


def _curve(work: Callable[[int], None], sizes: Sequence[int]) -> Curve:
    points: list[tuple[float, float]] = []
    for size in sizes:
        points.append((size, _seconds(work, size)))
        if points[-1][1] > LONGEST:
            break
    return Curve(points)


def _seconds(work: Callable[[int], None], size: int) -> float:
    times: list[float] = []
    # The first warms up.
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        work(size)
        times.append(time.perf_counter() - start)
        if times[-1] > LONGEST:
            break
    return min(times[1:] or times)


def _drafting(
    runner: ModelRunner, drafter: Drafter, shape: DraftShape, depth: int, context: int
) -> Callable[[int], None]:
    @torch.inference_mode()
    def draft(trees: int) -> None:
        drafter.propose(dummy_draft_rows(runner.cache, trees, context, shape, depth))
        runner.wait()

    return draft


def _reading(runner: ModelRunner, drafter: Drafter) -> Callable[[int], None]:
    """One row, read from its start."""

    @torch.inference_mode()
    def read(tokens: int) -> None:
        table = runner.cache.null_block_table(tokens + 1)
        drafter.propose([DraftRow(table, 1, tokens + 1, 0, 0, Context(Sampling(), [0] * (tokens + 1), 1))])
        runner.wait()

    return read
