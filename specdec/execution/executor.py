"""The executor, which runs a rank's steps on its worker, and the interface of what makes the worker."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.execution.stages import sent_trees
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import Worker
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.models.lora_adapter import AdapterFiles, AdapterWeights
from specdec.parallel.ranks import Ranks

Loaded = TypeVar("Loaded")


class WorkerMaker(Protocol):
    """Maker of the worker of one rank."""

    def build(self, num_blocks: int) -> Worker:
        """Make a worker with a cache of `num_blocks`."""
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

    def connect(self, worker: Worker, block_bytes: int, rank: int, parts: Sequence[str]) -> KVConnector:
        """Make the connector of the settings on a worker's cache.

        Args:
            block_bytes: size of a block in the rank where it is largest.
            rank: number of this one.
            parts: names of the cache's parts in the first rank, which has all.

        Raises:
            ValueError: a connector, or one of its settings, that cannot be used here.
        """
        ...


class Executor:
    """The worker of this rank, as its engine uses it. The workers of all ranks do the same.

    Args:
        workers: makes the worker.
        ranks: this rank among all.
        num_blocks: blocks of the cache.

    Attributes:
        worker: made at once, by all ranks at the same time.
    """

    def __init__(self, workers: WorkerMaker, ranks: Ranks, num_blocks: int) -> None:
        self._workers, self.ranks = workers, ranks
        # The draft model is in the last pipeline stage alone.
        self._drafts = ranks.layout.in_last_stage(ranks.rank)
        with ranks.together():
            self.worker = workers.build(num_blocks)
        ranks.share(None)

    def step(self, order: StepOrder) -> None:
        """Run a step up to the launch of its forward pass, without waiting for a device."""
        trees = self.worker.draft(order)
        self.ranks.tell_stages(lambda: sent_trees(trees))
        self.worker.launch()

    def collect(self) -> StepOutcome:
        """Finish the step that was launched last, and return its outcome."""
        return self.worker.finish()

    def tell_outcome(self, outcome: StepOutcome) -> None:
        """Have earlier pipeline stages end the step too."""
        self.ranks.tell_stages(lambda: (outcome.acceptances, outcome.scores))

    def update_draft(self, folder: Path) -> None:
        """Replace the draft head, between two steps. One that a rank refuses is taken by none.

        Raises:
            ValueError: the folder holds no head that fits; the worker keeps the one that it has.
        """
        draft = self._loaded(lambda: self._workers.load_draft(folder) if self._drafts else None)
        with self.ranks.together():
            if draft is not None:
                before, self.worker = self.worker, self._workers.with_draft(self.worker, draft)
                self.worker.go_on_from(before)

    def load_adapter(self, place: int, files: AdapterFiles) -> None:
        """Load an adapter into a place of the banks, between two steps. One that a rank refuses is taken by none.

        Raises:
            ValueError: none that fits; the place keeps what it has.
        """
        files = files if self._drafts else files._replace(draft=None)
        adapter = self._loaded(lambda: self._workers.read_adapter(files))
        with self.ranks.together():
            self._workers.put_adapter(place, adapter)

    def connect(self, block_bytes: int) -> KVConnector:
        """Make the connector of the settings on the worker's cache. One that a rank refuses is used by none.

        Args:
            block_bytes: size of a block in the rank where it is largest.

        Raises:
            ValueError: a connector, or one of its settings, that cannot be used here.
        """
        # Ranks of earlier pipeline stages have fewer parts.
        parts = self.ranks.decide(lambda: tuple(self.worker.cache.parts))
        return self._loaded(lambda: self._workers.connect(self.worker, block_bytes, self.ranks.rank, parts))

    def _loaded(self, load: Callable[[], Loaded]) -> Loaded:
        """Return what this rank loads, once the others have loaded theirs.

        Raises:
            ValueError: one of them refuses it.
        """
        with self.ranks.together():
            try:
                loaded, refusal = load(), None
            except ValueError as error:
                refusal = error
        refusals = [one for one in self.ranks.share(None if refusal is None else str(refusal)) if one is not None]
        if refusal is not None:
            raise refusal
        if refusals:
            raise ValueError(refusals[0])
        return loaded
