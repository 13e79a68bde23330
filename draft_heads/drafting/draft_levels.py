"""What drafting goes by, level after level, settled before the first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.drafting.row_sampling import RowSampling
from specdec.draft_heads.drafting.tree_search import Frontier
from specdec.kernels.attention_plan import AttentionGeometry, Plan
from specdec.kernels.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types import NoiseKey, NoiseRows
from specdec.kernels.upload import upload
from specdec.verify.tree import split_words
from specdec.verify.tree_batch import pad_block_tables, slots_of


@dataclass
class DraftLevels:
    """Scratch entries of the nodes expanded at each level, who is whose ancestor among them, and how rows sample.

    Attributes:
        depth: levels at most.
        width: nodes expanded of a row at each level but the root's.
        block_size: entries a block.
        positions: int64 `[rows * width]`, rotary positions of nodes at depth 1.
        slots: int64 `[depth - 1, rows * width]`, where the head's keys and values of expanded nodes go.
        tables: int64 `[rows, blocks]`.
        own_bits: int64 `[depth - 1, width, words]`: of each scratch entry, the bit that stands for itself.
        base: known tokens of each row, host side.
        noise: of each row's first level.
        sampling: of the roots; None where a row asks for more than a temperature and filters.
        first: the head's first entry.
        plans: per level but the last, how attention goes through it; made by its kernel where there is none.
    """

    depth: int
    width: int
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
        """Before the first level.

        Args:
            dtype: of processed logits.
        """
        levels, width, _ = own_bits.shape
        base = [len(row.token_ids) for row in rows]
        count = levels * width
        slots = [
            slots_of(row.block_table, start, start + count, block_size) for row, start in zip(rows, base, strict=True)
        ]
        by_level = upload(slots, device).view(len(rows), levels, width).transpose(0, 1)
        return DraftLevels(
            depth=levels + 1,
            width=width,
            block_size=block_size,
            positions=upload([start - first for start in base for _ in range(width)], device),
            slots=by_level.flatten(1).contiguous(),
            tables=pad_block_tables([row.block_table for row in rows], device),
            own_bits=own_bits,
            base=base,
            noise=NoiseRows(keys),
            sampling=RowSampling.of([row.context.sampling for row in rows], device, dtype),
            first=first,
        )

    @property
    def num_rows(self) -> int:
        return len(self.tables)

    def restart(self) -> None:
        """Go on from the roots once more."""
        self._bits = self._wide = None

    def noise_at(self, level: int) -> NoiseRows:
        """Of each node of a level; the roots are level 0."""
        return self.noise if level == 0 else self._repeated()[0]

    def sampling_at(self, level: int) -> RowSampling | None:
        """Likewise."""
        return self.sampling if level == 0 else self._repeated()[1]

    def _repeated(self) -> tuple[NoiseRows, RowSampling | None]:
        if self._wide is None:
            sampling = self.sampling and self.sampling.repeated(self.width)
            self._wide = self.noise.repeated(self.width), sampling
        return self._wide

    def ragged(self, frontier: Frontier, level: int) -> RaggedRows:
        """What the nodes expanded at `level`, from 1 on, see; in order of levels."""
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
        return rows

    def outline(self, level: int, ancestors: Tensor) -> RaggedRows:
        return RaggedRows(
            query_lens=[self.width] * len(self.base),
            lengths=[start + level * self.width for start in self.base],
            tree_starts=self.base,
            block_tables=self.tables,
            visible=self.positions + self.first,
            ancestors=ancestors,
            block_size=self.block_size,
            first=self.first,
        )


def own_bits(levels: int, width: int, device: torch.device) -> Tensor:
    """int64 `[levels, width, words]`: of each scratch entry, the bit that stands for itself."""
    words = -(-max(levels * width, 1) // WORD_BITS)
    bits = [split_words(1 << node, words) for node in range(levels * width)]
    return upload(bits, device).view(levels, width, words)
