"""Searches in host memory and in the stores behind it."""

import logging
from collections.abc import Sequence

from specdec.cache.block_pool import extend_hashes
from specdec.core.request import Request
from specdec.kv_transfer.host_tier import HostTier
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.transfers import TARGET, Fetched, Found
from tests.specdec.fake_memory import make_request

SIZE = 4


class Stores:
    """Stores that hold every block, and count what they are asked for.

    Attributes:
        lookups: numbers of jobs, and how many blocks each looks up.
        fetches: the same of blocks that are read.
    """

    has_stores = may_find = True

    def __init__(self) -> None:
        self.lookups, self.fetches = dict[int, int](), dict[int, int]()

    def is_stalled(self, seconds: float) -> bool:  # noqa: ARG002
        return False

    def look_up(self, job: int, hashes: Sequence[bytes]) -> None:
        self.lookups[job] = len(hashes)

    def fetch(self, job: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        assert len(hashes) == len(blocks)
        self.fetches[job] = len(hashes)


class World:
    """Host memory of a few blocks over such stores."""

    def __init__(self, num_blocks: int) -> None:
        self.stores = Stores()
        self.tier = HostTier(num_blocks, SIZE, [TARGET], self.stores, 1e9, Notes(logging.getLogger("tests")))  # type: ignore[arg-type]

    def ask(self, *requests: Request) -> list[int | None]:
        """How many blocks each can load."""
        found = [self.tier.match(request, 0) for request in requests]
        return [tokens if tokens is None else tokens // SIZE for tokens in found]

    def answer(self, *, comes: bool = True) -> int:
        """Let the stores answer all look-ups, and then all reads; return how many look-ups there were.

        Args:
            comes: whether the blocks can be read.
        """
        lookups, self.stores.lookups = self.stores.lookups, {}
        self.tier.update([Found(job, count) for job, count in lookups.items()])
        fetches, self.stores.fetches = self.stores.fetches, {}
        self.tier.update([Fetched(job, [{TARGET: b""} if comes else {}] * count) for job, count in fetches.items()])
        return len(lookups)

    def admit(self, request: Request, num_blocks: int) -> None:
        assert len(self.tier.take(request, 0, num_blocks)) == num_blocks
        self.tier.loaded()


def prompt(*blocks: int) -> Request:
    """Make a prompt of these blocks, and one token more."""
    request = make_request([block for block in blocks for _ in range(SIZE)] + [0])
    extend_hashes(request.block_hashes, request.token_ids, SIZE, None)
    return request


def test_what_a_store_cannot_read_is_not_asked_for_again() -> None:
    """It was cut for want of room, and would be tried until the request's time is over."""
    world, request = World(2), prompt(1, 2, 3, 4)
    assert world.ask(request) == [None]
    world.answer(comes=False)
    assert world.ask(request) == [0]
    assert not world.stores.lookups


def test_a_search_without_room_goes_on_when_there_is_some() -> None:
    """Another request holds what it has found until it is admitted."""
    world, first, second = World(3), prompt(1, 2), prompt(3, 4)
    assert world.ask(first, second) == [None, None]
    world.answer()
    assert world.ask(first, second) == [2, 1]
    assert not world.stores.lookups
    world.admit(first, 2)
    assert world.ask(second) == [None]
    world.answer()
    assert world.ask(second) == [2]


def test_a_prompt_longer_than_host_memory_is_looked_up_once() -> None:
    world, long = World(3), prompt(*range(1, 8))
    assert world.ask(long) == [None]
    assert world.answer() == 1
    assert world.ask(long) == [3]
    assert not world.stores.lookups


def test_an_ended_search_finds_what_has_come_to_host_memory_since() -> None:
    world, early, late = World(4), prompt(1, 2, 3), prompt(1, 2, 3)
    world.stores.may_find = False
    assert world.ask(early) == [0]
    world.stores.may_find = True
    assert world.ask(late) == [None]
    world.answer()
    assert world.ask(early) == [3]


def test_prompts_with_the_same_beginning_find_all_their_blocks() -> None:
    """After a restart, conversations over one system prompt come at once; they share look-ups as far as they agree."""
    world = World(20)
    prompts = [prompt(1, 2, 3, 4), prompt(1, 2, 5, 6), prompt(1, 2, 5, 6, 7), prompt(1, 2), prompt(1, 2, 3)]
    assert world.ask(*prompts) == [None] * 5
    assert world.answer() == 1
    assert world.ask(*prompts) == [4, None, None, 2, 3]
    assert world.answer() == 1
    assert world.ask(*prompts) == [4, 4, None, 2, 3]
    assert world.answer() == 1
    assert world.ask(*prompts) == [4, 4, 5, 2, 3]
    assert not world.stores.lookups
