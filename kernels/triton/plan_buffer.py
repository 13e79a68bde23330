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
    """A captured pass's plan: its sizes, and its place among the pass's inputs.

    Unused items and joins, which are zeros, have no rows and do nothing.
    """

    def __init__(self, height: int, config: Config, capacity: PlanCapacity) -> None:
        self.height, self.config, self.capacity = height, config, capacity

    def add_to(self, layout: PacketLayout) -> None:
        """Add the plan's tensors to those of the pass."""
        layout.add(self.capacity.items, ITEM, dtype=torch.int32)
        layout.add(self.capacity.joins, JOIN, dtype=torch.int32)

    def plan(self, items: Tensor, joins: Tensor) -> Plan:
        """Return the plan to capture the pass with."""
        return Plan(self.height, self.config, items, joins, self.capacity.parts)

    def check(self, given: Plan) -> None:
        """Check that another plan can take its place."""
        assert (self.height, self.config) == (given.height, given.config)
        assert len(given.items) <= self.capacity.items
        assert len(given.joins) <= self.capacity.joins
        assert given.num_parts <= self.capacity.parts
