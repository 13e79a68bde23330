"""A KVCacheManager over a memory whose every entry tells which tokens it was written for."""

from copy import deepcopy

from specdec.cache.block_moves import BlockMove
from specdec.cache.kept_entries import KeptEntries
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.cache.prefix_search import Prefix
from specdec.core.request import Request
from specdec.scheduling.integrity import check_blocks
from tests.specdec.fake_memory import SIZE, FakeMemory, make_request

NOTHING = Prefix([], 0, 0)


class World:
    """A manager, its memory, and the requests that have blocks."""

    def __init__(self, blocks: int = 8, caching: bool = True, kept: KeptEntries | None = None) -> None:
        self.manager = KVCacheManager(blocks, SIZE, caching, kept or KeptEntries(), 4)
        self.memory = FakeMemory(self.manager)
        self.alive: list[Request] = []

    def move(self) -> list[BlockMove]:
        moves, self.manager.moves = self.manager.moves, []
        self.memory.apply_moves(moves)
        self.check()
        return moves

    def compute(self, request: Request, end: int | None = None, read: int = 0) -> list[BlockMove]:
        """A step that caches the tokens up to `end`, and has the head read those up to `read`."""
        end = len(request.token_ids) if end is None else end
        if request not in self.alive:
            self.manager.take_prefix(request, NOTHING)
            self.alive.append(request)
        assert self.manager.reserve(request, end)
        moves = self.move()
        self.memory.write(request, request.num_cached, end)
        self.memory.write(request, request.num_draft_cached, read, head=True)
        request.num_cached, request.num_draft_cached = end, max(request.num_draft_cached, read)
        self.manager.commit(request)
        self.check()
        return moves

    def admit(self, request: Request) -> Request:
        """Give the request its prefix."""
        self.manager.take_prefix(request, self.manager.find_prefix(request))
        self.alive.append(request)
        self.check()
        return request

    def release(self, request: Request) -> None:
        self.manager.release(request)
        self.alive.remove(request)

    def fork(self, parent: Request, num_shared: int) -> Request:
        """A child that goes on with another token after `num_shared` of the parent's."""
        child = make_request([*parent.token_ids[:num_shared], 99], num_prompt=1)
        self.manager.fork(parent, child)
        self.alive.append(child)
        self.check()
        return child

    def check(self) -> None:
        check_blocks(self.manager, self.alive)
        for request in self.alive:
            self.memory.check(request)

    def state(self) -> object:
        """All that a call might change."""
        requests = [(list(request.block_table), counters(request)) for request in self.alive]
        return deepcopy((vars(self.manager.pool), self.manager.moves, requests))


def counters(request: Request) -> tuple[int, int, int, int]:
    return request.num_cached, request.num_draft_cached, request.num_registered, request.num_marked


def count(length: int) -> Request:
    """A request for 0, 1, 2, …"""
    return make_request(list(range(length)))
