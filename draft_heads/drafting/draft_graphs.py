"""CUDA graphs of the drafting loops, captured once and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.draft_heads.drafting.tree_search import Searched
from specdec.kernels.triton.attention_plan import (
    AttentionGeometry,
    Plan,
    PlanCapacity,
    best_height,
    chip_of,
    configs_of,
)
from specdec.kernels.triton.plan_buffer import Capture, PlanRoom
from specdec.kernels.types.adapters import AdapterBuffer, fill_adapted
from specdec.kernels.types.device_tables import DeviceTables
from specdec.kernels.types.integers import ceil_div, next_power_of_2
from specdec.kernels.types.upload import Packet, PacketLayout, copy_parts
from specdec.verify.pass_graphs import PassGraphs

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
        tables: where all graphs find block tables.
        adapters: number of adapters, 0 for none.
    """

    def __init__(
        self,
        grow: Callable[[DraftLevels, Tensor], Grown],
        geometries: Sequence[AttentionGeometry],
        tables: DeviceTables,
        adapters: int,
    ) -> None:
        self.grow, self.geometries, self.tables, self.adapters = grow, geometries, tables, adapters
        self.captured: dict[LoopKey, _DraftGraph[Grown]] = {}
        self._inputs: _Inputs | None = None

    @staticmethod
    def padding(rows: int) -> int:
        """Return the number of padding rows up to the next power of two."""
        return next_power_of_2(rows) - rows

    def has(self, rows: int, *, adapted: bool) -> bool:
        """Return whether a loop is captured for a batch of `rows` rows."""
        return LoopKey(next_power_of_2(rows), adapted) in self.captured

    def capture(self, capture: Capture, levels: DraftLevels, packet: Packet, read: Callable[[], Tensor]) -> None:
        """Capture the loop for batches of as many rows as these.

        Args:
            capture: `CudaGraphs.capture` on a GPU.
            levels: inputs of rows that belong to no request. The first call's are the most.
            packet: takes the other inputs; it is sent.
            read: returns `[rows, hidden_size]` of these rows, once it is sent.
        """
        if self._inputs is None:
            self._inputs = _Inputs(self, levels)
        key = LoopKey(levels.num_rows, levels.adapted is not None)
        graph = self.captured[key] = _DraftGraph(self, self._inputs, levels)
        fill = graph.filling(levels, packet)
        packet.send()
        hidden = read()
        self._inputs.take(hidden)
        graph.capture(capture, fill, hidden)

    def loop_of(self, levels: DraftLevels, packet: Packet) -> Callable[[Tensor], Grown]:
        """Return the captured loop, which may run once the packet is sent.

        It takes `[rows, hidden_size]` of the rows that are not padding, and returns the candidates of all rows, valid
        until the next call.

        Args:
            levels: of a padded batch that a graph was captured for, whose rows ask for no more than a temperature and
                filters.
        """
        return self.captured[LoopKey(levels.num_rows, levels.adapted is not None)].loop_of(levels, packet)

    def rooms(self, levels: DraftLevels) -> list[PlanRoom]:
        """Return the room of the attention plans of all levels but the last, for each geometry."""
        rooms = []
        for one in self.geometries:
            chip = chip_of(levels.tables.device)
            configs = configs_of(one, chip)
            # Tiles have one height, as all rows have as many nodes.
            height = best_height(levels.lengths(1), one.group, configs)
            tiles = levels.num_rows * ceil_div(levels.width, height // one.group)
            capacity = PlanCapacity.of(tiles, one.kv_heads, chip.processors)
            rooms.append(PlanRoom(height, configs[height], capacity, levels.num_passes))
        return rooms


class DraftGraphs(NamedTuple):
    """Graphs of the head's reading, and of both kinds of trees.

    Attributes:
        reading: the pass over tokens to be read.
        search: trees of the most probable tokens.
        draw: trees of tokens drawn from q.
    """

    reading: PassGraphs
    search: LoopGraphs[Searched]
    draw: LoopGraphs[TreeDraw]


class _Inputs:
    """Memory that the graphs of a loop read, for the largest batch.

    Attributes:
        numbers: bytes of `level_layout`, and behind them of the plans.
    """

    def __init__(self, owner: LoopGraphs[Grown], levels: DraftLevels) -> None:
        device = levels.tables.device
        self.hidden: Tensor | None = None
        size = levels.layout().size + _plan_layout(owner.rooms(levels)).size
        self.numbers = torch.zeros(size, dtype=torch.uint8, device=device)
        self.adapters = AdapterBuffer(len(levels.positions), owner.adapters, device) if owner.adapters else None

    def take(self, hidden: Tensor) -> None:
        """Make room for hidden states like those of the largest batch, if there is none."""
        if self.hidden is None:
            self.hidden = torch.zeros_like(hidden)


class _DraftGraph(Generic[Grown]):
    """A captured loop over the first rows of shared inputs."""

    def __init__(self, owner: LoopGraphs[Grown], inputs: _Inputs, levels: DraftLevels) -> None:
        self.owner, self._inputs = owner, inputs
        layout, self.rooms = levels.layout(), owner.rooms(levels)
        self._plan_layout = _plan_layout(self.rooms)
        self._numbers = inputs.numbers[: layout.size + self._plan_layout.size]
        assert len(self._numbers) == layout.size + self._plan_layout.size, "the largest batch comes first"
        views = self._plan_layout.views(self._numbers[layout.size :])
        given = zip(owner.geometries, self.rooms, views[::2], views[1::2], strict=True)
        is_adapted = inputs.adapters is not None and levels.adapted is not None
        nodes = len(levels.positions)
        self.adapted = inputs.adapters.rows(nodes) if inputs.adapters is not None and is_adapted else None
        self.levels = replace(
            levels.placed(layout.views(self._numbers[: layout.size])),
            # Not needed: the kernel uses the plans.
            base=(),
            table_rows=(),
            plans={one: room.plans(items, joins) for one, room, items, joins in given},
            adapters=(),
            adapted=self.adapted,
        )
        self._replay: Callable[[], Grown]

    def capture(self, capture: Capture, fill: Callable[[Tensor], None], hidden: Tensor) -> None:
        """Capture the loop over these inputs."""
        fill(hidden)
        self._replay = capture(lambda: self.owner.grow(self.levels, self.hidden))

    def loop_of(self, levels: DraftLevels, packet: Packet) -> Callable[[Tensor], Grown]:
        """See `LoopGraphs.loop_of`."""
        fill = self.filling(levels, packet)

        def run(hidden: Tensor) -> Grown:
            fill(hidden)
            return self._replay()

        return run

    @property
    def hidden(self) -> Tensor:
        assert self._inputs.hidden is not None
        return self._inputs.hidden[: self.levels.num_rows]

    def filling(self, levels: DraftLevels, packet: Packet) -> Callable[[Tensor], None]:
        """Return what sets the inputs, once the packet is sent, to these and to hidden states."""
        given = levels.image
        assert given is not None
        plans = packet.begin(self._plan_layout)
        # A plan depends on how long rows are, not on what they see.
        rows = levels.lengths(1)
        for one, room in zip(self.owner.geometries, self.rooms, strict=True):
            chip = chip_of(levels.tables.device)
            given_rows = (rows, one, configs_of(one, chip), chip.processors, room.height, packet, room.capacity)
            for plan in Plan.of_levels(room.levels, levels.width, *given_rows):
                room.check(plan)

        def fill(hidden: Tensor) -> None:
            copy_parts([given, plans], self._numbers)
            self.hidden[: len(hidden)].copy_(hidden)
            if self.adapted is not None:
                assert levels.adapted is not None
                fill_adapted(self.adapted, levels.adapted)

        return fill


def _plan_layout(rooms: Sequence[PlanRoom]) -> PacketLayout:
    layout = PacketLayout()
    for room in rooms:
        room.add_to(layout)
    return layout
