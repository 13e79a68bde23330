"""CUDA graphs of the drafting loops, captured once and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.row_sampling import RowSampling
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.draft_heads.drafting.tree_search import TreeSearch
from specdec.kernels.adapters import AdapterBuffer
from specdec.kernels.attention_plan import AttentionGeometry, Plan
from specdec.kernels.integers import next_power_of_2
from specdec.kernels.plan_buffer import Capture, PlanBuffer, PlanSize
from specdec.kernels.tree_attention import plan_of
from specdec.kernels.types import NoiseColumns, NoiseRows

Grown = TypeVar("Grown")


class GraphKey(NamedTuple):
    """The sizes that are fixed in a graph.

    Attributes:
        rows: rows of the batch, padding included.
        depth: levels.
        width: nodes that each row expands at each level.
        plans: the attention plans of each level but the last, of each geometry in turn.
        adapted: tiles of rows with adapters.
    """

    rows: int
    depth: int
    width: int
    plans: tuple[PlanSize, ...]
    adapted: int


class LoopGraphs(Generic[Grown]):
    """Graphs of a whole loop over levels, one per number of rows, each captured when a step first needs it.

    Args:
        grow: the loop, which must wait for nothing.
        capture: `CudaGraphs.capture` on a GPU.
        geometries: geometries of the head's attention, one per window of its layers.
        max_blocks: most blocks of a request.
    """

    def __init__(
        self,
        grow: Callable[[DraftLevels, Tensor], Grown],
        capture: Capture,
        geometries: Sequence[AttentionGeometry],
        max_blocks: int,
    ) -> None:
        self.grow, self.capture, self.geometries, self.max_blocks = grow, capture, geometries, max_blocks
        self.captured: dict[GraphKey, _Graph[Grown]] = {}

    def __call__(self, levels: DraftLevels, hidden: Tensor) -> Grown:
        """Return the candidates of all rows, valid until the next call.

        Args:
            levels: of a padded batch whose rows ask for no more than a temperature and filters.
            hidden: `[rows, hidden_size]` of the rows that are not padding.
        """
        # A plan depends on how long rows are, not on what they see.
        outlines = [levels.outline(level, levels.positions) for level in range(1, levels.num_passes + 1)]
        plans = [plan_of(outline, geometry) for geometry in self.geometries for outline in outlines]
        adapted = AdapterBuffer.size(levels.adapted)
        key = GraphKey(levels.num_rows, levels.depth, levels.width, tuple(map(PlanSize.of, plans)), adapted)
        graph = self.captured.get(key)
        if graph is None:
            graph = self.captured[key] = _Graph(self, levels, hidden, plans)
        return graph(levels, hidden, plans)


class DraftGraphs(NamedTuple):
    """Graphs of both kinds of trees.

    Attributes:
        search: trees of the most probable tokens.
        draw: trees of tokens drawn from q.
        most_drawn_rows: most rows of a graph of drawn trees, as it keeps the distributions they were drawn from.
    """

    search: LoopGraphs[TreeSearch]
    draw: LoopGraphs[TreeDraw]
    most_drawn_rows: int

    @staticmethod
    def padding(rows: int) -> int:
        """Return the number of padding rows up to the next power of two."""
        return next_power_of_2(rows) - rows


class _Graph(Generic[Grown]):
    """A captured loop, and the memory that it reads."""

    def __init__(self, owner: LoopGraphs[Grown], levels: DraftLevels, hidden: Tensor, plans: list[Plan]) -> None:
        rows, device = levels.num_rows, hidden.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        sampled = torch.zeros(rows, dtype=torch.bool, device=device)
        self.noise = NoiseColumns(zeros(rows), zeros(rows), zeros(rows), sampled)
        self.sampling = RowSampling.buffer(rows, device, torch.promote_types(hidden.dtype, torch.float32))
        self.hidden = hidden.new_zeros(rows, hidden.shape[1])
        self.plans = [PlanBuffer(plan) for plan in plans]
        tiles = AdapterBuffer.size(levels.adapted)
        self.adapters = AdapterBuffer(len(levels.positions), tiles, device) if tiles else None
        by_geometry, each = {}, levels.num_passes
        for place, geometry in enumerate(owner.geometries):
            by_geometry[geometry] = [buffer.plan for buffer in self.plans[place * each : (place + 1) * each]]
        self.levels = replace(
            levels,
            positions=torch.zeros_like(levels.positions),
            slots=torch.zeros_like(levels.slots),
            tables=zeros(rows, owner.max_blocks),
            # Not needed: the kernel uses the plans.
            base=(),
            noise=NoiseRows((), self.noise),
            sampling=self.sampling,
            plans=by_geometry,
            adapters=(),
            adapted=None if self.adapters is None else self.adapters.rows,
        )
        self._fill(levels, hidden, plans)
        self._replay: Callable[[], Grown] = owner.capture(lambda: owner.grow(self.levels, self.hidden))

    def __call__(self, levels: DraftLevels, hidden: Tensor, plans: list[Plan]) -> Grown:
        self._fill(levels, hidden, plans)
        return self._replay()

    def _fill(self, levels: DraftLevels, hidden: Tensor, plans: list[Plan]) -> None:
        own = self.levels
        own.positions.copy_(levels.positions)
        own.slots.copy_(levels.slots)
        own.tables[:, : levels.tables.shape[1]].copy_(levels.tables)
        for mine, given in zip(self.noise, levels.noise.columns(hidden.device), strict=True):
            mine.copy_(given)
        assert levels.sampling is not None
        self.sampling.fill(levels.sampling)
        self.hidden[: len(hidden)].copy_(hidden)
        for buffer, plan in zip(self.plans, plans, strict=True):
            buffer.fill(plan)
        if self.adapters is not None:
            assert levels.adapted is not None
            self.adapters.fill(levels.adapted)
