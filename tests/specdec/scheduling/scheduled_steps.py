"""A scheduler, requests for it, and steps that need no model."""

import sys
from collections.abc import Sequence
from typing import Any

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.integrity import check_scheduler
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_cost import Curve, MeasuredStep, StepCost
from specdec.scheduling.step_plan import PlannedRow, RowResult, StepPlan
from specdec.scheduling.tree_sizer import TreeSizer
from tests.specdec.fake_memory import make_request

TREE = DraftShape(depth=3, branching=2, nodes=6)


def make(blocks: int = 100, shape: DraftShape | None = None, **limits: Any) -> Scheduler:
    """Make a scheduler with blocks of four."""
    draft_context = limits.pop("draft_context", sys.maxsize if shape else 0)
    step_cost, ahead = limits.pop("step_cost", None), limits.pop("passes_ahead", False)
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, "watermark": 0.0, **limits})
    manager = KVCacheManager(blocks, 4)
    sizer, shape = None, shape or TREE
    if step_cost is not None and config.adaptive_drafts:
        # As if the first trees had been verified.
        sizer = TreeSizer(step_cost, shape, num_first=0)
    budget = DraftBudget(shape, draft_context, config.max_num_batched_tokens + config.max_num_seqs, sizer)
    return Scheduler(manager, config, budget, step_cost, passes_ahead=ahead)


def ask(scheduler: Scheduler, name: str, length: int, most: int = 10, **fields: Any) -> Request:
    """Queue a prompt that has nothing in common with those of other names."""
    request = make_request([1000 * ord(name) + i for i in range(length)], most, request_id=name, **fields)
    scheduler.add(request)
    return request


def finish(scheduler: Scheduler, plan: StepPlan, accepted: int = 0, check: bool = True) -> None:
    """Every sampled row emits as many drafts as it can of `accepted`, and one token more."""
    results = []
    for row in plan.rows:
        path = range(min(accepted, row.num_nodes, row.max_depth))
        tokens = [0] * (row.sampled * (len(path) + 1))
        num_new = row.request.take(tokens, len(path), row.num_nodes)
        results.append(RowResult(row.num_nodes, path, num_new=num_new, num_accepted=min(len(path), num_new)))
    scheduler.update(plan, results)
    if check:
        check_scheduler(scheduler)


def run(scheduler: Scheduler, accepted: int = 0) -> list[PlannedRow]:
    plan = scheduler.schedule()
    finish(scheduler, plan, accepted)
    return plan.rows


def step(scheduler: Scheduler, accepted: int = 0) -> list[tuple[str, int]]:
    """Run a step; return each request with the number of known tokens that it computed."""
    return [(row.request.request_id, row.num_known) for row in run(scheduler, accepted)]


def grants(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Run a step; return each request with the nodes and levels that it was granted."""
    return [(row.request.request_id, row.num_nodes, row.max_depth) for row in run(scheduler)]


def names(requests: Sequence[Request]) -> str:
    return "".join(request.request_id for request in requests)


def plain_known(cost: StepCost) -> StepCost:
    """Measure plain steps of all sizes, as long as predicted, so that trees are not held back."""
    for bits in range(9):
        rows = 1 << bits
        for _ in range(2):
            cost.correct(MeasuredStep(rows, rows, 0, cost.passes(rows) + cost.rows(rows), 0, 0, 0, 0.0))
    return cost


def costs(token: float) -> StepCost:
    """A pass takes 1 and so much for each token; a tree's level takes a hundredth of the pass, however many trees."""
    return plain_known(
        StepCost(
            Curve([(0, 1.0), (1, 1 + token)]), first_level=Curve([(1, 0.01)]), all_levels=Curve([(1, 0.03)]), depth=3
        )
    )
