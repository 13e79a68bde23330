"""Executors: how an engine runs its steps, in this process or in several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import Worker
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import TreeRow
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.models.lora_adapter import AdapterFiles, AdapterWeights


class WorkerMaker(Protocol):
    """Maker of the worker of one process."""

    def build(self, num_blocks: int, num_host_blocks: int = 0) -> Worker:
        """Make a worker with a cache of `num_blocks` on the device and `num_host_blocks` in host memory."""
        ...

    def load_draft(self, folder: Path) -> DraftModel:
        """Load a head that can take the place of the present one.

        Raises:
            ValueError: the folder holds none that fits, with the reason.
        """
        ...

    def with_draft(self, worker: Worker, draft: DraftModel) -> Worker:
        """Return a worker over the same cache that drafts with another head; later ones are built with it as well."""
        ...

    def read_adapter(self, files: AdapterFiles) -> AdapterWeights:
        """Read this process's part of an adapter: of its layers, and of its columns and rows of their weights.

        Raises:
            ValueError: none that fits, with the reason.
        """
        ...

    def put_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """Put an adapter into a place of the banks, between two steps."""
        ...

    def connect(self, worker: Worker, block_bytes: int, rank: int = 0) -> KVConnector:
        """Make the connector of the settings on a worker's cache.

        Args:
            block_bytes: size of a block in the rank where it is largest.
            rank: number of this process.

        Raises:
            ValueError: a connector, or one of its settings, that cannot be used here.
        """
        ...


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
        """Make the workers, each with this many cache blocks on the device and in host memory.

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

    def run_dummy_drafts(self, rows: Sequence[DraftRow]) -> None:
        """Draft trees that nothing reads, and wait for them. The caller is in inference mode."""
        ...

    def update_draft(self, folder: Path) -> None:
        """Replace the draft head of all workers, between two steps.

        Raises:
            ValueError: the folder holds no head that fits; the workers keep the one that they have.
        """
        ...

    def load_adapter(self, place: int, files: AdapterFiles) -> None:
        """Load an adapter into a place of all workers' banks, between two steps.

        Raises:
            ValueError: none that fits; the place keeps what it has.
        """
        ...

    def connect(self, block_bytes: int) -> KVConnector:
        """Make the connector of the settings on the caches of all workers, and return it.

        Args:
            block_bytes: size of a block in the rank where it is largest.

        Raises:
            ValueError: a connector, or one of its settings, that cannot be used here.
        """
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
        workers: makes the worker.
    """

    worker: Worker

    def __init__(self, workers: WorkerMaker) -> None:
        self._workers = workers

    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `Executor.start`."""
        self.worker = self._workers.build(num_blocks, num_host_blocks)

    def step(self, order: StepOrder) -> None:
        """See `Executor.step`."""
        self.worker.begin(order)

    def collect(self) -> StepOutcome:
        """See `Executor.collect`."""
        return self.worker.finish()

    def run_dummy(self, rows: Sequence[TreeRow], trees: DraftTrees) -> None:
        """See `Executor.run_dummy`."""
        self.worker.runner.run_dummy(rows, trees)

    def run_dummy_drafts(self, rows: Sequence[DraftRow]) -> None:
        """See `Executor.run_dummy_drafts`."""
        self.worker.run_dummy_drafts(rows)

    def update_draft(self, folder: Path) -> None:
        """See `Executor.update_draft`."""
        self.worker = self._workers.with_draft(self.worker, self._workers.load_draft(folder))

    def load_adapter(self, place: int, files: AdapterFiles) -> None:
        """See `Executor.load_adapter`."""
        self._workers.put_adapter(place, self._workers.read_adapter(files))

    def connect(self, block_bytes: int) -> KVConnector:
        """See `Executor.connect`."""
        return self._workers.connect(self.worker, block_bytes)

    def check_health(self) -> None:
        """Do nothing: the worker lives as long as this process."""

    def shutdown(self) -> None:
        """Do nothing: the worker's memory is freed with the engine."""
