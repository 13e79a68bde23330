"""Block tables of requests on the device, which all CUDA graphs read; a step sends the entries that have changed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.types.block_table import BlockTable, pad_block_tables
from specdec.kernels.types.upload import Packet


class DeviceTables:
    """Device memory for block tables. A table keeps its row until others have needed all rows since its last use.

    Args:
        rows: most tables of a step.
        blocks: most blocks of a table.
        null_block: block that belongs to no request.

    Attributes:
        null_table: a table of null blocks alone, for rows of padding.
        memory: int64 `[2 * rows, blocks]`; of no meaning behind the blocks of a table.
    """

    def __init__(self, rows: int, blocks: int, null_block: int, device: torch.device) -> None:
        self.rows, self.blocks, self._null_block = rows, blocks, null_block
        self.null_table = BlockTable([null_block] * blocks)
        # Twice as many, so that the tables of this step and of the last one keep their rows.
        self.memory = torch.full((2 * rows, blocks), null_block, dtype=torch.int64, device=device)
        # By the identity of tables; the one that was used last comes last.
        self._held: dict[int, _Row] = {}
        self._behind: dict[int, _Row] = {}

    def fit(self, tables: Sequence[Sequence[int]]) -> bool:
        """Return whether there is room for the tables of a step."""
        return len(tables) <= self.rows and max(map(len, tables)) <= self.blocks

    def places(self, tables: Sequence[Sequence[int]], packet: Packet) -> list[int]:
        """Return the row of each table, which holds it once the packet is sent.

        Args:
            tables: of one step, which fit; one that is no `BlockTable` is sent whole.
        """
        rows = [self._row_of(table) for table in tables]
        for row, table in zip(rows, tables, strict=True):
            assert len(table) <= self.blocks
            if row.known < len(table):
                row.end = max(row.end, len(table))
                self._behind[row.place] = row
        if self._behind:
            packet.attach(self._add_to)
        return [row.place for row in rows]

    def _row_of(self, given: Sequence[int]) -> "_Row":
        table = given if isinstance(given, BlockTable) else BlockTable(given)
        origin = table if table.origin is None else table.origin
        row = self._held.pop(id(origin), None)
        if row is None:
            place = len(self._held)
            if place == len(self.memory):
                last = self._held.pop(next(iter(self._held)))
                last.table.copies.remove(last)
                self._behind.pop(last.place, None)
                place = last.place
            row = _Row(origin, place)
        self._held[id(origin)] = row
        return row

    def _add_to(self, packet: Packet) -> Callable[[], None]:
        """Add all that the device does not know yet to a packet; return what writes it once that is sent."""
        behind, self._behind = self._behind, {}
        places, numbers, sizes = list[int](), list[int](), list[int]()
        for row in behind.values():
            known, own = row.known, row.table[row.known : row.end]
            start = row.place * self.blocks
            places += range(start + known, start + row.end)
            numbers += own
            # A table that ends before is one with blocks for drafts behind it.
            numbers += [self._null_block] * (row.end - known - len(own))
            sizes.append(known + len(own))
            row.end = 0
        sent = packet.add_lists(places, numbers)

        def write() -> None:
            if places:
                self.memory.view(-1).index_copy_(0, *sent)
            # Not before: a send that fails leaves all of them to the next one.
            for row, size in zip(behind.values(), sizes, strict=True):
                row.known = size

        return write


class _Row:
    """A table in the device's memory.

    Attributes:
        known: entries from the first on that the row has as they are.
        end: entries that it is to have, where some are to be sent.
    """

    def __init__(self, table: BlockTable, place: int) -> None:
        self.table, self.place, self.known, self.end = table, place, 0, 0
        table.copies.append(self)


def tables_of(
    tables: Sequence[Sequence[int]], packet: Packet, device_tables: DeviceTables | None
) -> tuple[Tensor, Sequence[int]]:
    """Return where the block tables of a step lie once the packet is sent, and the row of each; see `RaggedRows`.

    Args:
        device_tables: tables that the device keeps; None to send these whole.
    """
    if device_tables is None:
        return packet.add(pad_block_tables(tables)), ()
    return device_tables.memory, device_tables.places(tables, packet)
