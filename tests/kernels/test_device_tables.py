"""Block tables in a device's memory against the lists that they are of, however these change."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.block_table import BlockTable
from specdec.kernels.types.device_tables import DeviceTables
from specdec.kernels.types.upload import Packet
from tests.kernels.changed_tables import change, changes, some

ROWS, BLOCKS, NULL = 3, 40, 99

# Of each step: how each table changes, which ones are used, blocks behind each for drafts, and its packet's fate.
steps = st.lists(
    st.tuples(
        st.lists(changes, min_size=8, max_size=8),
        st.lists(st.integers(0, 7), min_size=1, max_size=ROWS, unique=True),
        st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS),
        st.sampled_from(["sent", "sent", "sent", "dropped", "fails"]),
    ),
    max_size=12,
)


@pytest.mark.long
@given(st.lists(some, min_size=8, max_size=8), steps)
def test_each_row_holds_its_table_once_the_packet_is_sent(start: list[list[int]], drawn: list) -> None:  # type: ignore[type-arg]
    """Eight tables where six find room, packets that are never sent or fail to be, and blocks behind tables."""
    device = DeviceTables(ROWS, BLOCKS, NULL, torch.device("cpu"))
    tables = [BlockTable(blocks) for blocks in start]
    for changed, used, lacking, fate in drawn:
        for own, table in zip(changed, tables, strict=True):
            for one in own:
                change(table, *one)
            del table[BLOCKS - 4 :]
        given = [tables[i].padded(count, NULL) if count else tables[i] for i, count in zip(used, lacking, strict=False)]
        packet = Packet(torch.device("cpu"))
        places = device.places(given, packet)
        # As the pass after the drafting asks for them.
        assert device.places([tables[i] for i in used], packet) == places
        assert len({*places}) == len(places)
        if fate == "fails":
            packet.attach(out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                packet.send()
        elif fate == "sent":
            packet.send()
            for place, table in zip(places, given, strict=True):
                assert device.memory[place, : len(table)].tolist() == table


def out_of_memory(_: Packet) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_is_known_is_not_sent_again() -> None:
    device = DeviceTables(ROWS, BLOCKS, NULL, torch.device("cpu"))
    table, other = BlockTable(range(10)), BlockTable([5])

    def sent(*given: BlockTable) -> int:
        packet = Packet(torch.device("cpu"))
        places = device.places(given, packet)
        before = device.memory.clone()
        # What the device knows needs no sending: nothing else may depend on it.
        device.memory.fill_(-1)
        packet.send()
        written = int((device.memory >= 0).sum())
        device.memory.copy_(torch.where(device.memory >= 0, device.memory, before))
        assert all(device.memory[place, : len(one)].tolist() == one for place, one in zip(places, given, strict=True))
        return written

    assert sent(table, other) == 11
    assert sent(table, other) == 0
    table += [77, 78]
    assert sent(other, table) == 2
    # Blocks for drafts are sent with each step, as the table may grow over them.
    assert sent(table.padded(2, NULL)) == 2
    del table[8:]
    table.append(3)
    assert sent(table) == 1


@given(st.lists(some, min_size=1, max_size=5), st.integers(0, 5))
def test_only_tables_of_a_step_that_find_room_fit(tables: list[list[int]], blocks: int) -> None:
    device = DeviceTables(ROWS, blocks, NULL, torch.device("cpu"))
    assert device.fit(tables) == (len(tables) <= ROWS and all(len(table) <= blocks for table in tables))
