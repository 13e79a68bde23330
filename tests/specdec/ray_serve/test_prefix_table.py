"""The choice of a replica, without Ray."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.ray_serve.prefix_table import PrefixTable
from specdec.ray_serve.replicas import Route

LOADS = st.dictionaries(st.sampled_from("ABCD"), st.integers(0, 60), min_size=1)


def blocks(text: str) -> list[bytes]:
    """Chained hashes of a prompt in which each letter is a block."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_the_longest_known_prefix_wins() -> None:
    table = PrefixTable()
    table.note("A", blocks("abcd"))
    table.note("B", blocks("abcdef"))
    assert table.rank(blocks("abcdefgh"), {"A": 0, "B": 5, "C": 0}) == ["B", "A", "C"]
    assert table.num_known("A", blocks("abxd")) == 2


def test_an_overloaded_replica_is_taken_last() -> None:
    table = PrefixTable(slack=8, factor=1.5)
    table.note("A", blocks("abcd"))
    # Busier by 8 requests, or by half: not overloaded.
    assert table.rank(blocks("abcd"), {"A": 8, "B": 0})[0] == "A"
    assert table.rank(blocks("abcd"), {"A": 30, "B": 20})[0] == "A"
    # By more than both.
    assert table.rank(blocks("abcd"), {"A": 9, "B": 0}) == ["B", "A"]
    assert table.rank(blocks("abcd"), {"A": 31, "B": 20}) == ["B", "A"]


def test_a_short_common_beginning_does_not_draw_all_prompts_to_one_replica() -> None:
    table = PrefixTable(least_share=0.25)
    table.note("A", blocks("s123"))
    assert table.rank(blocks("s4567"), {"A": 1, "B": 0})[0] == "B"
    assert table.rank(blocks("s456"), {"A": 1, "B": 0})[0] == "A"


def test_equal_ones_are_taken_in_turn() -> None:
    table = PrefixTable()
    taken = []
    for index in range(4):
        name = table.rank(blocks(str(index)), {"A": 0, "B": 0})[0]
        table.note(name, blocks(str(index)))
        taken.append(name)
    assert taken == ["A", "B", "A", "B"]


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    table = PrefixTable(capacity=4)
    table.note("A", blocks("abc"))
    table.note("A", blocks("xy"))
    assert [table.num_known("A", blocks(text)) for text in ("abc", "xy")] == [2, 2]


def test_a_replica_that_is_gone_is_forgotten() -> None:
    table = PrefixTable()
    table.note("A", blocks("abc"))
    table.note("B", blocks("ab"))
    table.keep(["B", "C"])
    assert table.rank(blocks("abc"), {"A": 0, "B": 0, "C": 0})[0] == "B"
    assert table.num_known("A", blocks("abc")) == 0


@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=6), max_size=8), loads=LOADS, asked=st.text("ab", max_size=6)
)
def test_each_replica_is_ranked_once_and_the_first_is_not_overloaded(
    prompts: list[str], loads: dict[str, int], asked: str
) -> None:
    table = PrefixTable(capacity=12)
    for prompt in prompts:
        table.note(table.rank(blocks(prompt), loads)[0], blocks(prompt))
    ranked = table.rank(blocks(asked), loads)
    assert sorted(ranked) == sorted(loads)
    least = min(loads.values())
    assert loads[ranked[0]] <= max(least + 8, 1.5 * least)


@pytest.mark.parametrize(
    ("name", "value"), [("capacity", 0), ("slack", -1), ("factor", 0.5), ("least_share", 2), ("factor", float("nan"))]
)
def test_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        PrefixTable(**{name: value})  # type: ignore[arg-type]


def test_a_route_does_not_travel() -> None:
    route = Route([b"x" * 32], {"A"}, "A", "A", "A", True)
    assert pickle.loads(pickle.dumps(route)) == Route()
