"""Which blocks are in host memory, those on their way there, and the searches of requests for blocks. Pure Python."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from specdec.cache.block_moves import BlockSource, PublishedBlock
from specdec.cache.block_pool import BlockPool
from specdec.core.request import Request
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.rank_reads import RankReads
from specdec.kv_transfer.transfers import TARGET, Fetched, Found, Result, Save

FEATURES, HEAD = "features", "head"
# Blocks that are remembered as loaded without features.
MOST_MARKS = 1 << 16


@dataclass(eq=False)
class _Job:
    """Blocks that are looked up in stores, and then read from them.

    Attributes:
        hashes: of the wanted blocks, in order.
        blocks: host blocks that are being filled, of the first ones; none while the job looks up.
        searches: those that wait for it.
        is_cut: whether host memory had no room for all that stores have.
    """

    number: int
    hashes: list[bytes]
    blocks: list[int] = field(default_factory=list)
    searches: "list[_Search]" = field(default_factory=list)
    is_cut: bool = False


@dataclass(eq=False)
class _Search:
    """One request's search.

    Attributes:
        start: place of the first wanted block among the request's.
        hashes: of the wanted blocks, in order.
        blocks: host blocks with their content, held for the request.
        job: what it waits for, None once the search has ended.
        deadline: when it ends at the latest, by `HostTier.clock`.
        is_cut: whether its last job found more than host memory had room for.
    """

    start: int
    hashes: list[bytes]
    deadline: float
    blocks: list[int] = field(default_factory=list)
    job: _Job | None = None
    is_cut: bool = False


class HostTier:
    """Blocks in host memory by their hash, the least recently used reused first.

    A block is held while a request waits to load it, while it is loaded, filled from the device or a store, or written.

    Args:
        num_blocks: blocks of host memory.
        block_size: tokens of a block.
        parts: names of the cache's parts.
        searches: reads blocks from stores into host memory.
        timeout: seconds after which a search ends with what it has.
        notes: for searches that take too long, and blocks that find no room.
    """

    def __init__(
        self, num_blocks: int, block_size: int, parts: Sequence[str], searches: RankReads, timeout: float, notes: Notes
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size, self._timeout, self._notes = block_size, timeout, notes
        self._transfers = searches
        # By block, the parts that it has or will have when the step ends; and all parts of the cache.
        self._parts: list[frozenset[str]] = [frozenset()] * num_blocks
        self._names = frozenset(parts)
        self._numbers = count()
        # Time of the coming step.
        self.clock = 0.0
        self._searches: dict[Request, _Search] = {}
        self._jobs: dict[int, _Job] = {}
        # By the first wanted block, so that requests of one prefix share a job.
        self._by_first: dict[bytes, _Job] = {}
        self._loading: list[int] = []
        # Being copied from the device, to stay in host memory and to go on to the stores.
        self._saving: list[int] = []
        self._writing: list[int] = []
        # Blocks on the device whose features are zeros, and blocks that will be published as they were loaded.
        self._featureless: set[bytes] = set()
        self._loaded: set[bytes] = set()

    def match(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens can be loaded behind the first ones, None while a search runs."""
        size = self.block_size
        if num_computed_tokens % size:
            return 0
        place, search = num_computed_tokens // size, self._searches.get(request)
        if search is not None and search.start > place:
            # The device has lost blocks in front of those that were found.
            self.forget(request)
            search = None
        if search is None:
            self._touch(request.block_hashes[:place])
            search = self._begin(request, place)
        elif search.job is None:
            # The request was not admitted since.
            self._hold(search)
            if search.is_cut and self.pool.num_free and self.clock < search.deadline:
                self._look_up(search)
        if search.job is not None:
            if self.clock < search.deadline:
                return None
            self._notes.warn(f"a search for cached blocks took longer than {self._timeout:g} s", "search")
            self._leave(search)
        found = (len(search.blocks) - (place - search.start)) * size
        return max(0, min(found, len(request.token_ids) - 1 - num_computed_tokens))

    def take(self, request: Request, place: int, num_blocks: int) -> list[BlockSource]:
        """Return the sources of a request's blocks from `place` on; they are held until `loaded`."""
        search = self._searches.pop(request, None)
        if search is None:
            return []
        # It runs on where the device has found more than whole blocks meanwhile.
        self._leave(search)
        if len(self._featureless) + len(self._loaded) > MOST_MARKS:
            # Zeros may then be stored as features, which costs acceptance and no more.
            self._featureless.clear()
            self._loaded.clear()
        first = place - search.start
        blocks = search.blocks[first : first + num_blocks]
        for block, block_hash in zip(blocks, search.hashes[first:], strict=False):
            self._loaded.add(block_hash)
            if not self._parts[block] >= self._names - {HEAD}:
                self._featureless.add(block_hash)
        self._loading += blocks
        # In reverse, so that a prefix's end is reused before its beginning.
        self.pool.free(reversed(search.blocks[:first] + search.blocks[first + num_blocks :]))
        return [BlockSource(block, HEAD in self._parts[block]) for block in blocks]

    def loaded(self) -> None:
        """Release the blocks that have been copied to the device."""
        self.pool.free(reversed(self._loading))
        self._loading = []

    def forget(self, request: Request) -> None:
        """End a request's search and release its blocks."""
        search = self._searches.pop(request, None)
        if search is not None:
            self._leave(search)
            self.pool.free(reversed(search.blocks))

    def update(self, results: Iterable[Result]) -> None:
        """Take the results of transfers."""
        for result in results:
            if isinstance(result, Found):
                self._found(self._jobs[result.job], result.num_blocks)
            elif isinstance(result, Fetched):
                self._fetched(self._jobs[result.job], result.parts)
            else:
                (self._writing if result.is_written else self._saving).remove(result.block)
                self.pool.free([result.block])

    def save(self, published: Iterable[PublishedBlock]) -> list[Save]:
        """Return what goes to host memory of blocks that a step has published, as far as there is room."""
        saves: list[Save] = []
        for block, block_hash, is_new, is_read in published:
            if is_new and block_hash not in self._loaded:
                self._featureless.discard(block_hash)
            if is_new:
                self._loaded.discard(block_hash)
            wanted = self._names if is_read else self._names - {HEAD}
            if block_hash in self._featureless:
                wanted &= {TARGET}
            saves += self._save(block, block_hash, wanted)
        return saves

    def _save(self, block: int, block_hash: bytes, wanted: frozenset[str]) -> list[Save]:
        pool = self.pool
        host_block = pool.find(block_hash)
        if host_block is None:
            if not pool.num_free:
                self._notes.warn("host memory has no room for further blocks: all of them are being read or written")
                return []
            (host_block,) = pool.allocate(1)
            pool.register(host_block, block_hash)
            parts = self._parts[host_block] = wanted
        else:
            parts = wanted - self._parts[host_block]
            if not parts:
                return []
            pool.share([host_block])
            self._parts[host_block] |= parts
        # What waits to be written must leave room for what is to be loaded.
        has_stores = self._transfers.has_stores
        is_written = has_stores and len(self._writing) < pool.num_blocks // 2
        if has_stores and not is_written:
            self._notes.warn("stores write more slowly than blocks are computed: some stay in host memory alone")
        (self._writing if is_written else self._saving).append(host_block)
        return [Save(block, host_block, block_hash, parts, is_written)]

    @property
    def writing(self) -> set[int]:
        """Return the blocks of host memory that wait for stores."""
        return set(self._writing)

    def is_sending(self, request: Request) -> bool:
        """Return whether blocks of a request wait for stores, for as long after its last token as a search may last."""
        writing = self.writing
        if not writing or time.monotonic() - request.times.last_token >= self._timeout:
            return False
        return any(self.pool.find(block_hash) in writing for block_hash in request.block_hashes)

    def holders(self) -> Iterator[list[int]]:
        """Yield all that hold blocks, for checks of integrity."""
        yield from (search.blocks for search in self._searches.values())
        yield from (job.blocks for job in self._jobs.values())
        yield from (self._loading, self._saving, self._writing)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Count blocks that the device has as used, so that host memory keeps what is in use."""
        blocks = [block for each in reversed(hashes) if (block := self.pool.find(each)) is not None]
        self.pool.share(blocks)
        self.pool.free(blocks)

    def _begin(self, request: Request, place: int) -> _Search:
        last = -(-(len(request.token_ids) - 1) // self.block_size)
        search = _Search(place, request.block_hashes[place:last], self.clock + self._timeout)
        self._searches[request] = search
        self._hold(search)
        self._look_up(search)
        return search

    def _look_up(self, search: _Search) -> None:
        """Have stores asked for the blocks that the search lacks, if they answer."""
        rest = search.hashes[len(search.blocks) :]
        if rest and self._transfers.may_find and not self._transfers.is_stalled(self._timeout):
            job = self._by_first.get(rest[0])
            if job is None:
                job = _Job(next(self._numbers), rest)
                self._jobs[job.number] = self._by_first[rest[0]] = job
                self._transfers.look_up(job.number, rest)
            job.searches.append(search)
            search.job = job

    def _hold(self, search: _Search) -> None:
        """Add the blocks that host memory has by now."""
        for block_hash in search.hashes[len(search.blocks) :]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            self.pool.share([block])
            search.blocks.append(block)

    def _leave(self, search: _Search) -> None:
        if search.job is not None:
            search.job.searches.remove(search)
        search.job = None

    def _found(self, job: _Job, num_held: int) -> None:
        held = min(num_held, self.pool.num_free)
        job.is_cut = held < num_held
        if job.searches and held:
            job.blocks = self.pool.allocate(held)
            self._transfers.fetch(job.number, job.hashes[:held], job.blocks)
        else:
            self._end(job)

    def _fetched(self, job: _Job, parts: Sequence[Collection[str]]) -> None:
        for block, block_hash, came in zip(job.blocks, job.hashes[: len(job.blocks)], parts, strict=True):
            if TARGET in came:
                self._parts[block] = frozenset(came)
                self.pool.register(block, block_hash)
        # What did not come now would not come the next time.
        job.is_cut = job.is_cut and all(TARGET in came for came in parts)
        self.pool.free(reversed(job.blocks))
        job.blocks = []
        self._end(job)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.number]
        if self._by_first.get(job.hashes[0]) is job:
            del self._by_first[job.hashes[0]]
        for search in job.searches:
            search.job, search.is_cut = None, job.is_cut
            before = len(search.blocks)
            self._hold(search)
            after = len(search.blocks)
            if search.hashes[after : after + 1] != job.hashes[after - before :][:1]:
                # It joined by its first block, and goes on behind what both want.
                self._look_up(search)
