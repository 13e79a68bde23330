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
from specdec.kernels.triton.attention_plan import AttentionGeometry, Plan, chip_of
from specdec.kernels.triton.plan_buffer import Capture, PlanBuffer, PlanCapacity, fill_plan
from specdec.kernels.triton.tree_attention import plan_of
from specdec.kernels.types.adapters import AdapterBuffer, fill_adapted
from specdec.kernels.types.integers import ceil_div, next_power_of_2
from specdec.kernels.types.types import NoiseColumns, NoiseRows

Grown = TypeVar("Grown")


class LoopKey(NamedTuple):
    """Sizes by which a batch finds its captured loop.

    Attributes:
        rows: rows of the batch, padding included.
        adapted: whether some row has an adapter.
    """

    rows: int
    adapted: bool


class LoopGraphs(Generic[Grown]):
    """Graphs of a whole loop over levels, one per number of rows; all share the memory of their inputs.

    Args:
        grow: the loop, which must wait for nothing.
        geometries: geometries of the head's attention, one per window of its layers.
        max_blocks: most blocks of a request.
        adapters: number of adapters, 0 for none.
    """

    def __init__(
        self,
        grow: Callable[[DraftLevels, Tensor], Grown],
        geometries: Sequence[AttentionGeometry],
        max_blocks: int,
        adapters: int,
    ) -> None:
        self.grow, self.geometries, self.max_blocks, self.adapters = grow, geometries, max_blocks, adapters
        self.captured: dict[LoopKey, _DraftGraph[Grown]] = {}
        self._inputs: _Inputs | None = None

    @staticmethod
    def padding(rows: int) -> int:
        """Return the number of padding rows up to the next power of two."""
        return next_power_of_2(rows) - rows

    def has(self, rows: int, *, adapted: bool) -> bool:
        """Return whether a loop is captured for a batch of `rows` rows."""
        return LoopKey(next_power_of_2(rows), adapted) in self.captured

    def capture(self, capture: Capture, levels: DraftLevels, hidden: Tensor) -> None:
        """Capture the loop for batches of as many rows as these.

        Args:
            capture: `CudaGraphs.capture` on a GPU.
            levels: inputs of rows that belong to no request. The first call's are the most.
            hidden: `[rows, hidden_size]` of these rows.
        """
        if self._inputs is None:
            self._inputs = _Inputs(self, levels, hidden)
        key = LoopKey(levels.num_rows, levels.adapted is not None)
        self.captured[key] = _DraftGraph(self, self._inputs, levels, hidden, capture)

    def __call__(self, levels: DraftLevels, hidden: Tensor) -> Grown:
        """Return the candidates of all rows, valid until the next call.

        Args:
            levels: of a padded batch that a graph was captured for, whose rows ask for no more than a temperature and
                filters.
            hidden: `[rows, hidden_size]` of the rows that are not padding.
        """
        return self.captured[LoopKey(levels.num_rows, levels.adapted is not None)](levels, hidden)

    def plans(self, levels: DraftLevels) -> list[Plan]:
        """Return the attention plans of each level but the last, of each geometry in turn."""
        # A plan depends on how long rows are, not on what they see.
        outlines = [levels.outline(level, levels.positions) for level in range(1, levels.num_passes + 1)]
        return [plan_of(outline, geometry) for geometry in self.geometries for outline in outlines]


class DraftGraphs(NamedTuple):
    """Graphs of both kinds of trees.

    Attributes:
        search: trees of the most probable tokens.
        draw: trees of tokens drawn from q.
    """

    search: LoopGraphs[TreeSearch]
    draw: LoopGraphs[TreeDraw]


class _Inputs:
    """Memory that the graphs of a loop read, for the largest batch."""

    def __init__(self, owner: LoopGraphs[Grown], levels: DraftLevels, hidden: Tensor) -> None:
        rows, device = levels.num_rows, hidden.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        sampled = torch.zeros(rows, dtype=torch.bool, device=device)
        self.noise = NoiseColumns(zeros(rows), zeros(rows), zeros(rows), sampled)
        self.sampling = RowSampling.buffer(rows, device, torch.promote_types(hidden.dtype, torch.float32))
        self.hidden = hidden.new_zeros(rows, hidden.shape[1])
        self.positions, self.slots = torch.zeros_like(levels.positions), torch.zeros_like(levels.slots)
        self.tables = zeros(rows, owner.max_blocks)
        self.adapters = AdapterBuffer(len(levels.positions), owner.adapters, device) if owner.adapters else None
        self.plans = [
            [PlanBuffer(_capacity(levels, one, plan), device) for plan in plans]
            for one, plans in _by_geometry(owner, owner.plans(levels)).items()
        ]


class _DraftGraph(Generic[Grown]):
    """A captured loop over the first rows of shared inputs."""

    def __init__(
        self, owner: LoopGraphs[Grown], inputs: _Inputs, levels: DraftLevels, hidden: Tensor, capture: Capture
    ) -> None:
        rows, nodes = levels.num_rows, len(levels.positions)
        assert nodes <= len(inputs.positions), "the largest batch comes first"
        self.owner = owner
        given = owner.plans(levels)
        self.noise = NoiseColumns(*(column[:rows] for column in inputs.noise))
        temperatures, limits = inputs.sampling
        assert temperatures is not None
        assert limits is not None
        self.sampling = RowSampling(temperatures[:rows], limits[:rows])
        self.hidden = inputs.hidden[:rows]
        by_geometry = {
            one: [
                buffer.plan(plan.height, plan.config, _capacity(levels, one, plan))
                for buffer, plan in zip(buffers, plans, strict=True)
            ]
            for buffers, (one, plans) in zip(inputs.plans, _by_geometry(owner, given).items(), strict=True)
        }
        self.plans = [plan for plans in by_geometry.values() for plan in plans]
        is_adapted = inputs.adapters is not None and levels.adapted is not None
        self.adapted = inputs.adapters.rows(nodes) if inputs.adapters is not None and is_adapted else None
        self.levels = replace(
            levels,
            positions=inputs.positions[:nodes],
            slots=inputs.slots[:, :nodes],
            tables=inputs.tables[:rows],
            # Not needed: the kernel uses the plans.
            base=(),
            noise=NoiseRows((), self.noise),
            sampling=self.sampling,
            plans=by_geometry,
            adapters=(),
            adapted=self.adapted,
        )
        self._fill(levels, hidden, given)
        self._replay: Callable[[], Grown] = capture(lambda: owner.grow(self.levels, self.hidden))

    def __call__(self, levels: DraftLevels, hidden: Tensor) -> Grown:
        self._fill(levels, hidden, self.owner.plans(levels))
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
        for kept, plan in zip(self.plans, plans, strict=True):
            fill_plan(kept, plan)
        if self.adapted is not None:
            assert levels.adapted is not None
            fill_adapted(self.adapted, levels.adapted)


def _by_geometry(owner: LoopGraphs[Grown], plans: list[Plan]) -> dict[AttentionGeometry, list[Plan]]:
    """Return `LoopGraphs.plans` by geometry."""
    each = len(plans) // len(owner.geometries)
    return {one: plans[place * each : (place + 1) * each] for place, one in enumerate(owner.geometries)}


def _capacity(levels: DraftLevels, geometry: AttentionGeometry, plan: Plan) -> PlanCapacity:
    """Return the capacity for every plan of these rows, whose tiles have one height as all have as many nodes."""
    tiles = levels.num_rows * ceil_div(levels.width, plan.height // geometry.group)
    return PlanCapacity.of(tiles, geometry.kv_heads, chip_of(levels.tables.device).processors)
