"""The first of several ranks, and the processes of the others as it sees them."""

import pickle
import re
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from specdec.parallel.other_ranks import OtherRanks
from specdec.parallel.rank_group import Store
from specdec.parallel.rank_layout import RankGroups, RankLayout, join_groups
from specdec.parallel.rank_link import RankLink
from specdec.parallel.ranks import REFUSALS, Raised, RankDeadError, Ranks

T = TypeVar("T")
# Seconds in which a rank must have imported, loaded its weights, or made its cache.
START_TIMEOUT = 600.0
# Seconds of a collective operation and of a message, after which a rank counts as hung. Ranks compute the same, so that
# they come to an operation at about the same time. With `_LAST_WORDS`, an engine ends within 10 seconds.
COLLECTIVE_TIMEOUT = 8.0
# Seconds for the others to say why they failed, and for each to end by itself.
_LAST_WORDS, _END = 1.0, 2.0


class FirstRank(Ranks):
    """The rank whose process has the engine's user; see `Ranks`. An interrupted operation ends the others.

    Args:
        others: the processes of the other ranks, that this one or a launcher has started, or Ray actors.
        timeout: seconds of an operation between ranks.
    """

    def __init__(self, layout: RankLayout, others: OtherRanks, timeout: float = COLLECTIVE_TIMEOUT) -> None:
        self.layout, self._others, self.timeout = layout, others, timeout
        self._error: RankDeadError | None = None
        self._processes = others.processes
        pairs = zip(others.connections, self._processes, strict=True)
        self._links = {rank: RankLink(*pair) for rank, pair in enumerate(pairs, 1)}
        self._earlier_stages = [rank for rank in self._links if not layout.in_last_stage(rank)]
        # Also for an engine that is given up without being closed: threads hold the links.
        self._close = weakref.finalize(self, _close, list(self._links.values()), others)

    def groups(self, device: torch.device) -> RankGroups:
        store: Store = self._others.store
        # They may take long to come, and an operation may not.
        self.share(None)
        with self.together():
            return join_groups(0, self.layout, store, device, self.timeout, self._others.host)

    def tell(self, record: object) -> None:
        self._send(record, self._links)

    def tell_stages(self, make: Callable[[], object]) -> None:
        if self._earlier_stages:
            self._send(make(), self._earlier_stages)

    def _send(self, record: object, ranks: Iterable[int]) -> None:
        self.check()
        data = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
        for rank in ranks:
            try:
                self._links[rank].send(data)
            except OSError as error:
                raise self.failed(error) from None

    def decide(self, make: Callable[[], T]) -> T:
        try:
            decided = make()
        except REFUSALS as error:
            self.tell(Raised(str(error)))
            raise
        self.tell(decided)
        return decided

    def share(self, value: T, *, in_step: bool = False) -> list[T]:
        self.check()
        values, timeout = [value], self.timeout if in_step else START_TIMEOUT
        for link in self._links.values():
            answer = link.answer(timeout)
            if answer is None:
                raise self.failed(TimeoutError(f"no answer in {timeout:g} seconds"))
            values.append(answer.value)
        self.tell(values)
        return values

    @contextmanager
    def together(self, *refusals: type[Exception]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, (RankDeadError, *refusals)):
                raise
            raise self.failed(error) from error
        except BaseException as error:
            self.failed(error)
            raise

    def check(self) -> None:
        if self._error is None and all(link.is_alive for link in self._links.values()):
            return
        raise self.failed(RuntimeError("another rank is gone"))

    def failed(self, error: BaseException) -> RankDeadError:
        """End the other ranks, and return the error that says why they cannot go on.

        Args:
            error: as the first rank saw it; another rank's own reason goes before it.
        """
        if self._error is None:
            reason = self._reason() or f"rank 0 of {self.layout.size} could not go on: {_line(error)}"
            self._error = RankDeadError(f"{reason}; the engine must be started anew")
            self.kill()
        return RankDeadError(str(self._error))

    def _reason(self) -> str | None:
        """Return why another rank has ended, if one has."""
        end, gone, failed = time.monotonic() + _LAST_WORDS, [], []
        for rank, link in self._links.items():
            name = f"rank {rank} of {self.layout.size}"
            if how := link.end(max(0.0, end - time.monotonic())):
                gone.append(f"{name} {how}")
            elif link.failure is not None:
                failed.append(f"{name} failed: {link.failure}")
        # A rank whose neighbour is gone fails too; the neighbour's end is the reason.
        return next(iter([*gone, *failed]), None)

    def kill(self) -> None:
        """End the other ranks at once."""
        for process in self._processes:
            process.kill()
        self._close()

    def close(self) -> None:
        """End the other ranks, those that do not end by themselves by force; see `Ranks.close`."""
        self._error = self._error or RankDeadError("the ranks were closed")
        self._close()
        for process in self._processes:
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _close(links: Sequence[RankLink], others: OtherRanks) -> None:
    for link in links:
        link.close()
    others.close()


def _line(error: BaseException) -> str:
    """Return the first line of an error, without the place in gloo's source where it begins."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[\S*\] ", "", line)[:200]
