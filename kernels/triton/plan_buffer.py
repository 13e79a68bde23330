"""Attention plans in buffers at fixed addresses, for replayed CUDA graphs."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specdec.kernels.triton.attention_plan import Config, Plan

# Captures some work, and returns its replay, which reads and writes the same memory each time.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


def most_tiles(rows: int, requests: int, per_tile: int) -> int:
    """Return the largest number of tiles of `per_tile` rows for `rows` rows of at most `requests` requests."""
    requests = min(rows, requests)
    return requests + (rows - requests) // per_tile


class PlanCapacity(NamedTuple):
    """Upper bounds of a plan's sizes, by its number of tiles: the grids and allocations of a captured pass.

    Attributes:
        items: programs per KV head.
        joins: cut tiles.
        parts: parts of the cut tiles.
    """

    items: int
    joins: int
    parts: int

    @staticmethod
    def of(tiles: int, kv_heads: int, processors: int) -> "PlanCapacity":
        """Return the bounds of `Plan.make` for `tiles` tiles.

        `Plan.make` measures the context of a tile in shares. All tiles together have at most processors / kv_heads
        shares. A tile of x shares is cut into max(1, floor(x + 0.5)) parts. So it is cut from 1.5 shares on, and then
        has at most 4 x / 3 parts, at most x more than the one item of an uncut tile.
        """
        # Rounding of x.
        shares = processors / kv_heads + 1e-6
        return PlanCapacity(tiles + math.ceil(shares), math.floor(shares / 1.5), math.floor(shares * 4 / 3))


class PlanBuffer:
    """Buffers at fixed addresses for the plans of one geometry. Graphs of all sizes share them.

    Args:
        capacity: of the largest step.
    """

    def __init__(self, capacity: PlanCapacity, device: torch.device) -> None:
        self._items = torch.zeros(capacity.items, 7, dtype=torch.int32, device=device)
        self._joins = torch.zeros(capacity.joins, 4, dtype=torch.int32, device=device)

    def plan(self, height: int, config: Config, capacity: PlanCapacity) -> Plan:
        """Return the plan to capture a pass of this capacity with."""
        assert capacity.items <= len(self._items)
        return Plan(height, config, self._items[: capacity.items], self._joins[: capacity.joins], capacity.parts)


def fill_plan(own: Plan, given: Plan) -> None:
    """Copy another plan of the same height into a captured one; unused items and joins have no rows and do nothing."""
    assert (own.height, own.config) == (given.height, given.config)
    assert given.num_parts <= own.num_parts
    for kept, new in ((own.items, given.items), (own.joins, given.joins)):
        kept[: len(new)].copy_(new)
        kept[len(new) :].zero_()
