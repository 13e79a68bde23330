"""Block tables against plain lists, however they change and whenever they are asked for their numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.block_table import BlockTable, pad_block_tables
from tests.kernels.changed_tables import change, changes, some


@given(some, changes)
def test_numbers_are_those_of_the_list(start: list[int], drawn: list[tuple[str, int, int, list[int]]]) -> None:
    table, plain = BlockTable(start), list(start)
    for step in drawn:
        change(plain, *step)
        change(table, *step)
        assert table == plain
        if step[0] == "read":
            assert table.numbers.tolist() == plain
    assert table.numbers.tolist() == plain
    longer = table.padded(3, 77)
    assert longer == [*plain, 77, 77, 77]
    assert longer.numbers.tolist() == longer
    longer[0] = 99
    assert table.numbers.tolist() == plain


@given(st.lists(some, min_size=1, max_size=4))
def test_tables_are_padded_with_zeros(tables: list[list[int]]) -> None:
    longest = max(map(len, tables))
    expected = [[*table, *[0] * (longest - len(table))] for table in tables]
    for given_tables in (tables, list(map(BlockTable, tables))):
        found = pad_block_tables(given_tables)
        assert found.tolist() == expected
        assert found.dtype == np.int64
