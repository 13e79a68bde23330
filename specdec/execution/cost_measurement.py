"""Measurement of what the parts of a step cost, on the still empty cache."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.execution.dummy_rows import dummy_chain, dummy_draft_rows, dummy_reading_row, dummy_rows
from specdec.execution.executor import Executor
from specdec.parallel.ranks import Ranks
from specdec.scheduling.step_cost import Curve, StepCost

# Least and most rounds of measurements, and the time that ends them between: steps of a small model are short beside
# what disturbs them.
ROUNDS, MOST_ROUNDS, LEAST_SECONDS, IN_A_ROW = 2, 32, 0.04, 3
# Seconds from which a part fills the processor's caches by itself, and is measured once in a round.
LONG = 0.02
# Most growth of a long part's seconds per token from one size to the next if nothing was warmed up and nothing else
# ran. Within it, the first measurement counts and is not repeated.
IN_PROPORTION = 1.25
# Tokens of the pass that stands for recomputing a request.
CHUNK = 256
CONTEXT = 128
# Tokens of measured passes. Kernels that compute tiles of 16 rows take much longer for 17 or 33.
TOKENS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 256)
READ = (1, 4, 8, 16, 32, 64, 256)
ROWS = (1, 8, 32)
# A part that takes longer is not measured at larger sizes than the second; its curve is extrapolated.
LONGEST = 0.5


def measure_step_cost(executor: Executor, longest: int, shape: DraftShape | None) -> StepCost:
    """Time the parts of steps of this target and drafter.

    Args:
        longest: positions that both target and drafter have.
        shape: bounds of draft trees, None without a drafter.
    """
    depth = shape.depth if shape else 1
    # Tokens that are cached before the one that rows are measured with.
    context = max(1, min(CONTEXT, longest - 1 - depth))
    cache, run_dummy = executor.worker.cache, executor.worker.runner.run_dummy
    chains = [n for n in TOKENS if n <= longest]
    passes = _curve(executor.ranks, lambda tokens: run_dummy(*dummy_chain(cache, tokens)), chains)
    rows = _curve(executor.ranks, lambda rows: run_dummy(*dummy_rows(cache, rows, context)), ROWS)
    cost = StepCost(passes, Curve([(x, max(0.0, y - passes(x))) for x, y in zip(rows.xs, rows.ys, strict=True)]))
    if shape is not None:
        cost.depth = depth
        trees = partial(dummy_draft_rows, cache, context=context, shape=shape)
        cost.first_level = _draft_curve(executor, partial(trees, depth=1), ROWS)
        cost.all_levels = _draft_curve(executor, partial(trees, depth=depth), ROWS)
        sizes = [n for n in READ if n < longest]
        cost.reading = _draft_curve(executor, lambda tokens: [dummy_reading_row(cache, tokens)], sizes)
    return cost


def _curve(ranks: Ranks, work: Callable[[int], None], sizes: Sequence[int]) -> Curve:
    """Return the least seconds of each size, from rounds over all sizes, so that a disturbance spoils none of them."""
    seconds: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    before = math.inf
    for size in sizes:
        # The first time warms up.
        first = _timed(ranks, partial(work, size))
        if first > (LONGEST if seconds else LONG):
            # A disturbance would end the curve, or pass for the cost of the first size.
            first = min(first, _timed(ranks, partial(work, size)))
        seconds[size] = first
        # One point would say that further tokens or rows cost nothing.
        if first > LONGEST and len(seconds) > 1:
            break
        if first <= LONG or first / size > IN_PROPORTION * before:
            times[size] = []
        before = first / size
    start = time.perf_counter()
    for rounds in range(MOST_ROUNDS):
        # All ranks run as many passes.
        if ranks.decide(lambda: rounds >= ROUNDS and time.perf_counter() - start >= LEAST_SECONDS):  # noqa: B023
            break
        for size, own in times.items():
            # In a row, as steps are: the last size may have left other data in the processor's caches.
            count = ranks.decide(lambda: IN_A_ROW if seconds[size] <= LONG else 1)  # noqa: B023
            own += [_timed(ranks, partial(work, size)) for _ in range(count)]
    return Curve((seconds | {size: min(own) for size, own in times.items()}).items())


def _draft_curve(executor: Executor, rows_of: Callable[[int], list[DraftRow]], sizes: Sequence[int]) -> Curve:
    @torch.inference_mode()
    def work(size: int) -> None:
        executor.worker.run_dummy_drafts(rows_of(size))

    return _curve(executor.ranks, work, sizes)


def _timed(ranks: Ranks, work: Callable[[], None]) -> float:
    """Return the seconds that the work takes on the first rank."""
    start = time.perf_counter()
    with ranks.together():
        work()
    return ranks.decide(lambda: time.perf_counter() - start)
