"""What several ranks have done with their parts of blocks, whatever each of them has lost, and in whatever order."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from specdec.kv_transfer.rank_reads import Clear, RankReads, ReadMeta
from specdec.kv_transfer.transfers import TARGET, Fetched, Found, Read, Result, Saved

HASHES = [b"a", b"b"]
BLOCKS = [7, 3]
TARGETS = st.sampled_from([{}, {TARGET: b""}])
PARTS = st.dictionaries(st.sampled_from([TARGET, "features", "head"]), st.sampled_from([b"", b"x", b"y"]))


def answered(reads: RankReads, orders: list[list[Result]], mixed: list[int]) -> list[Result]:
    """Return what all ranks agree on when each gives its results in its order, and the ranks take turns as mixed."""
    rests = [iter(results) for results in orders]
    return list(itertools.chain.from_iterable(reads.agree(rank, [next(rests[rank])]) for rank in mixed))


@given(st.data(), st.integers(1, 3))
def test_a_block_is_there_when_every_rank_has_its_part(data: st.DataObject, num_ranks: int) -> None:
    num_drafting = data.draw(st.integers(1, num_ranks))
    reads = RankReads(True, num_ranks, num_drafting)
    assert reads.take() is None
    reads.look_up(0, HASHES)
    reads.look_up(1, HASHES[:1])
    assert reads.take() == ReadMeta([], [Read(0, HASHES, ()), Read(1, HASHES[:1], ())])
    found = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    orders: list[list[Result]] = [[Found(0, count), Found(1, 1), Saved(5, True), Saved(5, True)] for count in found]
    mixed = data.draw(st.permutations([rank for rank in range(num_ranks) for _ in range(4)]))
    agreed = answered(reads, orders, mixed)
    assert sorted(map(repr, agreed)) == sorted(
        map(repr, [Found(0, min(found)), Found(1, 1), Saved(5, True), Saved(5, True)])
    )
    reads.fetch(0, HASHES, BLOCKS)
    assert reads.take() == ReadMeta([], [Read(0, HASHES, BLOCKS)])
    came = [[data.draw(PARTS) for _ in BLOCKS] for _ in range(num_drafting)]
    # The others have the target's part alone.
    came += [[data.draw(TARGETS) for _ in BLOCKS] for _ in range(num_ranks - num_drafting)]
    (fetched,) = answered(reads, [[Fetched(0, parts)] for parts in came], data.draw(st.permutations(range(num_ranks))))
    assert isinstance(fetched, Fetched)
    clears = []
    for place, block in enumerate(BLOCKS):
        ranks = [parts[place] for parts in came]
        holders = {TARGET: ranks, "features": ranks[:num_drafting], "head": ranks[:num_drafting]}
        same = {name for name, all_ in holders.items() if {each.get(name) for each in all_} in ({b""}, {b"x"}, {b"y"})}
        assert set(fetched.parts[place]) == same
        if TARGET in same:
            clears += [Clear(name, block) for name in sorted({name for each in ranks for name in each} - same)]
    # What did not come alike is cleared on every rank, before anything else is read.
    assert reads.take() == (ReadMeta(clears, []) if clears else None)
    assert not reads.is_stalled(0)


def test_a_rank_that_answers_nothing_stalls_reads() -> None:
    reads = RankReads(True, 2, 2)
    assert reads.may_find
    reads.look_up(0, HASHES)
    assert not reads.is_stalled(0)
    reads.clock = 3.0
    reads.take()
    assert not reads.is_stalled(0)
    reads.clock = 4.0
    assert reads.is_stalled(0)
    assert not reads.is_stalled(20)
    assert reads.agree(0, [Found(0, 2)]) == []
    assert reads.is_stalled(0)
    assert reads.agree(1, [Found(0, 1)]) == [Found(0, 1)]
    assert not reads.is_stalled(0)


def test_stores_of_one_rank_that_do_not_answer_are_asked_by_none() -> None:
    reads = RankReads(True, 2, 2)
    reads.are_up[1] = False
    assert not reads.may_find
    reads.are_up[1] = True
    assert reads.may_find
    assert not RankReads(False, 2, 2).may_find
