"""KVCacheManager over a memory whose every entry tells which tokens it was written for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cache.block_moves import BlockMove
from specdec.cache.prefix_search import Prefix
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.scheduling.integrity import check_blocks
from tests.specdec.cache.cached_world import NOTHING, World, count, counters
from tests.specdec.fake_memory import SIZE, make_request


def test_a_prefix_is_found_once_it_is_committed() -> None:
    manager = World().manager
    first, later = count(10), make_request([*range(9), 77, 78])
    assert manager.reserve(first, 10)
    first.num_cached = 7
    assert manager.find_prefix(later) == NOTHING
    manager.commit(first)
    assert manager.find_prefix(later) == Prefix(first.block_table[:1], 4, 0)
    first.num_cached = 10
    manager.commit(first)
    assert manager.find_prefix(later) == Prefix(first.block_table[:2], 8, 0)


@pytest.mark.parametrize(("length", "num_tokens"), [(3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8), (12, 11), (13, 12)])
def test_at_most_all_tokens_but_the_last_are_found(length: int, num_tokens: int) -> None:
    """The last is computed, for its logits choose the next one."""
    world = World()
    world.compute(count(12))
    request = world.admit(count(length))
    assert (request.num_cached, len(request.block_table)) == (num_tokens, -(-num_tokens // SIZE))
    world.compute(request)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_whole_blocks_that_two_prompts_have_in_common_are_found(first: list[int], second: list[int]) -> None:
    world = World(blocks=12)
    world.compute(make_request(first))
    request = world.admit(make_request(second))
    common = max(i for i in range(len(second) + 1) if first[:i] == second[:i])
    assert request.num_cached == min(common // SIZE * SIZE, len(second) - 1)
    world.compute(request)


def test_salts_share_nothing() -> None:
    world = World()
    world.compute(make_request(list(range(8)), cache_salt="a"))
    for salt, num_tokens in (("a", 7), ("b", 0), ("", 0), (None, 0)):
        assert world.manager.find_prefix(make_request(list(range(8)), cache_salt=salt)).num_tokens == num_tokens


def test_a_scored_prompt_asks_for_no_prefix() -> None:
    """Cached tokens have no logits to score it by."""
    world = World()
    first = count(8)
    world.manager.find_prefix(first)
    world.compute(first, end=4)
    scored = make_request(list(range(8)), params=SamplingParams(prompt_logprobs=0))
    scored.cached_samples = first.cached_samples
    assert world.manager.find_prefix(scored) == NOTHING
    assert not world.manager.is_being_prefilled(scored, NOTHING, [first])
    # Other requests find the blocks that it has computed.
    assert world.manager.find_prefix(count(8)).num_tokens == 4


def test_a_cache_without_prefixes_names_nothing() -> None:
    world = World(caching=False)
    world.compute(count(8))
    assert [world.manager.pool._hashes[block] for block in range(8)] == [None] * 8
    assert world.manager.find_prefix(count(8)) == NOTHING


@pytest.mark.parametrize("caching", [True, False])
def test_a_sample_finds_the_partly_filled_block_too(caching: bool) -> None:
    world = World(caching=caching)
    first, second = count(6), count(6)
    second.cached_samples = first.cached_samples
    world.compute(first, end=5)
    world.admit(second)
    assert (second.block_table, second.num_cached) == (first.block_table, 5)
    assert [move.is_load for move in world.compute(second)] == [False]
    assert world.compute(first) == []
    # Once it has an output it is no longer what the others are.
    second.token_ids.append(77)
    world.release(second)
    assert world.manager.find_prefix(second).num_tokens == (4 if caching else 0)


def test_a_prefix_that_someone_is_computing_is_worth_waiting_for() -> None:
    world = World()
    first, other, second = count(8), make_request([5, *range(8)]), count(9)

    def waits_for(running: Request) -> bool:
        return world.manager.is_being_prefilled(second, world.manager.find_prefix(second), [running])

    world.manager.find_prefix(first)
    world.manager.find_prefix(other)
    assert waits_for(first)
    assert not waits_for(other)
    world.compute(first, end=4)
    assert waits_for(first)
    # One token more may be an output that takes many steps to fill the block.
    world.compute(first, end=7)
    assert not waits_for(first)


@pytest.mark.parametrize("length", [8, 9])
def test_a_prefix_found_in_full_is_not_waited_for(length: int) -> None:
    """The other prompt may go on after the common tokens for many steps, without adding to the shared prefix."""
    world, first, second = World(), count(30), make_request([*range(8), 77][:length])
    world.manager.find_prefix(first)
    world.compute(first, end=8)
    prefix = world.manager.find_prefix(second)
    assert prefix.num_tokens == length - 1
    assert not world.manager.is_being_prefilled(second, prefix, [first])


def test_unnamed_blocks_being_computed_are_not_waited_for() -> None:
    """The older of two blocks has the name; when it is gone, the younger never gets it."""
    world = World(blocks=6)
    older, younger, second = count(5), count(20), count(9)
    world.manager.find_prefix(younger)
    world.compute(older)
    world.compute(younger, end=8)
    world.release(older)
    world.compute(make_request([90] * 16))
    assert world.manager.find_prefix(second) == NOTHING
    assert not world.manager.is_being_prefilled(second, NOTHING, [younger])


@pytest.mark.parametrize("first", ["parent", "child"])
@pytest.mark.parametrize(("length", "copies"), [(6, 1), (8, 0)])
def test_whoever_writes_to_a_shared_block_first_gets_a_copy(first: str, length: int, copies: int) -> None:
    """Nothing is copied where both begin a block of their own."""
    world = World()
    parent = count(length)
    world.compute(parent, read=5)
    child = world.fork(parent, length)
    parent.token_ids.append(50)
    assert child.block_table == parent.block_table
    assert counters(child)[:2] == (length, 5)
    writer, other = (parent, child) if first == "parent" else (child, parent)
    shared, before = writer.block_table[1], list(other.block_table)
    assert world.compute(writer) == [BlockMove(shared, writer.block_table[1])][:copies]
    assert world.compute(other) == []
    assert other.block_table[:2] == before


def test_a_child_may_end_within_what_its_parent_has() -> None:
    """It then holds a block that can be found, and must not write to it even as its only holder."""
    world = World()
    parent = count(8)
    world.compute(parent, read=7)
    child = world.fork(parent, 2)
    assert counters(child)[:2] == (2, 2)
    world.release(parent)
    assert [move.is_load for move in world.compute(child)] == [False]
    assert world.manager.find_prefix(count(8)).num_tokens == 7


@pytest.mark.parametrize("read", [0, 1, 3, 4, 7, 8, 9, 10])
def test_the_heads_entries_come_with_the_prefix(read: int) -> None:
    world = World()
    world.compute(count(10), read=read)
    request = world.admit(make_request([*range(8), 99]))
    assert counters(request)[:2] == (8, read // SIZE * SIZE)


def test_entries_read_behind_a_gap_do_not_count() -> None:
    world = World()
    first = count(10)
    world.compute(first)
    world.manager.pool.mark_read(first.block_table[1])
    assert world.manager.find_prefix(count(10)) == Prefix(first.block_table[:2], 8, 0)


def test_the_head_reads_a_shared_block_once() -> None:
    world = World()
    first = count(15)
    world.compute(first)
    second = world.admit(make_request([*range(12), 99]))
    world.manager.catch_up(second)
    assert counters(second)[:2] == (12, 0)
    world.compute(first, read=9)
    world.manager.catch_up(second)
    assert second.num_draft_cached == 8
    # Its own reading ends within a block, and goes on from there.
    world.compute(second, read=10)
    world.compute(first, read=15)
    world.manager.catch_up(second)
    assert second.num_draft_cached == 10
    world.check()


def test_release_leaves_what_can_be_found() -> None:
    world = World(blocks=4)
    first = count(10)
    world.compute(first, read=10)
    world.release(first)
    assert (first.block_table, counters(first)) == ([], (0, 0, 0, 0))
    assert world.manager.pool.num_free == 4
    world.release(world.admit(count(9)))
    # The end is forgotten first: without its beginning nothing could be found.
    world.compute(make_request([99] * 12))
    assert world.manager.find_prefix(count(9)).num_tokens == 4


@pytest.mark.parametrize(("end", "lacking"), [(7, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
@pytest.mark.parametrize("is_enough", [False, True])
def test_reserving_takes_what_it_lacks_or_nothing(end: int, lacking: int, is_enough: bool) -> None:
    """A forked request takes a block for the copy, and those after it."""
    world = World(blocks=2 + lacking - (not is_enough))
    parent = count(6)
    world.compute(parent)
    child = world.fork(parent, 6)
    before = world.state()
    assert world.manager.reserve(child, end) == is_enough
    assert is_enough == (world.manager.pool.num_free == 0 and world.state() != before)
    assert is_enough or world.state() == before


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_cached", 13, "more is cached than there are entries"),
        ("num_cached", 11, "counters out of order"),
        ("token_ids", [9, *range(1, 10)], "a hash is of other tokens"),
        ("block_hashes", [b"of others"], "a hash is of other tokens"),
    ],
)
def test_check_integrity_sees(field: str, value: Any, message: str) -> None:
    world, request = World(), count(10)
    world.compute(request)
    setattr(request, field, value)
    with pytest.raises(AssertionError, match=message):
        check_blocks(world.manager, [request])


@pytest.mark.parametrize("place", [1, 3])
def test_check_integrity_sees_a_wrong_name(place: int) -> None:
    """The block is full, or allocated for drafts."""
    world = World(caching=False)
    request = count(10)
    world.compute(request)
    assert world.manager.extend(request, 13) == 16
    world.manager.pool.register(request.block_table[place], b"of others")
    with pytest.raises(AssertionError, match="a block is named for what it does not hold"):
        check_blocks(world.manager, [request])
