"""Block tables against plain lists, however they change and whenever they are asked for their numbers."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.block_table import BlockTable, pad_block_tables

blocks = st.integers(0, 50)
some = st.lists(blocks, max_size=6)
kinds = ["+=", "append", "[i] =", "[a:b] =", "del", "del i", "insert", "pop", "sort", "reverse", "clear", "read"]
# What is done, places in percent of the length, and blocks.
changes = st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 100), st.integers(0, 100), some), max_size=12)


def change(table: Any, what: str, at: int, to: int, new: list[int]) -> None:
    size = len(table)
    first, last = sorted((at * size // 100, to * size // 100))
    match what:
        case "+=":
            table += new
        case "append":
            table.append(len(new))
        case "[i] =" if first < size:
            table[first - size * (at % 2)] = len(new)
        case "[a:b] =":
            table[first:last] = new
        case "del":
            del table[first:last]
        case "del i" if first < size:
            del table[first]
        case "insert":
            table.insert(first, len(new))
        case "pop" if size:
            table.pop(min(first, size - 1))
        case "sort" | "reverse" | "clear":
            getattr(table, what)()


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
