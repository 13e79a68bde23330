"""Blocks that slide out of all windows: given back, found again, and never missed."""

import pytest

from specdec.cache.block_moves import BlockSource
from specdec.cache.kept_entries import KeptEntries
from specdec.cache.prefix_search import Prefix
from tests.specdec.cache.cached_world import World, count
from tests.specdec.fake_memory import make_request

# Blocks have four entries.
NULL = 20


def sliding(window: int = 6, head_reach: int = 0, **limits: int) -> World:
    return World(NULL, kept=KeptEntries(window, head_reach), **limits)


@pytest.mark.parametrize(
    ("windows", "head_reach", "kept"),
    [
        ((8, 8), None, KeptEntries(8, 0)),
        ((8, 6), None, KeptEntries(8, 0)),
        ((8, 0), None, KeptEntries(0, 0)),
        ((8, 8), 5, KeptEntries(8, 5)),
        ((8, 8), 8, KeptEntries(9, 8)),
        # A layer of either sees all.
        ((8, 8), 0, KeptEntries(0, 0)),
        ((8, 0), 5, KeptEntries(0, 5)),
    ],
)
def test_kept_entries_are_those_that_any_layer_reads(
    windows: tuple[int, ...], head_reach: int | None, kept: KeptEntries
) -> None:
    assert KeptEntries.of(windows, head_reach) == kept


@pytest.mark.parametrize(("cached", "slid"), [(8, 0), (9, 1), (12, 1), (13, 2), (30, 6)])
def test_blocks_before_the_next_rows_window_are_given_back(cached: int, slid: int) -> None:
    """Row 9 sees the entries from 4 on: the first block has slid out."""
    world, request = sliding(), count(40)
    world.compute(request, cached)
    assert request.block_table[:slid] == [NULL] * slid
    assert NULL not in request.block_table[slid:]
    assert world.manager.pool.num_free == NULL - (-(-cached // 4) - slid)
    world.release(request)
    assert world.manager.pool.num_free == NULL


def test_a_request_of_many_windows_holds_few_blocks() -> None:
    world, request = sliding(), count(200)
    held = []
    for end in range(4, 201, 4):
        world.compute(request, end)
        held.append(len(request.block_table) - request.num_slid)
    assert max(held) == 2
    assert request.num_registered == 50


def test_a_prefix_is_found_by_its_last_blocks_alone() -> None:
    world, first = sliding(), count(40)
    for end in range(4, 41, 4):
        world.compute(first, end)
    found = world.manager.find_prefix(count(30))
    # 28 tokens, of which those from 23 on are read.
    assert (found.blocks[:5], found.num_tokens, found.num_slid) == ([NULL] * 5, 28, 5)
    second = world.admit(count(30))
    world.compute(second, 30)
    # Others reuse what has slid out of the first request's window, all but the last blocks.
    other = make_request(list(range(500, 500 + 4 * world.manager.pool.num_free)))
    world.compute(other)
    world.release(other)
    assert world.manager.find_prefix(count(41)).num_tokens == 40
    assert world.manager.find_prefix(count(20)) == Prefix([], 0, 0)


def test_a_prefix_ends_where_its_window_has_a_hole() -> None:
    world, first = sliding(), count(24)
    for end in range(4, 25, 4):
        world.compute(first, end)
    pool = world.manager.pool
    block = pool.find(first.block_hashes[4])
    assert block is not None
    del pool._by_hash[first.block_hashes[4]]
    pool._hashes[block] = None
    # The sixth block alone is less than a window.
    assert world.manager.find_prefix(count(25)).num_tokens == 16


def test_the_head_passes_over_what_none_of_its_rows_depends_on() -> None:
    world, request = sliding(8, 5), count(40)
    world.compute(request, 20)
    # The next row, 20, depends on the entries from 16 on.
    assert (request.num_draft_cached, request.draft_start) == (16, 16)
    world.compute(request, 24, read=24)
    assert (request.num_draft_cached, request.draft_start, request.num_marked) == (24, 16, 6)
    world.compute(request, 26, read=26)
    found = world.manager.find_prefix(count(26))
    assert (found.num_tokens, found.num_slid, found.num_draft_cached, found.draft_start) == (24, 4, 24, 16)


def test_a_head_with_a_window_reads_less_although_nothing_is_given_back() -> None:
    world, request = sliding(0, 5), count(40)
    world.compute(request, 20)
    assert (request.num_slid, request.num_draft_cached) == (0, 16)
    world.compute(request, 24, read=24)
    second = world.admit(count(26))
    assert (second.num_cached, second.num_draft_cached) == (24, 0)
    # It finds blocks that were read.
    world.manager.catch_up(second)
    assert (second.num_draft_cached, second.draft_start) == (24, 20)


def test_samples_and_forks_share_what_is_left() -> None:
    world, first = sliding(), count(14)
    world.compute(first)
    first.token_ids.append(7)
    child = world.fork(first, 14)
    assert child.num_slid == first.num_slid == 2
    later = count(14)
    later.cached_samples = first.cached_samples
    found = world.manager.find_prefix(later)
    assert (found.num_tokens, found.blocks) == (13, first.block_table)
    first.token_ids += range(8)
    world.compute(first)
    assert first.num_slid > 2
    # The sample's window has left the prompt's end. Blocks that it has given back are found by their hashes.
    found = world.manager.find_prefix(later)
    assert (found.num_tokens, found.blocks) == (12, [NULL, 1, 2])


def test_of_what_a_connector_has_only_the_windows_blocks_are_loaded() -> None:
    world = sliding()
    first = count(10)
    world.compute(first, 8)
    found = world.manager.find_prefix(count(40))
    prefix, loaded = world.manager.prefixes.without_slid(found, 4)
    assert (prefix.blocks, prefix.num_tokens, loaded) == ([NULL, found.blocks[1]], 8, 4)
    prefix, loaded = world.manager.prefixes.without_slid(found, 24)
    assert (prefix.blocks, prefix.num_tokens, loaded) == ([NULL] * 6, 24, 8)
    second = count(40)
    world.manager.take_prefix(second, prefix)
    blocks = world.manager.pool.allocate(2)
    world.manager.load(second, blocks, [BlockSource(0, True), BlockSource(1, True)], loaded)
    assert (second.num_cached, second.block_table) == (32, [*[NULL] * 6, *blocks])


def test_blocks_of_a_request_are_bounded_by_window_and_step() -> None:
    bounds = sliding(6).manager.bounds
    assert bounds.most_known == 4
    assert [bounds.most_blocks(entries) for entries in (4, 16, 20, 4000)] == [1, 4, 5, 5]
    assert bounds.lacking(4000, 10, 8) == 3
    # Where not even a window has room, all of a request must.
    tight = World(3, kept=KeptEntries(6, 0)).manager.bounds
    assert tight.most_blocks(4000) == 1000
