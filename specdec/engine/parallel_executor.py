"""An executor over several ranks: the first in this process, the others in processes of their own."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specdec.engine.followers import Followers
from specdec.engine.rank_messages import Allocate, LoadUpdate, RunDummy, UseUpdate
from specdec.execution.executor import WorkerMaker
from specdec.execution.step_codec import OrderWriter
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import Worker
from specdec.kernels.draft_trees import DraftTrees, HostTrees
from specdec.kernels.tree import TreeRow


class ParallelExecutor:
    """Ranks that each compute every step on a part of the weights. The plan is sent to all; they agree on the rest.

    A rank that fails ends them all: the others may wait for it in a collective operation.

    Args:
        followers: the other ranks, with their models loaded.
        workers: makes the worker of this process.
    """

    worker: Worker

    def __init__(self, followers: Followers, workers: WorkerMaker) -> None:
        self._followers, self._workers = followers, workers
        self._writer = OrderWriter()

    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `Executor.start`."""
        self._followers.tell(Allocate(num_blocks, num_host_blocks))
        with self._together():
            self.worker = self._workers.build(num_blocks, num_host_blocks)
        self._followers.wait()

    def step(self, order: StepOrder) -> None:
        """See `Executor.step`."""
        self._followers.check()
        self._followers.tell(self._writer.write(order))
        with self._together():
            self.worker.begin(order)

    def collect(self) -> StepOutcome:
        """See `Executor.collect`."""
        with self._together():
            return self.worker.finish()

    def run_dummy(self, rows: Sequence[TreeRow], trees: DraftTrees) -> None:
        """See `Executor.run_dummy`."""
        assert isinstance(trees, HostTrees)
        self._followers.tell(RunDummy(rows, trees))
        with self._together():
            self.worker.runner.run_dummy(rows, trees)

    def update_draft(self, folder: Path, kept_tokens: Collection[int]) -> None:
        """See `Executor.update_draft`. A head that one rank refuses is taken by none."""
        self._followers.tell(LoadUpdate(folder, frozenset(kept_tokens)))
        draft = refusal = None
        with self._together():
            try:
                draft = self._workers.load_draft(folder, kept_tokens)
            except ValueError as error:
                refusal = str(error)
        refusal = self._followers.wait() or refusal
        if draft is None or refusal is not None:
            raise ValueError(refusal)
        self._followers.tell(UseUpdate())
        with self._together():
            self.worker = self._workers.with_draft(self.worker, draft)
        self._followers.wait()

    def check_health(self) -> None:
        """See `Executor.check_health`."""
        self._followers.check()

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        self._followers.shutdown()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Do what all ranks do. Whatever interrupts it leaves the others waiting, so they are ended."""
        try:
            yield
        except Exception as error:
            raise self._followers.failed(error) from error
        except BaseException as error:
            self._followers.failed(error)
            raise
