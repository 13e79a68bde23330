"""BlockPool against a set."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.block_pool import BlockPool


class PoolAgainstSet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not set(blocks) & {block for part in self.owned for block in part}
            self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == 9 - sum(map(len, self.owned))


TestPoolAgainstSet = PoolAgainstSet.TestCase


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(KeyError):
        pool.free(blocks)
