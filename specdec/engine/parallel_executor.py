"""An executor over several ranks: the first in this process, the others in processes of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specdec.engine.followers import Followers
from specdec.engine.rank_messages import Allocate, RunDummy
from specdec.execution.executor import MakeWorker
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
        make: makes the worker of this process.
    """

    worker: Worker

    def __init__(self, followers: Followers, make: MakeWorker) -> None:
        self._followers, self._make = followers, make
        self._writer = OrderWriter()

    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `Executor.start`."""
        self._followers.tell(Allocate(num_blocks, num_host_blocks))
        with self._together():
            self.worker = self._make(num_blocks, num_host_blocks)
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
