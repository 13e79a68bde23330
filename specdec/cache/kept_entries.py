"""Cache entries of a request that are kept where layers have sliding windows. Pure Python."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.kernels.types.integers import ceil_div


@dataclass(frozen=True)
class KeptEntries:
    """Number of a request's last entries that its later rows read.

    One pool of blocks serves all layers of target and head, so entries are kept as long as any layer needs them.

    Attributes:
        window: entries before the row that comes next, this one included; 0 to keep all.
        head_reach: those that the draft head's rows depend on, as `CachedHead.reach`; 0 for all, or without a head.
    """

    window: int = 0
    head_reach: int = 0

    @staticmethod
    def of(windows: Sequence[int], head_reach: int | None) -> "KeptEntries":
        """Return what a target and a head need.

        Args:
            windows: of the target's layers, 0 for a layer without one.
            head_reach: see above; None without a head.
        """
        slides = all(windows) and head_reach != 0
        # A head's row reads the feature of the token before.
        return KeptEntries(max(*windows, (head_reach or 0) + 1) if slides else 0, head_reach or 0)

    def num_slid(self, num_cached: int, block_size: int) -> int:
        """Return how many blocks hold nothing that a row from entry `num_cached` on reads."""
        return max(0, num_cached + 1 - self.window) // block_size if self.window else 0


KEEPS_ALL = KeptEntries()


class BlockBounds:
    """Bounds of the blocks that a request holds at once.

    Attributes:
        most_known: most tokens of a request in a step, nodes of choices included, for these bounds to hold. Without
            windows, or where not even one has room, there is no such limit, and a request needs blocks for all of its
            entries.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int, step_tokens: int) -> None:
        # Two blocks more: one in which the window begins, and one into which a shared block is copied.
        room = (num_blocks - 2) * block_size - window
        self._block_size = block_size
        self.most_known = min(step_tokens, room) if window and room > 0 else sys.maxsize
        self._most_held = 2 + ceil_div(window + self.most_known, block_size)

    def most_blocks(self, num_entries: int) -> int:
        """Return how many blocks a request that grows to this many entries holds at once."""
        total = ceil_div(num_entries, self._block_size)
        return total if self.most_known == sys.maxsize else min(total, self._most_held)

    def lacking(self, num_entries: int, num_blocks: int, num_slid: int) -> int:
        """Return how many blocks a request takes until it has grown to this many entries.

        Args:
            num_blocks: length of its block table.
            num_slid: null blocks at its beginning.
        """
        lacking = ceil_div(num_entries, self._block_size) - num_blocks
        return lacking if self.most_known == sys.maxsize else min(lacking, self._most_held - num_blocks + num_slid)
