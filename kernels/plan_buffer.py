"""An attention plan in memory that stays in its place, for graphs that are replayed."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.kernels.attention_plan import Plan

Result = TypeVar("Result")


class Capture(Protocol):
    """Hands back the replay of some work, which reads and writes the same memory each time."""

    def __call__(self, work: Callable[[], Result], /) -> Callable[[], Result]: ...


class PlanSize(NamedTuple):
    """What of a plan is fixed in a graph: grids, and the sizes of what is allocated.

    Attributes:
        height: of the tiles.
        items: programs per KV head, up to the next power of two.
        joins: tiles that are cut, likewise; 0 stays.
        parts: that they are cut into, likewise.
    """

    height: int
    items: int
    joins: int
    parts: int

    @staticmethod
    def of(plan: Plan) -> "PlanSize":
        return PlanSize(plan.height, *(_bucket(n) for n in (len(plan.items), len(plan.joins), plan.num_parts)))


class PlanBuffer:
    """Holds any plan of one size.

    Attributes:
        plan: to be handed to the kernel.
    """

    def __init__(self, like: Plan) -> None:
        size, device = PlanSize.of(like), like.items.device

        def empty(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.int32, device=device)

        self.plan = Plan(like.height, like.config, empty(size.items, 7), empty(size.joins, 4), size.parts)

    def fill(self, plan: Plan) -> None:
        """Take over another plan of the same size; items and joins of no rows fill up, and do nothing."""
        for own, given in ((self.plan.items, plan.items), (self.plan.joins, plan.joins)):
            own[: len(given)].copy_(given)
            own[len(given) :].zero_()


def _bucket(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
