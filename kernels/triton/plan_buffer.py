"""Attention plans in memory at a fixed address, for replayed CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.triton.attention_plan import ITEM, JOIN, Config, Plan, PlanCapacity
from specdec.kernels.types.upload import PacketLayout

# Captures some work, and returns its replay, which reads and writes the same memory each time.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


def most_tiles(rows: int, requests: int, per_tile: int) -> int:
    """Return the largest number of tiles of `per_tile` rows for `rows` rows of at most `requests` requests."""
    requests = min(rows, requests)
    return requests + (rows - requests) // per_tile


class PlanRoom:
    """The plans of a captured pass, or of the levels of a captured loop: their sizes, and their place among its inputs.

    Unused items and joins, which are zeros, have no rows and do nothing.
    """

    def __init__(self, height: int, config: Config, capacity: PlanCapacity, levels: int = 1) -> None:
        self.height, self.config, self.capacity, self.levels = height, config, capacity, levels

    def add_to(self, layout: PacketLayout) -> None:
        """Add the plans' tensors to those of the pass."""
        layout.add(self.levels, self.capacity.items, ITEM, dtype=torch.int32)
        layout.add(self.capacity.joins, JOIN, dtype=torch.int32)

    def plans(self, items: Tensor, joins: Tensor) -> list[Plan]:
        """Return the plans to capture the pass with, one of each level."""
        return [Plan(self.height, self.config, own, joins, self.capacity.parts) for own in items.unbind(0)]

    def check(self, given: Plan) -> None:
        """Check that another plan can take its place."""
        assert (self.height, self.config) == (given.height, given.config)
        assert len(given.items) <= self.capacity.items
        assert len(given.joins) <= self.capacity.joins
        assert given.num_parts <= self.capacity.parts
