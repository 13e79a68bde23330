"""The threads between host memory and stores: a store that fails, is full, or hangs, beside one that works."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from specdec.kv_transfer import block_store
from specdec.kv_transfer.block_store import NO_KEY, StoreError
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.transfers import TARGET, Fetched, Found, Read, Result, Save, Saved, Transfers

SIZE = 4
HASHES = [bytes([number]) for number in range(6)]


class Memory:
    """Host memory of a few blocks with one part."""

    names = (TARGET,)

    def __init__(self) -> None:
        self.blocks = [bytearray([255] * SIZE) for _ in HASHES]

    def payload(self, part: str, block: int) -> memoryview:
        assert part == TARGET
        return memoryview(self.blocks[block])

    def clear(self, part: str, block: int) -> None:
        raise AssertionError(f"there is no part but one, not {part} of {block}")


class Store:
    """A store in memory.

    Attributes:
        fault: called at the start of reads and queries.
        asked: keys that were asked for.
    """

    def __init__(self, name: str, held: str = "") -> None:
        self.name, self.held, self.asked = name, {key: key.encode() * SIZE for key in held}, list[str]()
        self.fault: Callable[[], object] = lambda: None
        self.is_full = self.is_closed = False

    def count_held(self, keys: Sequence[str]) -> int:
        self.asked += keys
        self.fault()
        return next((place for place, key in enumerate(keys) if key not in self.held), len(keys))

    def read(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> list[bool]:
        self.fault()
        for key, payload in zip(keys, payloads, strict=True):
            payload[:] = self.held.get(key, bytes(SIZE))
        return [key in self.held for key in keys]

    def write(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> None:
        if self.is_full:
            raise StoreError("the store is full")
        self.held.update({key: bytes(payload) for key, payload in zip(keys, payloads, strict=True)})

    def close(self) -> None:
        self.is_closed = True


class World:
    """Transfers over two stores, whose keys are the letters from a on."""

    def __init__(self, *stores: Store) -> None:
        self.memory, self.notes = Memory(), Notes(logging.getLogger("tests"))
        self.transfers = Transfers(stores, self.memory, lambda _, block_hash: chr(97 + block_hash[0]), self.notes)

    def result(self) -> Result:
        """The next result."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.transfers.wait(0.1)
            if found := self.transfers.take_results():
                assert len(found) == 1
                return found[0]
        raise TimeoutError

    def look_up(self) -> int:
        self.transfers.read(Read(1, HASHES, ()))
        found = self.result()
        assert isinstance(found, Found)
        return found.num_blocks

    def fetch(self, count: int) -> list[bool]:
        self.transfers.read(Read(2, HASHES[:count], range(count)))
        fetched = self.result()
        assert isinstance(fetched, Fetched)
        return [TARGET in parts for parts in fetched.parts]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "RETRY_AFTER", 0.01)


def fail() -> None:
    raise StoreError("no answer")


def test_a_later_store_is_asked_for_what_the_first_lacks() -> None:
    disk, pool = Store("disk", "abe"), Store("pool", "abcd")
    world = World(disk, pool)
    assert world.look_up() == 5
    assert pool.asked == [*"cdef", *"f"]
    assert world.fetch(5) == [True] * 5
    assert [block[0] for block in world.memory.blocks] == [*b"abcde", 255]


def test_a_store_that_failed_is_asked_by_no_request_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "RETRY_AFTER", 3600)
    disk, pool = Store("disk", "ab"), Store("pool", "abcd")
    world = World(disk, pool)
    pool.fault = fail
    assert world.look_up() == 2
    pool.fault, pool.asked = (lambda: None), []
    assert world.look_up() == 2
    assert pool.asked == []
    assert world.transfers.are_up
    assert len(world.notes.take()) == 1


@pytest.mark.usefixtures("soon")
def test_a_store_that_answers_again_is_used_again() -> None:
    pool = Store("pool", "abc")
    world = World(pool)
    pool.fault = fail
    assert world.look_up() == 0
    while pool.asked.count(NO_KEY) < 3:
        assert not world.transfers.are_up
        time.sleep(0.01)
    pool.fault = lambda: None
    while not world.transfers.are_up:
        time.sleep(0.01)
    assert world.look_up() == 3


def test_a_full_store_is_still_read() -> None:
    pool = Store("pool", "ab")
    pool.is_full = True
    world = World(pool)
    world.transfers.write(Save(0, 4, HASHES[4], frozenset({TARGET}), True), lambda: None)
    assert world.result() == Saved(4, True)
    assert world.look_up() == 2
    assert world.fetch(2) == [True, True]
    assert list(world.notes._lines) == ["pool: the store is full; blocks are not written there"]


def test_a_read_that_fails_gives_what_other_stores_have() -> None:
    disk, pool = Store("disk", "abcd"), Store("pool", "ab")
    world = World(disk, pool)
    assert world.look_up() == 4
    disk.fault = fail
    assert world.fetch(4) == [True, True, False, False]


def test_a_store_in_use_is_not_closed() -> None:
    disk, pool = Store("disk", "a"), Store("pool", "a")
    world, going = World(disk, pool), threading.Event()
    pool.held.clear()
    disk.held.clear()
    pool.fault = lambda: going.wait(120)
    world.transfers.read(Read(1, HASHES, ()))
    while not pool.asked:
        time.sleep(0.001)
    world.transfers.shutdown(0.05)
    # By a thread of its own.
    while not disk.is_closed:
        time.sleep(0.001)
    assert not pool.is_closed
    going.set()
