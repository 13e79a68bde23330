"""Per-level inputs of the drafting loop, computed before the first level."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.drafting.row_sampling import RowSampling
from specdec.draft_heads.drafting.tree_search import Frontier
from specdec.kernels.triton.attention_plan import AttentionGeometry, Plan
from specdec.kernels.types.adapters import ADAPTED, AdapterRows
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.tree import split_words
from specdec.kernels.types.types import NoiseKey, NoiseRows
from specdec.kernels.types.upload import upload
from specdec.verify.tree_batch import pad_block_tables, slots_of


@dataclass
class DraftLevels:
    """Scratch entries of the nodes expanded at each level, their ancestors, and how their rows sample.

    Attributes:
        depth: most levels.
        width: rows of each pass over a request: nodes that are expanded at each level after the root's, or the rows of
            a block.
        frontier: nodes of a row's frontier, whose children are chosen at each level after the root's.
        block_size: entries a block.
        positions: int64 `[rows * width]`, rotary positions of nodes at depth 1.
        slots: int64 `[depth - 1, rows * width]`, where the head's keys and values of expanded nodes go.
        tables: int64 `[rows, blocks]`.
        own_bits: int64 `[depth - 1, width, words]`: the bit of each scratch entry in ancestor bit sets.
        base: known tokens of each row, on the host.
        noise: noise of the roots.
        sampling: temperatures and filters of the roots; None where a row needs logit edits.
        first: the head's first entry.
        plans: the attention plan of each level but the last; made by the kernel where missing.
        is_block: whether one pass over `width` rows, which see each other, drafts all levels.
        adapters: see `RaggedRows`.
        adapted: the rows of each pass that have an adapter.
    """

    depth: int
    width: int
    frontier: int
    block_size: int
    positions: Tensor
    slots: Tensor
    tables: Tensor
    own_bits: Tensor
    base: Sequence[int]
    noise: NoiseRows
    sampling: RowSampling | None
    first: int
    plans: dict[AttentionGeometry, list[Plan]] = field(default_factory=dict)
    is_block: bool = False
    adapters: Sequence[int] = ()
    adapted: AdapterRows | None = None
    _bits: Tensor | None = None
    _wide: tuple[NoiseRows, RowSampling | None] | None = None

    @staticmethod
    def start(
        rows: Sequence[DraftRow],
        block_size: int,
        own_bits: Tensor,
        keys: Sequence[NoiseKey | None],
        first: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "DraftLevels":
        """Return the inputs of a batch of rows.

        Args:
            dtype: dtype of processed logits.
        """
        levels, width, _ = own_bits.shape
        base = [len(row.token_ids) for row in rows]
        count = levels * width
        slots = [
            slots_of(row.block_table, start, start + count, block_size) for row, start in zip(rows, base, strict=True)
        ]
        by_level = upload(slots, device).view(len(rows), levels, width).transpose(0, 1)
        found = DraftLevels(
            depth=levels + 1,
            width=width,
            frontier=width,
            block_size=block_size,
            positions=upload([start - first for start in base for _ in range(width)], device),
            slots=by_level.flatten(1).contiguous(),
            tables=pad_block_tables([row.block_table for row in rows], device),
            own_bits=own_bits,
            base=base,
            noise=NoiseRows(keys),
            sampling=RowSampling.of([row.context.sampling for row in rows], device, dtype),
            first=first,
            adapters=adapters_of(rows),
        )
        found.adapted = AdapterRows.of(found.outline(1, found.positions))
        return found

    @property
    def num_passes(self) -> int:
        """Passes of the head over nodes."""
        return len(self.own_bits)

    @property
    def num_rows(self) -> int:
        return len(self.tables)

    def restart(self) -> None:
        """Start over from the roots."""
        self._bits = self._wide = None

    def noise_at(self, level: int) -> NoiseRows:
        """Return the noise of each node of a level; the roots are level 0."""
        return self.noise if level == 0 else self._repeated()[0]

    def sampling_at(self, level: int) -> RowSampling | None:
        """Return the temperatures and filters of each node of a level."""
        return self.sampling if level == 0 else self._repeated()[1]

    def _repeated(self) -> tuple[NoiseRows, RowSampling | None]:
        if self._wide is None:
            sampling = self.sampling and self.sampling.repeated(self.frontier)
            self._wide = self.noise.repeated(self.frontier), sampling
        return self._wide

    def ragged(self, frontier: Frontier, level: int) -> RaggedRows:
        """Return what the nodes expanded at `level` see; to be called for levels 1, 2, … in order."""
        num_rows, width = frontier.tokens.shape
        own = self.own_bits[level - 1][None].expand(num_rows, -1, -1)
        if self._bits is None:
            self._bits = own
        else:
            words = own.shape[-1]
            self._bits = self._bits.gather(1, frontier.parents[:, :, None].expand(-1, -1, words)) | own
        rows = self.outline(level, self._bits.reshape(num_rows * width, -1).contiguous())
        for heads, plans in self.plans.items():
            rows.plans[heads] = plans[level - 1]
        rows.plans[ADAPTED] = self.adapted
        return rows

    def outline(self, level: int, ancestors: Tensor) -> RaggedRows:
        """Return the rows of a level with any ancestors."""
        return RaggedRows(
            query_lens=[self.width] * len(self.base),
            lengths=[start + level * self.width for start in self.base],
            tree_starts=self.base,
            block_tables=self.tables,
            visible=self.positions + self.first,
            ancestors=ancestors,
            block_size=self.block_size,
            first=self.first,
            sees_later=self.is_block,
            adapters=self.adapters,
        )

    def block_rows(self, bits: Tensor) -> RaggedRows:
        """Return what the rows of the one pass over a block see.

        Args:
            bits: int64 `[width, words]`, the rows of its block that each row sees.
        """
        rows = self.outline(1, bits.repeat(self.num_rows, 1))
        for heads, plans in self.plans.items():
            rows.plans[heads] = plans[0]
        rows.plans[ADAPTED] = self.adapted
        return rows


def adapters_of(rows: Sequence[DraftRow]) -> Sequence[int]:
    """Return the place of each row's adapter, nothing if no row has one."""
    return [row.adapter for row in rows] if any(row.adapter for row in rows) else ()


def own_bits(levels: int, width: int, device: torch.device) -> Tensor:
    """Return the bit of each scratch entry in ancestor bit sets, int64 `[levels, width, words]`."""
    words = ceil_div(max(levels * width, 1), WORD_BITS)
    bits = [split_words(1 << node, words) for node in range(levels * width)]
    return upload(bits, device).view(levels, width, words)
