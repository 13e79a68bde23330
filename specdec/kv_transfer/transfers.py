"""Threads that move blocks between host memory and stores, so that the engine never waits for a store."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from specdec.kv_transfer.block_store import BlockStore, GuardedStore
from specdec.kv_transfer.notes import Notes

if TYPE_CHECKING:
    from specdec.kv_transfer.host_blocks import HostBlocks

TARGET = "target"
# Blocks that are read, or written, in one call of a store.
MOST_AT_ONCE = 16


class Read(NamedTuple):
    """Blocks that are looked up in the stores, or fetched from there.

    Attributes:
        job: number under which the result comes.
        hashes: of the blocks, in order.
        blocks: of host memory, to be filled; none to count how many the stores have.
    """

    job: int
    hashes: Sequence[bytes]
    blocks: Sequence[int]


class Found(NamedTuple):
    """Result of a look-up: how many of the blocks are there before the first that is not."""

    job: int
    num_blocks: int


class Fetched(NamedTuple):
    """Result of a fetch: the parts that came, per block. A block without the target's part did not come.

    Each part has a digest of its content if all ranks must have the same, else none.
    """

    job: int
    parts: Sequence[Mapping[str, bytes]]


class Save(NamedTuple):
    """Parts of a block that go from the device to host memory, which holds the block until it is `Saved`.

    Attributes:
        block: of the device.
        host_block: of host memory.
        parts: those that host memory lacked before the step.
        is_written: whether the parts go on to the stores.
    """

    block: int
    host_block: int
    block_hash: bytes
    parts: frozenset[str]
    is_written: bool


class Saved(NamedTuple):
    """A host block that may be reused: it has its content, and if it was to be written, the stores have been asked."""

    block: int
    is_written: bool


Result = Found | Fetched | Saved


class Transfers:
    """One thread that reads from the stores and one that writes to them.

    Args:
        stores: asked in this order.
        memory: the blocks that are filled and written.
        key: returns the key of a part of a block by its hash.
        notes: for failures.
        common_parts: parts whose content must be the same on every rank.
    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        memory: "HostBlocks",
        key: Callable[[str, bytes], str],
        notes: Notes,
        common_parts: frozenset[str] = frozenset(),
    ) -> None:
        # Apart, since a store that is full can be read.
        self._readable = [GuardedStore(store, notes, "tokens are computed instead") for store in stores]
        self._writable = [GuardedStore(store, notes, "blocks are not written there") for store in stores]
        self._memory, self._key, self._common_parts = memory, key, common_parts
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._writes: SimpleQueue[tuple[Save, Callable[[], None]] | None] = SimpleQueue()
        self._results: deque[Result] = deque()
        self._news, self._has_ended = threading.Event(), False
        loops = ((self._read_all, "kv-read"), (self._write_all, "kv-write")) if stores else ()
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for loop, name in loops]
        for thread in self._threads:
            thread.start()

    @property
    def has_stores(self) -> bool:
        return bool(self._readable)

    @property
    def are_up(self) -> bool:
        """Return whether a store answers, as far as is known; threads change it at any moment."""
        return any(guard.is_up for guard in self._readable)

    def read(self, read: Read) -> None:
        """Look up or fetch blocks, behind all earlier reads; the result is `Found` or `Fetched`."""
        self._reads.put(read)

    def write(self, save: Save, wait: Callable[[], None]) -> None:
        """Write parts of a block to all stores; the result is `Saved`.

        Args:
            wait: returns once the block has its content.
        """
        self._writes.put((save, wait))

    def take_results(self) -> list[Result]:
        """Return the results of lookups, fetches and writes that have ended since the last call."""
        self._news.clear()
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self, seconds: float) -> None:
        """Wait for a result, at most so long."""
        self._news.wait(seconds)

    def shutdown(self, seconds: float) -> None:
        """Write what is queued, at most so long, and end the threads."""
        self._has_ended = True
        self._reads.put(None)
        self._writes.put(None)
        deadline = time.monotonic() + seconds
        for guard in (*self._readable, *self._writable):
            guard.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # By threads, since a store whose server is gone may take long to close.
        pairs = zip(self._readable, self._writable, strict=True)
        closing = [threading.Thread(target=_close, args=(pair, deadline), daemon=True) for pair in pairs]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _post(self, result: Result) -> None:
        self._results.append(result)
        self._news.set()

    def _read_all(self) -> None:
        while (read := self._reads.get()) is not None and not self._has_ended:
            if read.blocks:
                self._post(Fetched(read.job, self._fetched(read)))
            else:
                self._post(Found(read.job, self._count(read.hashes)))

    def _count(self, hashes: Sequence[bytes]) -> int:
        keys = [self._key(TARGET, block_hash) for block_hash in hashes]
        count, before = 0, -1
        while before < count < len(keys):
            before = count
            for guard in self._readable:
                # A later store is asked only for what the earlier ones lack.
                if count == before:
                    count += guard.call(0, guard.store.count_held, keys[count:])
        return count

    def _fetched(self, read: Read) -> list[dict[str, bytes]]:
        parts: list[dict[str, bytes]] = [{} for _ in read.blocks]
        count = 0
        for start in range(0, len(read.blocks), MOST_AT_ONCE):
            places = range(start, min(start + MOST_AT_ONCE, len(read.blocks)))
            came = self._fetch_part(read, TARGET, places)
            count = next((place for place in places if place not in came), places.stop)
            if count < places.stop:
                break
        for place in range(count):
            parts[place][TARGET] = b""
        for name in (name for name in self._memory.names if name != TARGET):
            came = self._fetch_part(read, name, range(count))
            for place, block in enumerate(read.blocks[:count]):
                if place in came:
                    parts[place][name] = self._digest(name, block)
                else:
                    self._memory.clear(name, block)
        return parts

    def _digest(self, name: str, block: int) -> bytes:
        if name not in self._common_parts:
            return b""
        return blake2b(self._memory.payload(name, block), digest_size=16).digest()

    def _fetch_part(self, read: Read, name: str, places: Sequence[int]) -> set[int]:
        """Fetch a part of blocks; return the places where it came. Others may hold anything."""
        missing = list(places)
        for guard in self._readable:
            tried, missing = missing, []
            for start in range(0, len(tried), MOST_AT_ONCE):
                some = tried[start : start + MOST_AT_ONCE]
                keys = [self._key(name, read.hashes[place]) for place in some]
                payloads = [self._memory.payload(name, read.blocks[place]) for place in some]
                came = guard.call([False] * len(some), guard.store.read, keys, payloads)
                missing += [place for place, each in zip(some, came, strict=True) if not each]
        return set(places).difference(missing)

    def _write_all(self) -> None:
        is_last = False
        while not is_last:
            batch = [self._writes.get()]
            try:
                while batch[-1] is not None and len(batch) < MOST_AT_ONCE:
                    batch.append(self._writes.get_nowait())
            except Empty:
                pass
            is_last = batch[-1] is None
            writes = [write for write in batch if write is not None]
            for _, wait in writes:
                wait()
            for guard in self._writable:
                for name in self._memory.names:
                    if some := [save for save, _ in writes if name in save.parts]:
                        keys = [self._key(name, save.block_hash) for save in some]
                        payloads = [self._memory.payload(name, save.host_block) for save in some]
                        guard.call(None, guard.store.write, keys, payloads)
            for save, _ in writes:
                self._post(Saved(save.host_block, True))


def _close(directions: tuple[GuardedStore, GuardedStore], deadline: float) -> None:
    """Close a store, unless it is in use until the deadline, when it is left to the end of the process."""
    taken = [guard.busy.acquire(timeout=max(0.1, deadline - time.monotonic())) for guard in directions]
    if all(taken):
        directions[0].store.close()
