"""Invariants of the cache and the scheduler, recomputed from outside: for tests, and for long runs."""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from specdec.cache.block_pool import BlockPool, extend_hashes
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.scheduling.request_queues import RequestQueues
from specdec.scheduling.scheduler import Scheduler


def check_pool(pool: BlockPool, holders: Iterable[Iterable[int]] | None = None) -> None:
    """Assert that the pool is what follows from its reference counts and hashes.

    Args:
        holders: all block tables, whose sum the counts must be.
    """
    listed: list[int] = []
    block, before = pool._next[pool.num_blocks], pool.num_blocks
    while block != pool.num_blocks:
        assert len(listed) < pool.num_blocks, "the free list does not end"
        assert pool._previous[block] == before, f"block {block} is linked one way only"
        listed.append(block)
        before, block = block, pool._next[block]
    assert pool._previous[pool.num_blocks] == before, "the free list's end is linked one way only"
    assert len(set(listed)) == len(listed) == pool.num_free, "the free list is not what num_free says"
    unheld = {block for block in range(pool.num_blocks) if pool._refs[block] == 0}
    assert set(listed) == unheld, f"free and held, or neither: {sorted(set(listed) ^ unheld)}"
    hashed = [pool._hashes[block] is not None for block in listed]
    assert hashed == sorted(hashed), "a block that can be found is reused before one that cannot"
    found = {block_hash: block for block, block_hash in enumerate(pool._hashes) if block_hash is not None}
    named = sum(block_hash is not None for block_hash in pool._hashes)
    assert len(found) == named, "the hash map is not what the blocks say"
    assert found == pool._by_hash, "the hash map is not what the blocks say"
    if holders is not None:
        counts = [0] * pool.num_blocks
        for table in holders:
            for block in table:
                counts[block] += 1
        assert counts == pool._refs, "reference counts are not those of the block tables"


def check_blocks(manager: KVCacheManager, requests: Iterable[Request]) -> None:
    """Assert that counts, free lists, hashes and block tables agree; `requests` are all that hold blocks."""
    alive = list(requests)
    check_pool(manager.pool, (request.block_table[request.num_slid :] for request in alive))
    for request in alive:
        assert request in request.cached_samples or not request.block_table, "a sample's blocks are not known of"
        held = len(request.block_table)
        assert request.num_cached <= held * manager.block_size, "more is cached than there are entries"
        assert request.num_draft_cached <= request.num_cached <= len(request.token_ids), "counters out of order"
        assert request.draft_start <= request.num_draft_cached, "the head's entries end before they begin"
        slid = manager.kept.num_slid(request.num_cached, manager.block_size)
        assert request.num_slid <= slid, "a block that is read was given back"
        assert request.block_table[: request.num_slid] in ([], [manager.null_block] * request.num_slid), "no null block"
        hashes: list[bytes] = []
        extend_hashes(hashes, request.token_ids, manager.block_size, request.cache_salt)
        assert request.block_hashes == hashes[: len(request.block_hashes)], "a hash is of other tokens"
        for place, block in enumerate(request.block_table):
            if place < request.num_slid:
                continue
            name = manager.pool._hashes[block]
            # The block in which its cached tokens end may differ behind them.
            if name is not None and request.num_cached // manager.block_size != place:
                assert hashes[place : place + 1] == [name], "a block is named for what it does not hold"


def check_queues(queues: RequestQueues) -> None:
    """Assert order and exclusiveness."""
    for queue in (queues.running, queues.waiting):
        assert queue == sorted(queue, key=attrgetter("rank")), "a queue is out of order"
    queued = list(queues)
    assert len({id(request) for request in queued}) == len(queued), "queued twice"
    for request in (*queues.waiting, *queues.waiting_for_kv):
        assert not request.block_table, "a waiting request holds blocks"
    assert queues._num_queued == Counter(request.client for request in queued), "clients are miscounted"


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that queues are in order and all blocks accounted for."""
    check_queues(scheduler.queues)
    check_blocks(scheduler.manager, scheduler.queues)
