"""Executors: how an engine runs its steps, in this process or in several."""

from collections.abc import Callable, Sequence
from typing import Protocol

from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import Worker
from specdec.kernels.draft_trees import DraftTrees
from specdec.kernels.tree import TreeRow

# Make the worker of this process, given the number of cache blocks on the device and in host memory.
MakeWorker = Callable[[int, int], Worker]


class ExecutorDeadError(RuntimeError):
    """A worker is gone, and the engine with it. The message is one line."""


class Executor(Protocol):
    """Workers of one model, as an engine uses them.

    Attributes:
        worker: the worker of this process; it exists once `start` returns.
    """

    @property
    def worker(self) -> Worker: ...

    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        """Make the workers, each with so many cache blocks on the device and in host memory.

        Raises:
            ExecutorDeadError: a worker in another process is gone; every other method raises it as well.
        """
        ...

    def step(self, order: StepOrder) -> None:
        """Run a step up to the launch of its forward pass, without waiting for a device."""
        ...

    def collect(self) -> StepOutcome:
        """Finish the step that was launched last, and return its outcome."""
        ...

    def run_dummy(self, rows: Sequence[TreeRow], trees: DraftTrees) -> None:
        """Run a pass whose output nothing reads, and wait for it."""
        ...

    def check_health(self) -> None:
        """Raise an `ExecutorDeadError` if a worker is gone."""
        ...

    def shutdown(self) -> None:
        """End the workers in other processes. Nothing may be called afterwards."""
        ...


class InProcessExecutor:
    """A single worker in this process.

    Args:
        make: makes the worker.
    """

    worker: Worker

    def __init__(self, make: MakeWorker) -> None:
        self._make = make

    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `Executor.start`."""
        self.worker = self._make(num_blocks, num_host_blocks)

    def step(self, order: StepOrder) -> None:
        """See `Executor.step`."""
        self.worker.begin(order)

    def collect(self) -> StepOutcome:
        """See `Executor.collect`."""
        return self.worker.finish()

    def run_dummy(self, rows: Sequence[TreeRow], trees: DraftTrees) -> None:
        """See `Executor.run_dummy`."""
        self.worker.runner.run_dummy(rows, trees)

    def check_health(self) -> None:
        """Do nothing: the worker lives as long as this process."""

    def shutdown(self) -> None:
        """Do nothing: the worker's memory is freed with the engine."""
