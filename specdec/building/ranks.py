"""The ranks of an engine while it is built: this process alone, or the first of several."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from specdec.building.followers import Followers
from specdec.building.parallel_executor import ParallelExecutor
from specdec.building.rank_loader import layout_of
from specdec.building.rank_messages import Fit, LoadDrafts, Rehearsed, Tap
from specdec.config import EngineConfig
from specdec.core.launch import Launch, current_launch
from specdec.execution.executor import Executor, InProcessExecutor, WorkerMaker
from specdec.parallel.rank_layout import RankGroups


class Ranks(Protocol):
    """The other ranks, as loading and building need them.

    Attributes:
        share: words that follow the number of parameters, where this process holds a part of them.
    """

    share: str

    def groups(self, device: torch.device) -> RankGroups | None:
        """Return the groups of this rank, None for a single one."""
        ...

    def load_drafts(self) -> None:
        """Have the ranks of the last stage load the draft model, once all have loaded the target."""
        ...

    def tap(self, layers: tuple[int, ...]) -> int:
        """Have earlier stages send the inputs of layers along; return the bytes of the other ranks' largest block."""
        ...

    def fit(self) -> None:
        """Have the other ranks find how many blocks their memory holds; `rehearsed` follows on a GPU."""
        ...

    def rehearsed(self) -> None:
        """Tell the other ranks that the largest steps have run."""
        ...

    def num_blocks(self) -> list[int]:
        """Return how many blocks the memory of each other rank holds."""
        ...

    def executor(self, workers: WorkerMaker) -> Executor:
        """Return the executor of the engine."""
        ...


class OneRank:
    """A single rank: the model is in one process."""

    share = ""

    def groups(self, device: torch.device) -> None:  # noqa: ARG002
        return None

    def load_drafts(self) -> None:
        pass

    def tap(self, layers: tuple[int, ...]) -> int:  # noqa: ARG002
        return 0

    def fit(self) -> None:
        pass

    def rehearsed(self) -> None:
        pass

    def num_blocks(self) -> list[int]:
        return []

    def executor(self, workers: WorkerMaker) -> Executor:
        return InProcessExecutor(workers)


class SeveralRanks:
    """The first rank, beside its followers."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.share = f" on rank 0 of {followers.size}"
        self.groups = followers.groups
        self.executor = partial(ParallelExecutor, followers)
        self.num_blocks = followers.answers

    def load_drafts(self) -> None:
        self._followers.answers()
        self._followers.tell(LoadDrafts(), self._followers.last_stage)

    def tap(self, layers: tuple[int, ...]) -> int:
        self._followers.tell(Tap(layers), self._followers.earlier_stages)
        return max(self._followers.answers())

    def fit(self) -> None:
        self._followers.tell(Fit())

    def rehearsed(self) -> None:
        self._followers.tell(Rehearsed())


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[Ranks]:
    """Start the ranks beside this one, or meet them, and end them if the engine is not built.

    Raises:
        ValueError: a launcher has started another number of ranks, or this process is not the first.
    """
    size, launch = layout_of(config).size, current_launch()
    if launch is not None:
        _check_launch(launch, size)
    if size == 1:
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


def _check_launch(launch: Launch, size: int) -> None:
    if launch.rank:
        raise ValueError(f"this process is rank {launch.rank} of {launch.size}; only rank 0 makes an engine")
    if launch.size != size:
        raise ValueError(
            f"the launcher has started {launch.size} ranks (WORLD_SIZE), and tensor_parallel_size times "
            f"pipeline_parallel_size is {size}; make them equal"
        )
