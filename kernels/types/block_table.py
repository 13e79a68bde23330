"""A request's blocks of the cache, as a list and as numbers for a device."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Copy(Protocol):
    """A copy of a table elsewhere.

    Attributes:
        known: entries from the first on that it has as they are; lowered when the table changes.
    """

    known: int


class BlockTable(list[int]):
    """List of a request's blocks with an int64 copy, of which only changed entries are converted again.

    Attributes:
        copies: other copies that are kept up with it.
        origin: of what `padded` returns, the table that it was called of; None for others.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self.copies: list[Copy] = []
        self.origin: BlockTable | None = None
        self._numbers = np.empty(0, np.int64)
        # Entries from the first on that `_numbers` has as they are.
        self._known = 0

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The blocks, int64 `[blocks]`; not to be kept, as changes of the table change it."""
        known, count = min(self._known, len(self)), len(self)
        if known < count:
            if len(self._numbers) < count:
                # Half as many more, so that a table that grows is seldom copied.
                self._numbers = np.concatenate([self._numbers[:known], np.empty(count + count // 2 - known, np.int64)])
            self._numbers[known:count] = self[known:]
        self._known = count
        return self._numbers[:count]

    def padded(self, count: int, block: int) -> "BlockTable":
        """Return these blocks and `count` times another one behind them."""
        made = BlockTable(self)
        made._numbers, made._known = np.concatenate([self.numbers, np.full(count, block)]), len(self) + count
        made.origin = self
        made += [block] * count
        return made

    def __setitem__(self, place: Any, value: Any) -> None:
        self._forget(place)
        super().__setitem__(place, value)

    def __delitem__(self, place: Any) -> None:
        self._forget(place)
        super().__delitem__(place)

    def _forget(self, place: Any) -> None:
        if isinstance(place, slice):
            start, _, step = place.indices(len(self))
            place = start if step > 0 else 0
        first = max(place, 0)
        self._known = min(self._known, first)
        for copy in self.copies:
            copy.known = min(copy.known, first)

    # Nothing needs them, and the list's own would not tell the copies.
    insert = pop = remove = clear = reverse = sort = None  # type: ignore[assignment]


def pad_block_tables(tables: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return block tables of one length, int64 `[tables, blocks]`, padded with block 0, which is never read there."""
    padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table.numbers if isinstance(table, BlockTable) else table
    return padded
