"""Drawn changes of block tables and of plain lists."""

from typing import Any

from hypothesis import strategies as st

blocks = st.integers(0, 50)
some = st.lists(blocks, max_size=6)
kinds = ["+=", "append", "[i] =", "[a:b] =", "del", "del i", "read"]
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
