"""An executor over several ranks: the first in this process, the others in processes of their own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from specdec.building.followers import Followers
from specdec.building.rank_messages import Allocate, Connect, LoadAdapter, LoadUpdate, UseAdapter, UseUpdate
from specdec.building.ranked_connector import RankedConnector
from specdec.cache.block_moves import BlockMove
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.execution.executor import WorkerMaker
from specdec.execution.step_codec import OrderWriter
from specdec.execution.step_order import DraftOrder, EntryMoves, PassOrder, StepOrder, StepOutcome
from specdec.execution.worker import Worker
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.models.lora_adapter import AdapterFiles

Loaded = TypeVar("Loaded")


class ParallelExecutor:
    """Ranks that each compute every step on a part of the weights.

    The ranks of the last pipeline stage, of which this process is one, get the plan and agree on the rest. Those of
    earlier stages get the rows with their trees, and with the next step, which nodes were accepted. A rank that fails
    ends them all: the others may wait for it in an operation between ranks.

    Args:
        followers: the other ranks, with their models loaded.
        workers: makes the worker of this process.
    """

    worker: Worker

    def __init__(self, followers: Followers, workers: WorkerMaker) -> None:
        self._followers, self._workers = followers, workers
        self._writer = OrderWriter()
        self._accepted = EntryMoves([], [])

    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        """See `Executor.start`."""
        self._followers.tell(Allocate(num_blocks, num_host_blocks))
        with self._together():
            self.worker = self._workers.build(num_blocks, num_host_blocks)
        self._followers.answers()

    def step(self, order: StepOrder) -> None:
        """See `Executor.step`."""
        followers = self._followers
        followers.check()
        if followers.last_stage:
            followers.tell(self._writer.write(order), followers.last_stage)
        # The worker empties its own list.
        moves = list(order.moves)
        with self._together():
            trees = self.worker.draft(order)
            if followers.earlier_stages:
                self._send_pass(order.parts, trees, moves)
            self.worker.launch()

    def _send_pass(self, parts: Sequence[TreeRow], trees: DraftTrees, moves: list[BlockMove]) -> None:
        drafted = HostTrees([DraftTree(tree.tokens, tree.parents, check=False) for tree in trees.read()])
        # A step that is broken off is run again; these entries must not move twice.
        accepted, self._accepted = self._accepted, EntryMoves([], [])
        self._followers.tell(PassOrder(parts, drafted, accepted, moves), self._followers.earlier_stages)

    def collect(self) -> StepOutcome:
        """See `Executor.collect`."""
        with self._together():
            outcome = self.worker.finish()
        self._accepted = outcome.accepted
        return outcome

    def run_dummy(self, rows: Sequence[TreeRow], trees: DraftTrees) -> None:
        """See `Executor.run_dummy`."""
        assert isinstance(trees, HostTrees)
        self._followers.tell(PassOrder(rows, trees, EntryMoves([], []), []))
        with self._together():
            self.worker.runner.run_dummy(rows, trees)

    def run_dummy_drafts(self, rows: Sequence[DraftRow]) -> None:
        """See `Executor.run_dummy_drafts`. The ranks may share the draft model."""
        self._followers.tell(DraftOrder(rows), self._followers.last_stage)
        with self._together():
            self.worker.run_dummy_drafts(rows)

    def update_draft(self, folder: Path) -> None:
        """See `Executor.update_draft`. A head that one rank refuses is taken by none."""
        followers = self._followers
        followers.tell(LoadUpdate(folder), followers.last_stage)
        draft = self._loaded(lambda: self._workers.load_draft(folder), followers.last_stage)
        followers.tell(UseUpdate(), followers.last_stage)
        with self._together():
            self.worker = self._workers.with_draft(self.worker, draft)
        followers.refusal(followers.last_stage)

    def load_adapter(self, place: int, files: AdapterFiles) -> None:
        """See `Executor.load_adapter`. An adapter that one rank refuses is taken by none."""
        followers = self._followers
        everywhere = [*followers.last_stage, *followers.earlier_stages]
        followers.tell(LoadAdapter(files), followers.last_stage)
        # The draft model is in the last stage alone.
        followers.tell(LoadAdapter(files._replace(draft=None)), followers.earlier_stages)
        adapter = self._loaded(lambda: self._workers.read_adapter(files), everywhere)
        followers.tell(UseAdapter(place))
        with self._together():
            self._workers.put_adapter(place, adapter)
        followers.refusal(everywhere)

    def _loaded(self, load: Callable[[], Loaded], ranks: Sequence[int]) -> Loaded:
        """Return what this rank loads, once the others have loaded theirs.

        Raises:
            ValueError: one of them refuses it.
        """
        loaded = refusal = None
        with self._together():
            try:
                loaded = load()
            except ValueError as error:
                refusal = str(error)
        refusal = self._followers.refusal(ranks) or refusal
        if loaded is None or refusal is not None:
            raise ValueError(refusal)
        return loaded

    def connect(self, block_bytes: int) -> KVConnector:
        """See `Executor.connect`. A connector that one rank refuses is used by none."""
        followers = self._followers
        followers.tell(Connect(block_bytes))
        everywhere = [*followers.last_stage, *followers.earlier_stages]
        own = self._loaded(lambda: self._workers.connect(self.worker, block_bytes), everywhere)
        return RankedConnector(own, followers, self._settle)

    def _settle(self) -> None:
        """Have earlier stages move accepted entries now, which they do with the next step otherwise."""
        if self._accepted.sources and self._followers.earlier_stages:
            self._followers.tell(self._accepted, self._followers.earlier_stages)
            self._accepted = EntryMoves([], [])

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
