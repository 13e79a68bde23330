"""The ranks of an engine while it is built: this process alone, or the first of several."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from specdec.config import EngineConfig
from specdec.engine.followers import Followers
from specdec.engine.parallel_executor import ParallelExecutor
from specdec.engine.rank_messages import LoadDrafts
from specdec.execution.executor import Executor, InProcessExecutor, WorkerMaker
from specdec.models.rank_group import RankGroup


class Ranks(Protocol):
    """The other ranks, as loading and building need them.

    Attributes:
        share: words that follow the number of parameters, where this process holds a part of them.
    """

    share: str

    def group(self, device: torch.device) -> RankGroup | None:
        """Return the group of all ranks, None for a single one."""
        ...

    def load_drafts(self, kept_tokens: frozenset[int]) -> None:
        """Have the other ranks load the draft model, once they have loaded the target."""
        ...

    def executor(self, workers: WorkerMaker) -> Executor:
        """Return the executor of the engine."""
        ...


class OneRank:
    """A single rank: the model is in one process."""

    share = ""

    def group(self, device: torch.device) -> None:  # noqa: ARG002
        return None

    def load_drafts(self, kept_tokens: frozenset[int]) -> None:
        pass

    def executor(self, workers: WorkerMaker) -> Executor:
        return InProcessExecutor(workers)


class SeveralRanks:
    """The first rank, beside its followers."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.share = f" on rank 0 of {followers.size}"
        self.group = followers.group
        self.executor = partial(ParallelExecutor, followers)

    def load_drafts(self, kept_tokens: frozenset[int]) -> None:
        self._followers.wait()
        self._followers.tell(LoadDrafts(kept_tokens))


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[Ranks]:
    """Start the ranks beside this one, and end them if the engine is not built."""
    if config.tensor_parallel_size == 1:
        yield OneRank()
        return
    followers = Followers(config)
    try:
        yield SeveralRanks(followers)
    except (ValueError, OSError):
        # A mistake in settings and files, which the followers meet as well.
        followers.kill()
        raise
    except Exception as error:
        raise followers.failed(error) from error
    except BaseException:
        followers.kill()
        raise
