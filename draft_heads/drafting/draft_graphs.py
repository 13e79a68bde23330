"""CUDA graphs of drafting, captured once and replayed: the head reads new tokens, then runs its loop over levels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.draft_heads.drafting.tree_search import Searched
from specdec.kernels.triton.attention_plan import (
    AttentionGeometry,
    Capture,
    PlanRoom,
    best_height,
    cheapest_height,
    chip_of,
    configs_of,
    seen_more,
)
from specdec.kernels.types.adapters import ADAPTED, AdapterBuffer, AdapterRows, fill_adapted
from specdec.kernels.types.device_tables import DeviceTables
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div, next_power_of_2
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.upload import Packet, PacketLayout, copy_parts
from specdec.verify.tree_batch import TreeBatch, captured_batch, row_layout

Grown = TypeVar("Grown")


class Unread(NamedTuple):
    """The tokens that a graph reads before it drafts, with padding; on the device once their packet is sent.

    Attributes:
        batch: the tokens.
        accepted: int64 `[rows]`, how many drafts of each row a step has accepted: its last token lies as many places
            behind the first that may be the last. 0 where the host knows the tokens.
        images: their numbers as bytes, which lie in the packet as in the graph's inputs.
    """

    batch: TreeBatch
    accepted: Tensor
    images: Sequence[Tensor]


class LoopGraphs(Generic[Grown]):
    """Graphs of drafting, one per number of rows; all share the memory of their inputs.

    A graph reads as many tokens of each row as a step may bring, `DraftShape.tokens`. Where they are fewer, tokens in
    null blocks take their place.

    Args:
        grow: reads a batch, runs the loop behind the packed rows that hold the last tokens, and waits for nothing.
        geometries: geometries of the head's attention, one per window of its layers.
        tables: where all graphs find block tables.
        adapters: number of adapters, 0 for none.
        shape: bounds of a tree.
        block_size: entries a block.
        first: the head's first entry.
    """

    def __init__(
        self,
        grow: Callable[[TreeBatch, Tensor, DraftLevels], Grown],
        geometries: Sequence[AttentionGeometry],
        tables: DeviceTables,
        adapters: int,
        shape: DraftShape,
        block_size: int,
        first: int,
    ) -> None:
        self.grow, self.geometries, self.tables, self.adapters = grow, geometries, tables, adapters
        self.tokens, self.block_size, self.first = shape.tokens, block_size, first
        # By the rows of a batch, padding included, and whether some row has an adapter.
        self.captured: dict[tuple[int, bool], _DraftGraph[Grown]] = {}
        self._chip = chip_of(tables.memory.device)
        self._rooms: dict[int, PlanRoom] = {}
        self._inputs: _Inputs | None = None

    @staticmethod
    def padding(rows: int) -> int:
        """Return the number of padding rows up to the next power of two."""
        return next_power_of_2(rows) - rows

    def has(self, rows: int, *, adapted: bool) -> bool:
        """Return whether drafting is captured for a batch of `rows` rows."""
        return (next_power_of_2(rows), adapted) in self.captured

    def pack(self, parts: Sequence[TreeRow], firsts: Sequence[int], packet: Packet, coming: int = 0) -> Unread:
        """Pack the tokens to be read as a graph takes them.

        Args:
            parts: of each row, at most `tokens` tokens.
            firsts: see `RaggedRows`.
            coming: how many drafts a step may accept, where the tokens are those that it brings.
        """
        rows, null = next_power_of_2(len(parts)), self.tables.null_table
        left, room = rows * self.tokens - sum(len(part.tokens) for part in parts), self._null_room
        padding = [TreeRow([0] * min(room, left - start), self.first, null, 1) for start in range(0, left, room)]
        packed = TreeBatch.pack_into(
            packet,
            [*parts, *padding],
            HostTrees.empty(len(parts) + len(padding)),
            self.block_size,
            row_layout(rows * self.tokens, 1, self.first),
            first=self.first,
            firsts=[*firsts, *[self.first] * len(padding)],
            device_tables=self.tables,
        )
        assert packed.image is not None
        batch, plans = packed.batch, self.reading_room(rows).add(packed.batch.rows, packet)
        places = packet.begin(_place_layout(rows))
        starts = zip(batch.row_starts, parts, strict=False)
        packet.add([start + len(part.tokens) - 1 - coming for start, part in starts], least=rows)
        accepted = packet.add([0] * len(parts), least=rows)
        return Unread(batch, accepted, [packed.image, plans, places])

    @property
    def _null_room(self) -> int:
        """Return the entries of a chain of padding."""
        return len(self.tables.null_table) * self.block_size - self.first

    def reading_room(self, rows: int) -> PlanRoom:
        """Return the room of the attention plans of reading."""
        if rows not in self._rooms:
            one, tokens = self.geometries[0], rows * self.tokens
            height = cheapest_height([self.tokens], [self.tokens], one.group, configs_of(one, self._chip))
            chains = rows + ceil_div(tokens, self._null_room)
            self._rooms[rows] = PlanRoom(self.geometries, height, tokens, chains, self._chip)
        return self._rooms[rows]

    def level_room(self, levels: DraftLevels) -> PlanRoom:
        """Return the room of the attention plans of all levels but the last."""
        # Tiles have one height, as all rows have as many nodes.
        one = self.geometries[0]
        height = best_height(levels.lengths(), one.group, configs_of(one, self._chip))
        rows = levels.num_rows
        return PlanRoom(self.geometries, height, rows * levels.width, rows, self._chip)

    def capture(self, capture: Capture, unread: Unread, levels: DraftLevels, packet: Packet) -> None:
        """Capture drafting for batches of as many rows as these.

        Args:
            capture: `CudaGraphs.capture` on a GPU.
            unread: of rows that belong to no request. The first call's are the most.
            levels: inputs of the same rows.
            packet: takes the other inputs; it is sent.
        """
        if self._inputs is None:
            self._inputs = _Inputs(self, levels)
        key = levels.num_rows, levels.adapted is not None
        graph = self.captured[key] = _DraftGraph(self, self._inputs, levels)
        fill = graph.filling(unread, levels, packet)
        packet.send()
        fill()
        graph.replay = capture(graph.run)

    def run_of(self, unread: Unread, levels: DraftLevels, packet: Packet) -> Callable[[], Grown]:
        """Return the captured drafting, which may run once the packet is sent.

        It returns the candidates of all rows, padding included, valid until the next call.

        Args:
            levels: of a padded batch that a graph was captured for, whose rows ask for no more than a temperature and
                filters.
        """
        graph = self.captured[levels.num_rows, levels.adapted is not None]
        fill = graph.filling(unread, levels, packet)

        def run() -> Grown:
            fill()
            return graph.replay()

        return run


class DraftGraphs(NamedTuple):
    """Graphs of both kinds of trees.

    Attributes:
        search: trees of the most probable tokens.
        draw: trees of tokens drawn from q.
    """

    search: LoopGraphs[Searched]
    draw: LoopGraphs[TreeDraw]


class _Inputs:
    """Memory that the graphs of a loop read, for the largest batch.

    Attributes:
        numbers: bytes of all inputs but adapted rows; see `_layouts`.
        read: adapted rows of reading; None without adapters.
        drafted: those of each level.
    """

    def __init__(self, owner: LoopGraphs[Grown], levels: DraftLevels) -> None:
        device = levels.tables.device
        size = sum(layout.size for layout in _layouts(owner, levels))
        self.numbers = torch.zeros(size, dtype=torch.uint8, device=device)
        self.read = self.drafted = None
        if owner.adapters:
            self.read = AdapterBuffer(levels.num_rows * owner.tokens, owner.adapters, device)
            self.drafted = AdapterBuffer(len(levels.positions), owner.adapters, device)


class _DraftGraph(Generic[Grown]):
    """Captured drafting of the first rows of shared inputs."""

    def __init__(self, owner: LoopGraphs[Grown], inputs: _Inputs, levels: DraftLevels) -> None:
        self._owner, tokens, self._room = owner, levels.num_rows * owner.tokens, owner.level_room(levels)
        layouts = _layouts(owner, levels)
        sizes = [layout.size for layout in layouts]
        assert sum(sizes) <= len(inputs.numbers), "the largest batch comes first"
        self._numbers = inputs.numbers[: sum(sizes)]
        reading, plans, places, level, level_plans = self._numbers.split_with_sizes(sizes)
        self.batch = captured_batch(layouts[0], reading, owner.tables.memory, owner.block_size, owner.first)
        rows = self.batch.rows
        rows.plans.update(owner.reading_room(levels.num_rows).plans(plans).items())
        self._read = self._drafted = None
        if inputs.read is not None and inputs.drafted is not None and levels.adapted is not None:
            self._read, self._drafted = inputs.read.rows(tokens), inputs.drafted.rows(len(levels.positions))
        rows.plans[ADAPTED] = self._read
        self._last, self._accepted = layouts[2].views(places)
        self._first_plans = self._room.plans(level_plans)
        self._more = seen_more(levels.num_passes, levels.width, level_plans.device)
        self.levels = replace(
            levels.placed(layouts[3].views(level)),
            tables=owner.tables.memory,
            table_rows=(),
            # Not needed: the kernel uses the plans.
            base=(),
            adapters=(),
            adapted=self._drafted,
        )
        self.replay: Callable[[], Grown]

    def run(self) -> Grown:
        """Draft over the inputs as they are, kernel by kernel; captured, it becomes `replay`."""
        plans = {one: plan.of_levels(self._more) for one, plan in self._first_plans.items()}
        return self._owner.grow(self.batch, self._last + self._accepted, replace(self.levels, plans=plans))

    def filling(self, unread: Unread, levels: DraftLevels, packet: Packet) -> Callable[[], None]:
        """Return what sets the inputs, once the packet is sent."""
        assert levels.image is not None
        # A plan depends on how long rows are, not on what they see.
        plans = self._room.add(levels.lengths(), packet)
        images = [*unread.images, levels.image, plans]
        adapted = AdapterRows.of(unread.batch.rows)

        def fill() -> None:
            copy_parts(images, self._numbers)
            fill_adapted(self._read, adapted)
            fill_adapted(self._drafted, levels.adapted)

        return fill


def _layouts(owner: LoopGraphs[Grown], levels: DraftLevels) -> list[PacketLayout]:
    """Return how the inputs lie one behind the other: tokens to be read and plans, last tokens, levels and plans."""
    rows = levels.num_rows
    return [
        row_layout(rows * owner.tokens, 1, owner.first),
        owner.reading_room(rows).layout,
        _place_layout(rows),
        levels.layout(),
        owner.level_room(levels).layout,
    ]


def _place_layout(rows: int) -> PacketLayout:
    """Return how the packed row of the first token that may be the last one lies, and the number behind it."""
    layout = PacketLayout()
    layout.add(rows)
    layout.add(rows)
    return layout
