"""Per-level inputs of the drafting loop, computed before the first level."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.triton.attention_plan import AttentionGeometry, Plan
from specdec.kernels.types.adapters import ADAPTED, AdapterRows
from specdec.kernels.types.device_tables import DeviceTables, tables_of
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.tree import split_words
from specdec.kernels.types.tree_search import Frontier
from specdec.kernels.types.types import NoiseColumns, NoiseKey, NoiseRows
from specdec.kernels.types.upload import Packet, PacketLayout, upload
from specdec.verify.sampling import Sampling
from specdec.verify.tree_batch import slots_of


class RowSampling(NamedTuple):
    """Temperatures and filters of rows without logit edits: `processed_logits` as operations on the whole batch.

    Attributes:
        temperatures: `[rows, 1]` to divide logits by, in the dtype of processed logits; None where all are 1.
        limits: `[rows, 3]` of the same dtype, min_p, top_k and top_p; None where no row filters.
    """

    temperatures: Tensor | None
    limits: Tensor | None

    @staticmethod
    def of(
        samplings: Sequence[Sampling], dtype: torch.dtype, packet: Packet, *, for_graph: bool
    ) -> "RowSampling | None":
        """Return the parameters of rows, once the packet is sent; None where a row needs logit edits.

        Args:
            for_graph: whether both are wanted, also where they change nothing.
        """
        if any(s.edits for s in samplings):
            assert not for_graph, "rows with logit edits are drafted without a graph"
            return None
        temperatures = limits = None
        if for_graph or any(s.divisor != 1 for s in samplings):
            temperatures = packet.add([[s.divisor] for s in samplings], dtype)
        if for_graph or any(s.filters for s in samplings):
            limits = packet.add([s.limits for s in samplings], dtype)
        return RowSampling(temperatures, limits)

    def repeated(self, times: int) -> "RowSampling":
        """Return each row's parameters `times` times in turn."""
        return RowSampling(*(part if part is None else part.repeat_interleave(times, 0) for part in self))

    def process(self, logits: Tensor, kernels: KernelSet) -> Tensor:
        """Return processed logits `[rows, vocab]` in float32, float64 for float64; the input may be changed."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperatures is not None:
            scores = scores / self.temperatures
        return scores if self.limits is None else kernels.filter_logits(scores, self.limits)


@dataclass
class DraftLevels:
    """Scratch entries of the nodes expanded at each level, their ancestors, and how their rows sample, for one loop.

    Attributes:
        depth: most levels.
        width: rows of each pass over a request: nodes that are expanded at each level after the root's, or the rows of
            a block.
        frontier: nodes of a row's frontier, whose children are chosen at each level after the root's.
        block_size: entries a block.
        positions: int64 `[rows * width]`, rotary positions of nodes at depth 1.
        slots: int64 `[depth - 1, rows * width]`, where the head's keys and values of expanded nodes go.
        tables: int64 `[tables, blocks]`.
        table_rows: see `RaggedRows`.
        own_bits: int64 `[depth - 1, width, words]`: the bit of each scratch entry in ancestor bit sets.
        base: first scratch entry of each row, on the host.
        noise: noise of the roots.
        sampling: temperatures and filters of the roots; None where a row needs logit edits.
        first: the head's first entry.
        plans: the attention plan of each level but the last; made by the kernel where missing.
        is_block: whether one pass over `width` rows, which see each other, drafts all levels.
        adapters: see `RaggedRows`.
        adapted: the rows of each pass that have an adapter.
        ahead: see `start`.
        image: the inputs as bytes, as `level_layout` says, once their packet is sent; None where they are not for a
            graph.
    """

    depth: int
    width: int
    frontier: int
    block_size: int
    positions: Tensor
    slots: Tensor
    tables: Tensor
    table_rows: Sequence[int]
    own_bits: Tensor
    base: Sequence[int]
    noise: NoiseRows
    sampling: RowSampling | None
    first: int
    plans: dict[AttentionGeometry, list[Plan]] = field(default_factory=dict)
    is_block: bool = False
    adapters: Sequence[int] = ()
    adapted: AdapterRows | None = None
    image: Tensor | None = None
    ahead: int = 0

    @staticmethod
    def start(
        rows: Sequence[DraftRow],
        depth: int,
        frontier: int,
        block_size: int,
        own_bits: Tensor,
        keys: Sequence[NoiseKey | None],
        first: int,
        dtype: torch.dtype,
        packet: Packet,
        *,
        graph_tables: DeviceTables | None = None,
        is_block: bool = False,
        ahead: int = 0,
    ) -> "DraftLevels":
        """Return the inputs of a batch of rows, which are there once the packet is sent.

        Args:
            depth, frontier, is_block: see `DraftLevels`, as other arguments of its names.
            dtype: dtype of processed logits.
            graph_tables: where graphs find block tables, if the inputs are copied into a graph's; see `image`. No row
                then needs logit edits.
            ahead: entries between the known tokens and the scratch ones, for the tokens that the step brings, 0 where
                all are known. The inputs are those for one token; see `own_positions`.
        """
        levels, width, _ = own_bits.shape
        known = [len(row.token_ids) for row in rows]
        base = [length + ahead for length in known]
        count = levels * width
        slots = [
            slots_of(row.block_table, start, start + count, block_size) for row, start in zip(rows, base, strict=True)
        ]
        by_level = [
            [slot for own in slots for slot in own[level * width : (level + 1) * width]] for level in range(levels)
        ]
        samplings = [row.context.sampling for row in rows]
        for_graph = graph_tables is not None
        tables, table_rows = tables_of([row.block_table for row in rows], packet, graph_tables)
        brought = 1 if ahead else 0
        if brought:
            keys = [key and key._replace(position=key.position + brought) for key in keys]
        image = packet.begin(level_layout(len(rows), width, levels, dtype)) if for_graph else None
        found = DraftLevels(
            depth=depth,
            width=width,
            frontier=frontier,
            block_size=block_size,
            positions=packet.add([length + brought - first for length in known for _ in range(width)]),
            slots=packet.add(by_level).view(levels, len(rows) * width),
            tables=tables,
            table_rows=table_rows,
            own_bits=own_bits,
            base=base,
            noise=NoiseRows(keys, NoiseColumns.of(keys, packet)) if for_graph else NoiseRows(keys).send_with(packet),
            sampling=RowSampling.of(samplings, dtype, packet, for_graph=for_graph),
            first=first,
            is_block=is_block,
            adapters=adapters_of(rows),
            image=image,
            ahead=ahead,
        )
        found.adapted = AdapterRows.of(found.lengths())
        return found

    def layout(self) -> PacketLayout:
        """Return how the inputs lie in their image."""
        assert self.sampling is not None
        assert self.sampling.temperatures is not None
        return level_layout(self.num_rows, self.width, self.num_passes, self.sampling.temperatures.dtype)

    def placed(self, views: Sequence[Tensor]) -> "DraftLevels":
        """Return the inputs in other memory, by the views of their layout."""
        positions, slots, seeds, indices, outputs, sampled, temperatures, limits = views
        return replace(
            self,
            positions=positions,
            slots=slots,
            noise=NoiseRows((), NoiseColumns(seeds, indices, outputs, sampled)),
            sampling=RowSampling(temperatures, limits),
            # It holds its packet's memory.
            image=None,
        )

    @property
    def num_passes(self) -> int:
        """Passes of the head over nodes."""
        return len(self.own_bits)

    @property
    def num_rows(self) -> int:
        return len(self.positions) // self.width

    @property
    def own_positions(self) -> tuple[Tensor, Tensor]:
        """Rotary positions, int64 `[rows, width]`, and noise positions, int64 `[rows]`, of the nodes below the roots.

        They are those behind one new token; the number of accepted drafts is added once the device knows it.
        """
        noise = self.noise.on_device
        assert noise is not None
        return self.positions.view(self.num_rows, self.width), noise.positions

    @cached_property
    def _repeated(self) -> tuple[NoiseRows, RowSampling | None]:
        """Noise and sampling of the nodes of a frontier."""
        return self.noise.repeated(self.frontier), self.sampling and self.sampling.repeated(self.frontier)

    @cached_property
    def _later(self) -> Tensor:
        return torch.arange(self.depth, device=self.positions.device)[:, None]

    @cached_property
    def _rotary(self) -> Tensor:
        """Rotary positions of the nodes of all levels, int64 `[depth, rows * width]`."""
        return self.positions + self._later

    @cached_property
    def _outputs(self) -> Tensor | None:
        """Output positions behind the nodes of all levels, int64 `[depth, rows * frontier]`; None on the host."""
        noise = self._repeated[0].on_device
        return None if noise is None else noise.positions + self._later

    @cached_property
    def _visible(self) -> Tensor:
        """Entries before a tree, which all of its nodes see, int64 `[rows * width]`."""
        return self.positions + self.first

    def noise_at(self, level: int) -> NoiseRows:
        """Return the noise of each node of a level; the roots are level 0."""
        return self.noise if level == 0 else self._repeated[0]

    def noise_after(self, level: int) -> NoiseRows:
        """Return the noise of the output position after each node of a level; the roots are level 0."""
        if level == 0:
            return self.noise
        return self._repeated[0].later(level, None if self._outputs is None else self._outputs[level])

    def positions_at(self, level: int) -> Tensor:
        """Return the rotary positions of the nodes expanded at `level`, int64 `[rows * width]`."""
        return self._rotary[level - 1]

    def own_bits_at(self, level: int) -> Tensor | None:
        """Return the bits of the entries of nodes expanded at `level`; None where no pass of their own follows."""
        return None if self.is_block or level > self.num_passes else self.own_bits[level - 1]

    def sampling_at(self, level: int) -> RowSampling | None:
        """Return the temperatures and filters of each node of a level."""
        return self.sampling if level == 0 else self._repeated[1]

    def ragged(self, frontier: Frontier, level: int) -> RaggedRows:
        """Return what the nodes expanded at `level` see."""
        assert frontier.ancestors is not None
        return self._seeing(level, frontier.ancestors.flatten(0, 1).contiguous())

    def lengths(self) -> RaggedRows:
        """Return the first pass's rows by their lengths alone: what they see has no meaning, and need not be there."""
        return self._rows(1, self.positions, self.positions)

    def _seeing(self, level: int, ancestors: Tensor) -> RaggedRows:
        rows = self._rows(level, self._visible, ancestors)
        for heads, plans in self.plans.items():
            rows.plans[heads] = plans[level - 1]
        rows.plans[ADAPTED] = self.adapted
        return rows

    def _rows(self, level: int, visible: Tensor, ancestors: Tensor) -> RaggedRows:
        return RaggedRows(
            query_lens=[self.width] * len(self.base),
            lengths=[start + level * self.width for start in self.base],
            tree_starts=self.base,
            block_tables=self.tables,
            visible=visible,
            ancestors=ancestors,
            block_size=self.block_size,
            first=self.first,
            gap=max(self.ahead - 1, 0),
            sees_later=self.is_block,
            adapters=self.adapters,
            table_rows=self.table_rows,
        )

    def block_rows(self, bits: Tensor) -> RaggedRows:
        """Return what the rows of the one pass over a block see.

        Args:
            bits: int64 `[width, words]`, the rows of its block that each row sees.
        """
        return self._seeing(1, bits.repeat(self.num_rows, 1))


def level_layout(rows: int, width: int, levels: int, dtype: torch.dtype) -> PacketLayout:
    """Return how `DraftLevels.start` adds what a graph takes: positions, slots, noise, temperatures and limits."""
    layout = PacketLayout()
    layout.add(rows * width)
    layout.add(levels, rows * width)
    for _ in range(3):
        layout.add(rows)
    layout.add(rows, dtype=torch.bool)
    layout.add(rows, 1, dtype=dtype)
    layout.add(rows, 3, dtype=dtype)
    return layout


def adapters_of(rows: Sequence[DraftRow]) -> Sequence[int]:
    """Return the place of each row's adapter, nothing if no row has one."""
    return [row.adapter for row in rows] if any(row.adapter for row in rows) else ()


def own_bits(levels: int, width: int, device: torch.device) -> Tensor:
    """Return the bit of each scratch entry in ancestor bit sets, int64 `[levels, width, words]`."""
    words = ceil_div(max(levels * width, 1), WORD_BITS)
    bits = [split_words(1 << node, words) for node in range(levels * width)]
    return upload(bits, device).view(levels, width, words)
