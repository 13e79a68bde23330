"""The part of a step that runs on the model's device: draft, one forward pass, verify, commit."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.drafting.chained_trees import add_chains
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.draft_heads.drafting.structured_drafts import without_forbidden
from specdec.execution.accepted_moves import AcceptedMoves
from specdec.execution.device_clock import Mark, mark
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.kernels.types.draft_trees import DraftTrees, PreparedWalk
from specdec.kernels.types.types import Acceptance
from specdec.kernels.types.upload import Packet
from specdec.verify.tree_batch import slots_of
from specdec.verify.verifier import Verifier

if TYPE_CHECKING:
    from specdec.execution.cuda_graphs import CudaGraphs


class DraftedStep(NamedTuple):
    """A step whose trees are drafted.

    Attributes:
        late: rows whose tokens the drafter reads behind the pass.
        drafting: when drafting began and ended, and reading behind the pass where there was any.
    """

    order: StepOrder
    trees: DraftTrees
    late: list[DraftRow]
    drafting: list[tuple[Mark, Mark]]


class Worker:
    """Model, cache, drafter and verifier of one process. It is given rows and knows no requests.

    Args:
        graphs: what captures the CUDA graphs of passes and drafting; None where there are none.

    Attributes:
        device: device of the cache.
    """

    def __init__(
        self, runner: ModelRunner, drafter: Drafter, verifier: Verifier, graphs: "CudaGraphs | None" = None
    ) -> None:
        self.runner, self.drafter, self.verifier, self.graphs = runner, drafter, verifier, graphs
        self.device = runner.cache.target.device
        self._drafted: DraftedStep | None = None
        self._logits: Tensor | None = None
        self._walk: PreparedWalk | None = None
        self._moves: AcceptedMoves | None = None

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    def draft(self, order: StepOrder) -> DraftTrees:
        """Move blocks and draft; return the trees of the rows. The caller is in inference mode."""
        self.move_blocks(order)
        drafts, late = _split(order)
        start = mark(self.device)
        drafted = self.drafter.propose(drafts)
        chained = add_chains(drafted, order.chains, self.device)
        trees = without_forbidden(chained, [row.context for row in order.drafts])
        self._drafted = DraftedStep(order, trees, late, [(start, mark(self.device))])
        return trees

    def move_blocks(self, order: StepOrder) -> None:
        """Make the block moves that precede a step."""
        self.cache.apply_moves(order.moves)
        order.moves.clear()

    def launch(self) -> None:
        """Launch the forward pass of the step that was drafted, and what the drafter reads behind it."""
        assert self._drafted is not None, "no step was drafted"
        order, trees, late, drafting = self._drafted
        self._logits = self.runner.forward(order.parts, trees)
        # A device is busy with the pass meanwhile.
        packet = Packet(self.device)
        self._walk = self.prepare_walk(order, trees, packet)
        packet.send()
        if late:
            start = mark(self.device)
            self.drafter.propose(late)
            drafting.append((start, mark(self.device)))

    def finish(self) -> StepOutcome:
        """Verify the drafts of the launched step, and move accepted cache entries into place."""
        assert self._drafted is not None, "no step was drafted"
        assert self._logits is not None, "no step was launched"
        (order, trees, _, drafting), logits, walk, moves = self._drafted, self._logits, self._walk, self._moves
        self._drafted = self._logits = self._walk = self._moves = None
        acceptances = list[Acceptance]()
        if walk is not None:
            outcome = walk(_sampled_logits(order, trees, logits))
            is_moved = moves is not None and outcome.walk is not None
            if moves is not None and outcome.walk is not None:
                # The device makes them while the outcome is on its way.
                moves.make(outcome.walk)
            acceptances = outcome.read()
            if not is_moved:
                self.move_accepted(order, acceptances)
        whole = self.runner.model.whole(logits) if order.needs_logits else None
        return StepOutcome(trees.read(), acceptances, whole, drafting, {})

    def run_dummy_drafts(self, rows: Sequence[DraftRow]) -> None:
        """Draft trees that nothing reads, and wait for them. The caller is in inference mode."""
        self.drafter.propose(rows)
        self.runner.wait()

    def prepare_walk(self, order: StepOrder, trees: DraftTrees, packet: Packet) -> PreparedWalk | None:
        """Return the acceptance rule of the sampled rows, None without such rows."""
        sampled = order.sampled
        if not sampled:
            return None
        own = trees if len(sampled) == len(order.parts) else trees.select(sampled)
        parts = [order.parts[row] for row in sampled]
        if any(own.sizes) and self.cache.kernels.on_device:
            self._moves = AcceptedMoves(self.cache, parts, own, packet)
        return self.verifier.prepare(own, [order.drafts[row].context for row in sampled], packet)

    def move_accepted(self, order: StepOrder, acceptances: Sequence[Acceptance]) -> None:
        """Move cache entries of accepted nodes that do not lie behind their chain yet to there."""
        source: list[int] = []
        target: list[int] = []
        for row, (path, _) in zip(order.sampled, acceptances, strict=True):
            if path != tuple(range(len(path))):
                part = order.parts[row]
                end = part.num_cached + len(part.tokens)
                slots = slots_of(part.block_table, end, end + path[-1] + 1, self.cache.block_size)
                source += [slots[node] for node in path]
                target += slots[: len(path)]
        if source:
            self.cache.move(source, target)


def _split(order: StepOrder) -> tuple[list[DraftRow], list[DraftRow]]:
    """Return the rows as the drafter takes them before the pass, and those whose tokens it reads behind it.

    An entry of the drafter's cache needs the target's features of the token before, which the pass makes.
    """
    pairs = zip(order.drafts, order.parts, strict=True)
    late = [row for row, part in pairs if row.draft_prefill_end > part.num_cached + 1]
    if not late:
        return order.drafts, []
    waiting = {id(row) for row in late}
    return [row._replace(draft_prefill_end=0) if id(row) in waiting else row for row in order.drafts], late


def _sampled_logits(order: StepOrder, trees: DraftTrees, logits: Tensor) -> Tensor:
    """Return the logits of the sampled rows' roots and nodes."""
    if sum(1 + trees.sizes[row] for row in order.sampled) == len(logits):
        return logits
    spans = score_spans(order, trees.sizes)
    return torch.cat([logits[spans[row].stop - 1 - trees.sizes[row] : spans[row].stop] for row in order.sampled])


def score_spans(order: StepOrder, sizes: Sequence[int]) -> list[slice]:
    """Return the slice of logits of each row: its scored tokens first, then the nodes of its tree.

    Args:
        sizes: nodes of each row's tree.
    """
    counts = [part.num_scored + size for part, size in zip(order.parts, sizes, strict=True)]
    return [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
