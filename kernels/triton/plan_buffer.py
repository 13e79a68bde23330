"""Attention plans in memory at a fixed address, for replayed CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.triton.attention_plan import ITEM, JOIN, AttentionGeometry, Chip, Plan, PlanCapacity, configs_of
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.upload import Packet, PacketLayout

# Captures some work, and returns its replay, which reads and writes the same memory each time.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]


def most_tiles(rows: int, requests: int, per_tile: int) -> int:
    """Return the largest number of tiles of `per_tile` rows for `rows` rows of at most `requests` requests."""
    requests = min(rows, requests)
    return requests + (rows - requests) // per_tile


class PlanRoom:
    """The plans of captured attention, one for each geometry: their sizes, and their place among a graph's inputs.

    Unused items and joins, which are zeros, have no rows and do nothing.

    Args:
        geometries: geometries of the layers' attention, one per window.
        height: height of the tiles.
        rows: most query rows.
        requests: most requests that they belong to.

    Attributes:
        layout: how the plans lie in memory.
    """

    def __init__(
        self, geometries: Sequence[AttentionGeometry], height: int, rows: int, requests: int, chip: Chip
    ) -> None:
        self.geometries, self.height, self.chip = geometries, height, chip
        self.layout = PacketLayout()
        self._capacities = list[PlanCapacity]()
        for one in geometries:
            tiles = most_tiles(rows, requests, max(height // one.group, 1))
            capacity = PlanCapacity.of(tiles, one.kv_heads, chip.processors)
            self._capacities.append(capacity)
            self.layout.add(capacity.items, ITEM, dtype=torch.int32)
            self.layout.add(capacity.joins, JOIN, dtype=torch.int32)

    def plans(self, memory: Tensor) -> dict[AttentionGeometry, Plan]:
        """Return the plans to capture with, in memory of the layout's size."""
        views = self.layout.views(memory)
        return {
            one: Plan(self.height, configs_of(one, self.chip)[self.height], items, joins, capacity.parts)
            for one, capacity, items, joins in zip(
                self.geometries, self._capacities, views[::2], views[1::2], strict=True
            )
        }

    def add(self, rows: RaggedRows, packet: Packet) -> Tensor:
        """Add the plans of rows to a packet; return them as bytes, which lie as in the layout."""
        memory = packet.begin(self.layout)
        for one, capacity in zip(self.geometries, self._capacities, strict=True):
            configs = configs_of(one, self.chip)
            plan = Plan.make(rows, one, configs, self.chip.processors, self.height, packet, capacity)
            assert len(plan.items) <= capacity.items
            assert len(plan.joins) <= capacity.joins
            assert plan.num_parts <= capacity.parts
        return memory
