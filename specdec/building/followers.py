"""The processes of the ranks beside the first, as the first one sees them."""

import pickle
import re
import subprocess
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from specdec.building.launched_ranks import LaunchedRanks
from specdec.building.rank_link import RankLink
from specdec.building.rank_loader import layout_of
from specdec.building.rank_messages import Join, Message, Refusal
from specdec.building.ray_ranks import RayRanks
from specdec.building.started_ranks import OtherRanks, StartedRanks
from specdec.config import EngineConfig
from specdec.core.launch import current_launch
from specdec.execution.executor import ExecutorDeadError
from specdec.parallel.rank_layout import RankGroups, join_groups

# Seconds in which a follower's process must have imported, loaded its weights, or made its cache.
START_TIMEOUT = 600.0
# Seconds of a collective operation and of a message, after which a rank counts as hung. Ranks compute the same, so that
# they come to an operation at about the same time.
COLLECTIVE_TIMEOUT = 30.0
# Seconds for the followers to say why they failed, and for each to end by itself.
_LAST_WORDS, _END = 1.0, 2.0


class Followers:
    """All ranks but the first, in processes that this one or a launcher has started, or in Ray actors.

    Attributes:
        last_stage, earlier_stages: numbers of the ranks of the last pipeline stage, and of those before it.
    """

    def __init__(self, config: EngineConfig, timeout: float = COLLECTIVE_TIMEOUT) -> None:
        self._layout, self._timeout = layout_of(config), timeout
        self._ranks = range(1, self.size)
        self.last_stage = [rank for rank in self._ranks if self._layout.in_last_stage(rank)]
        self.earlier_stages = [rank for rank in self._ranks if not self._layout.in_last_stage(rank)]
        self._error: ExecutorDeadError | None = None
        self._others = _other_ranks(config, self.size, timeout)
        self._processes = self._others.processes
        pairs = zip(self._others.connections, self._processes, strict=True)
        self._links = dict(zip(self._ranks, (RankLink(*pair) for pair in pairs), strict=True))
        # Also for an engine that is given up without being shut down: threads hold the links.
        self._close = weakref.finalize(self, _close, list(self._links.values()), self._others)
        for rank in self._ranks:
            self.tell(Join(config, rank, timeout), [rank])

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self._layout.size

    def groups(self, device: torch.device) -> RankGroups:
        """Wait until all are there, and return the first rank's groups."""
        self.answers()
        try:
            return join_groups(0, self._layout, self._others.store, device, self._timeout, self._others.host)
        except RuntimeError as error:
            raise self.failed(error) from None

    def tell(self, message: Message, ranks: Sequence[int] | None = None) -> None:
        """Send a message to all, or to some of them."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks if ranks is None else ranks:
            try:
                self._links[rank].send(data)
            except OSError as error:
                raise self.failed(error) from None

    def answers(self) -> list[int]:
        """Wait until all have done what they were told; return their answers.

        Raises:
            ExecutorDeadError: one has failed, with its reason.
        """
        found = [self._answer(rank) for rank in self._ranks]
        return [answer for answer in found if isinstance(answer, int)]

    def refusal(self, ranks: Sequence[int]) -> str | None:
        """Wait until some have done what they were told; return the reason if one has refused it.

        Raises:
            ExecutorDeadError: one has failed, with its reason.
        """
        found = [self._answer(rank) for rank in ranks]
        return next((answer.reason for answer in found if isinstance(answer, Refusal)), None)

    def _answer(self, rank: int) -> int | Refusal:
        answer = self._links[rank].answer(START_TIMEOUT)
        if answer is None:
            raise self.failed(TimeoutError(f"no answer in {START_TIMEOUT:g} seconds"))
        return answer

    def wait(self, seconds: float) -> None:
        """Wait until all have done what they were told, for at most so long, whatever they say."""
        end = time.monotonic() + seconds
        for link in self._links.values():
            if link.is_alive:
                link.answer(max(0.0, end - time.monotonic()))

    def transferred(self) -> list[tuple[int, Any]]:
        """Return rank and output of connectors that have done something since the last call, without waiting."""
        return [(rank, output) for rank, link in self._links.items() for output in link.take_transferred()]

    def check(self) -> None:
        """Check that all are there.

        Raises:
            ExecutorDeadError: one is gone, now or earlier.
        """
        if self._error is None and all(link.is_alive for link in self._links.values()):
            return
        raise self.failed(RuntimeError("another rank is gone"))

    def failed(self, error: BaseException) -> ExecutorDeadError:
        """End all followers, and return the error that says why the ranks cannot go on.

        Args:
            error: as the first rank saw it; a follower's own reason goes before it.
        """
        if self._error is None:
            reason = self._reason() or f"rank 0 of {self.size} could not go on: {_line(error)}"
            self._error = ExecutorDeadError(f"{reason}; the engine must be started anew")
            self.kill()
        return ExecutorDeadError(str(self._error))

    def _reason(self) -> str | None:
        """Return why a follower has ended, if one has."""
        end, gone, failed = time.monotonic() + _LAST_WORDS, [], []
        for rank, link in self._links.items():
            name = f"rank {rank} of {self.size}"
            if how := link.end(max(0.0, end - time.monotonic())):
                gone.append(f"{name} {how}")
            elif link.failure is not None:
                failed.append(f"{name} failed: {link.failure}")
        # A rank whose neighbour is gone fails too; the neighbour's end is the reason.
        return next(iter([*gone, *failed]), None)

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes:
            process.kill()
        self._close()

    def shutdown(self) -> None:
        """Let all end, and kill those that do not."""
        self._error = self._error or ExecutorDeadError("the ranks were shut down")
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


def _other_ranks(config: EngineConfig, size: int, timeout: float) -> OtherRanks:
    launch, by_ray = current_launch(), config.distributed_executor_backend == "ray"
    if launch is not None and by_ray:
        raise ValueError("distributed_executor_backend is 'ray', and a launcher has started the ranks; leave it out")
    if launch is not None:
        return LaunchedRanks(launch, timeout)
    return RayRanks(size, torch.device(config.device).type, timeout) if by_ray else StartedRanks(size, timeout)


def _line(error: BaseException) -> str:
    """Return the first line of an error, without the place in gloo's source where it begins."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[\S*\] ", "", line)[:200]
