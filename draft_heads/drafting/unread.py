"""Entries of a head's cache that are to be written: known tokens whose features the target's passes have left."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import adapters_of
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.upload import Packet
from specdec.verify.tree_batch import pad_block_tables, slots_of


class Unread(NamedTuple):
    """Entries that a head is to write, those of all rows in turn.

    Attributes:
        tokens, slots, positions: int64 `[entries]`: token, slot and rotary position of each.
        sources: int64 `[entries]`, slot of the token before, where the target's features of it are.
        rows: what the entries see of the head's cache.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    sources: Tensor
    rows: RaggedRows

    @staticmethod
    def of(rows: Sequence[DraftRow], first: int, block_size: int, packet: Packet) -> "Unread":
        """Return the entries of rows, which are there once the packet is sent.

        Args:
            first: the head's first entry.
        """
        tokens, slots, sources, positions, counts = (list[int]() for _ in range(5))
        for row in rows:
            start, end = max(row.num_draft_cached, first), row.draft_prefill_end
            entries = slots_of(row.block_table, start - first, end, block_size)
            tokens += row.token_ids[start:end]
            sources += entries[: end - start]
            slots += entries[first:]
            positions += range(start - first, end - first)
            counts.append(end - start)
        lengths = [row.draft_prefill_end for row in rows]
        seeing = RaggedRows(
            query_lens=counts,
            lengths=lengths,
            tree_starts=lengths,
            block_tables=packet.add(pad_block_tables([row.block_table for row in rows])),
            visible=packet.add([position + first + 1 for position in positions]),
            ancestors=packet.add([[0]] * len(positions)),
            block_size=block_size,
            first=first,
            firsts=[max(row.draft_start, first) for row in rows],
            adapters=adapters_of(rows),
        )
        read, to, turns, before = map(packet.add, (tokens, slots, positions, sources))
        return Unread(read, to, turns, before, seeing)
