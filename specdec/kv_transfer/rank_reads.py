"""Reads of blocks by all ranks: what they are asked for, and what every one of them has done. Pure Python."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from specdec.kv_transfer.transfers import TARGET, Fetched, Found, Read, Result, Saved


class Clear(NamedTuple):
    """A part of a block of host memory that did not come to all ranks alike, so that each fills it with zeros."""

    part: str
    block: int


class ReadMeta(NamedTuple):
    """Clears and then reads that each rank carries out in its host memory."""

    clears: list[Clear]
    reads: list[Read]


class RankReads:
    """The searches of a `HostTier` over all ranks, each of which has its own part of every block.

    The blocks of host memory have the same numbers on all ranks. A block is found, fetched or saved when it is on every
    rank, whatever their stores have lost: tokens whose blocks one rank lacks are computed by all. Each rank has such an
    object, and all of them are told the same.

    Args:
        has_stores: whether there are stores, on each rank the same.
        num_ranks: number of ranks.
        num_drafting: number of the first ranks, which have other parts than the target's too.
    """

    def __init__(self, has_stores: bool, num_ranks: int, num_drafting: int) -> None:
        self.has_stores, self._num_ranks, self._num_drafting = has_stores, num_ranks, num_drafting
        self._meta = ReadMeta([], [])
        # By job: the blocks that are being filled.
        self._blocks: dict[int, Sequence[int]] = {}
        # By kind and rank: what a rank has done and not all have.
        self._ended: dict[str, list[deque[Result]]] = {
            kind: [deque() for _ in range(num_ranks)] for kind in ("read", "written", "copied")
        }
        # Time of the coming step, and by rank whether its stores answer.
        self.clock = 0.0
        self.are_up = [True] * num_ranks
        # By rank: its reads without an answer, and since when it may have been at the first of them.
        self._num_open = [0] * num_ranks
        self._since = [0.0] * num_ranks

    @property
    def may_find(self) -> bool:
        """Return whether there are stores that answer, as far as every rank knows."""
        return self.has_stores and all(self.are_up)

    def is_stalled(self, seconds: float) -> bool:
        """Return whether a rank's read has taken longer than this, so that further ones would wait behind it."""
        now = self.clock
        return any(count and now - since > seconds for count, since in zip(self._num_open, self._since, strict=True))

    def look_up(self, job: int, hashes: Sequence[bytes]) -> None:
        """Have all ranks count how many of the blocks their stores have; the result is `Found`."""
        self._meta.reads.append(Read(job, hashes, ()))

    def fetch(self, job: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Have all ranks fill blocks of their host memory; the result is `Fetched`."""
        self._blocks[job] = blocks
        self._meta.reads.append(Read(job, hashes, blocks))

    def take(self) -> ReadMeta | None:
        """Hand over what all ranks shall do; None for nothing."""
        if not any(self._meta):
            return None
        meta, self._meta = self._meta, ReadMeta([], [])
        now = self.clock
        self._since = [since if count else now for count, since in zip(self._num_open, self._since, strict=True)]
        self._num_open = [count + len(meta.reads) for count in self._num_open]
        return meta

    def agree(self, rank: int, results: Iterable[Result]) -> list[Result]:
        """Return what every rank has done, now that one has done this.

        Reads end in their order on each rank, and so do copies and writes. So the next of a kind that all have done is
        the same one on all.
        """
        agreed: list[Result] = []
        for result in results:
            if isinstance(result, Saved):
                by_rank = self._ended["written" if result.is_written else "copied"]
            else:
                by_rank = self._ended["read"]
                self._num_open[rank] -= 1
                self._since[rank] = self.clock
            by_rank[rank].append(result)
            if all(by_rank):
                agreed.append(self._of_all([own.popleft() for own in by_rank]))
        return agreed

    def _of_all(self, results: Sequence[Result]) -> Result:
        """Return what all ranks have done of one thing."""
        first = results[0]
        if isinstance(first, Found):
            return Found(first.job, min(each.num_blocks for each in results if isinstance(each, Found)))
        if isinstance(first, Fetched):
            return self._fetched(first.job, [each for each in results if isinstance(each, Fetched)])
        assert all(each == first for each in results), "a rank has saved blocks in another order"
        return first

    def _fetched(self, job: int, answers: Sequence[Fetched]) -> Fetched:
        """Return the parts that came to all ranks that have them, and have others cleared in blocks that are of use.

        Where each rank has the whole draft model, all draft alike only if they read the same features and entries.
        """
        agreed, by_block = [], zip(*(each.parts for each in answers), strict=True)
        for block, ranks in zip(self._blocks.pop(job), by_block, strict=True):
            parts = _common(ranks[: self._num_drafting])
            if TARGET not in _common(ranks):
                parts.pop(TARGET, None)
            if TARGET in parts:
                lost = set().union(*ranks) - parts.keys()
                self._meta.clears.extend(Clear(name, block) for name in sorted(lost))
            agreed.append(parts)
        return Fetched(job, agreed)


def _common(ranks: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the parts that are alike in all of these."""
    first, *others = ranks
    return {name: own for name, own in first.items() if all(other.get(name) == own for other in others)}
