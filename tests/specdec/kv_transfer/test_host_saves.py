"""Blocks that several requests complete in one step."""

import logging

from specdec.cache.block_moves import PublishedBlock
from specdec.cache.block_pool import BlockPool
from specdec.kv_transfer.host_saves import FEATURES, HEAD, HostSaves, LayerSave
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.transfers import TARGET
from specdec.scheduling.integrity import check_pool

NAMES = frozenset({TARGET, FEATURES, HEAD})
HASH = b"h" * 32


def test_a_copy_that_was_begun_is_given_up_where_another_block_with_its_hash_came_first() -> None:
    """Found by the scheduler's state machine: the head may have read both blocks when the step ends."""
    pool = BlockPool(4)
    saves = HostSaves(pool, [frozenset()] * 4, NAMES, has_stores=False, notes=Notes(logging.getLogger(__name__)))
    (begun,) = saves.begin([PublishedBlock(0, HASH, True, False), PublishedBlock(1, HASH, True, False)])
    assert begun == LayerSave(0, begun.host_block)
    (made,) = saves.save([PublishedBlock(1, HASH, True, True), PublishedBlock(0, HASH, False, True)])
    assert (made.block, made.parts, made.is_begun) == (1, NAMES, False)
    assert pool.find(HASH) == made.host_block != begun.host_block
    check_pool(pool, saves.holders())
