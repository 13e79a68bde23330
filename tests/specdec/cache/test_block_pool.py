"""BlockPool against lists that are searched from end to end."""

from collections.abc import Callable
from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.cache.block_pool import BlockPool
from specdec.scheduling.integrity import check_pool
from tests.profiles import num_cases

pytestmark = pytest.mark.slow

CASES = num_cases(200)
NAMES = [b"a", b"b", b"c", b"d", b"e"]


class PoolAgainstLists(RuleBasedStateMachine):
    """Block tables as the only truth about who holds what, and the free blocks as two plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(0)
        self.tables: list[list[int]] = []
        self.names: dict[int, bytes] = {}
        self.read: set[int] = set()
        # Free blocks without a name, in the order of their reuse, and those with one, by when they became free.
        self.plain: list[int] = []
        self.named: list[int] = []

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @property
    def has_tables(self) -> bool:
        return any(self.tables)

    @initialize(size=st.integers(0, 8))
    def begin(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.plain = list(range(size))

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        order = self.plain + self.named
        if count <= len(order):
            assert self.pool.allocate(count) == order[:count]
            self.plain, self.named = self.plain[count:], self.named[max(0, count - len(self.plain)) :]
            for block in order[:count]:
                self.names.pop(block, None)
                self.read.discard(block)
            self.tables.append(order[:count])

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Share blocks that are held, or free but findable by hash."""
        choice = sorted({*self.names, *(block for table in self.tables for block in table)})
        table = data.draw(st.lists(st.sampled_from(choice), unique=True)) if choice else []
        self.pool.share(table)
        self.named = [block for block in self.named if block not in table]
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), backwards=st.booleans())
    def free(self, data: st.DataObject, backwards: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        table = table[::-1] if backwards else table
        self.pool.free(table)
        for block in table:
            if self.holders(block) == 0:
                if block in self.names:
                    self.named.append(block)
                else:
                    self.plain.insert(0, block)

    @precondition(lambda self: self.has_tables)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def register(self, data: st.DataObject, name: bytes) -> None:
        """A name once given stays where it is, and so does a block's name."""
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.register(block, name)
        if name not in self.names.values():
            self.names.setdefault(block, name)

    @precondition(lambda self: self.has_tables)
    @rule(data=st.data())
    def mark_read(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.mark_read(block)
        self.read.add(block)

    @invariant()
    def pool_agrees(self) -> None:
        pool = self.pool
        check_pool(pool, self.tables)
        assert pool.num_free == len(self.plain) + len(self.named)
        assert deepcopy(pool).allocate(pool.num_free) == self.plain + self.named
        by_name = {name: block for block, name in self.names.items()}
        assert {name: pool.find(name) for name in NAMES} == {name: by_name.get(name) for name in NAMES}
        for block in range(pool.num_blocks):
            holders = self.holders(block)
            assert pool._hashes[block] == self.names.get(block)
            assert pool.is_free(block) == (holders == 0)
            assert pool.is_private(block) == (holders == 1 and block not in self.names)
            assert pool.is_read(block) == (block in self.read)


PoolAgainstLists.TestCase.settings = settings(max_examples=CASES, stateful_step_count=40)
TestPoolAgainstLists = PoolAgainstLists.TestCase


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="block 0 is free already"):
        pool.free(blocks)


def test_asking_for_more_than_there_is_is_caught_before_anything_is_given() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="4 blocks asked, 3 free"):
        pool.allocate(4)
    assert pool.allocate(3) == [0, 1, 2]


def test_a_found_block_outlives_later_ones_once_it_was_used_again() -> None:
    """The least recently used goes first, not the one that was named first."""
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.free([first, second])
    pool.share([first])
    pool.free([first])
    assert pool.allocate(1) == [second]
    assert pool.find(b"first") == first
    assert pool.find(b"second") is None


def test_a_block_without_a_name_goes_before_any_that_can_be_found() -> None:
    pool = BlockPool(2)
    named, plain = pool.allocate(2)
    pool.register(named, b"named")
    pool.free([named])
    pool.free([plain])
    assert pool.allocate(1) == [plain]
    assert pool.find(b"named") == named


def sound() -> tuple[BlockPool, list[list[int]]]:
    """Blocks 0 and 1 held, 1 twice and named "held"; the list of free ones is 3, 4, 5, 2, of which 2 is named."""
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.register(blocks[1], b"held")
    pool.register(blocks[2], b"free")
    pool.share([1])
    pool.free([2])
    return pool, [[0, 1], [1]]


FAULTS: dict[str, tuple[Callable[[BlockPool], object], str]] = {
    "a link back": (lambda pool: pool._previous.__setitem__(4, 5), "block 4 is linked one way only"),
    "a link on": (lambda pool: pool._next.__setitem__(3, 5), "block 5 is linked one way only"),
    "a loop": (lambda pool: pool._next.__setitem__(5, 3), "block 3 is linked one way only"),
    "the last link": (lambda pool: pool._previous.__setitem__(6, 5), "the free list's end is linked one way only"),
    "the count": (lambda pool: setattr(pool, "num_free", 3), "not what num_free says"),
    "a lost block": (lambda pool: pool._unlink(4), r"free and held, or neither: \[4\]"),
    "a held block": (lambda pool: pool._link(0), r"free and held, or neither: \[0\]"),
    "a free one counted": (lambda pool: pool._refs.__setitem__(3, 1), r"free and held, or neither: \[3\]"),
    "a holder too few": (lambda pool: pool._refs.__setitem__(1, 1), "not those of the block tables"),
    "a holder too many": (lambda pool: pool._refs.__setitem__(0, 2), "not those of the block tables"),
    "the order of reuse": (lambda pool: (pool._unlink(4), pool._link(4), pool._unlink(2), at_head(pool, 2)), "reused"),
    "a stale name": (lambda pool: pool._by_hash.__setitem__(b"gone", 4), "the hash map is not what the blocks say"),
    "a name of two": (lambda pool: pool._hashes.__setitem__(0, b"held"), "the hash map is not what the blocks say"),
    "a lost name": (lambda pool: pool._by_hash.pop(b"free"), "the hash map is not what the blocks say"),
}


def at_head(pool: BlockPool, block: int) -> None:
    """Link a block that can be found where one without a name belongs."""
    name = pool._hashes[block]
    pool._hashes[block] = None
    pool._link(block)
    pool._hashes[block] = name


@pytest.mark.parametrize("fault", FAULTS)
def test_check_integrity_sees(fault: str) -> None:
    pool, tables = sound()
    check_pool(pool, tables)
    plant, message = FAULTS[fault]
    plant(pool)
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, tables)
