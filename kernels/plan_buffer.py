"""An attention plan in memory that stays in its place, for graphs that are replayed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.attention_plan import Plan
from specdec.kernels.integers import next_power_of_2

# Captures some work, and returns its replay, which reads and writes the same memory each time.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


class PlanSize(NamedTuple):
    """The sizes of a plan that are fixed in a graph: grids and allocations.

    Attributes:
        height: height of the tiles.
        items: programs per KV head, rounded up to a power of two.
        joins: cut tiles, rounded up in the same way; 0 stays.
        parts: parts of the cut tiles, rounded up in the same way.
    """

    height: int
    items: int
    joins: int
    parts: int

    @staticmethod
    def of(plan: Plan) -> "PlanSize":
        counts = (len(plan.items), len(plan.joins), plan.num_parts)
        return PlanSize(plan.height, *(next_power_of_2(count) if count else 0 for count in counts))


class PlanBuffer:
    """Memory for any plan of one size.

    Attributes:
        plan: the plan to pass to the kernel.
    """

    def __init__(self, like: Plan) -> None:
        size, device = PlanSize.of(like), like.items.device

        def empty(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.int32, device=device)

        self.plan = Plan(like.height, like.config, empty(size.items, 7), empty(size.joins, 4), size.parts)

    def fill(self, plan: Plan) -> None:
        """Copy another plan of the same size; unused items and joins have no rows and do nothing."""
        for own, given in ((self.plan.items, plan.items), (self.plan.joins, plan.joins)):
            own[: len(given)].copy_(given)
            own[len(given) :].zero_()
