"""Which blocks of the paged cache are free. Pure Python: ids only, no tensors."""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks, handed out and taken back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, the longest unused first. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        blocks = [self._free.popleft() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._used.remove(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is free or used, once.

        Raises:
            AssertionError: with the blocks that are not.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._used, f"free and used: {sorted(free & self._used)}"
        lost = set(range(self.num_blocks)) - free - self._used
        assert not lost, f"neither free nor used: {sorted(lost)}"
