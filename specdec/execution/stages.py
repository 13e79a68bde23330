"""Workers of pipeline stages before the last, whose first rank drafts and verifies for all."""

from collections.abc import Sequence

from specdec.draft_heads.drafting.drafter import DraftRow, NoDrafter
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import DraftedStep, Worker
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.upload import Packet
from specdec.parallel.ranks import Ranks
from specdec.verify.verifier import Verifier


class StageWorker(Worker):
    """A worker that is told the draft trees of a step before its pass, and behind it what was accepted of them."""

    def __init__(self, runner: ModelRunner, verifier: Verifier, ranks: Ranks) -> None:
        super().__init__(runner, NoDrafter(), verifier)
        self._ranks = ranks

    def draft(self, order: StepOrder) -> DraftTrees:
        """See `Worker.draft`."""
        self.move_blocks(order)
        trees = HostTrees(self._ranks.receive())
        self._drafted = DraftedStep(order, trees, [], [], Packet(self.device))
        return trees

    def prepare_verification(self, order: StepOrder, trees: DraftTrees, packet: Packet) -> None:
        """Do nothing: the last stage accepts."""

    def finish(self) -> StepOutcome:
        """See `Worker.finish`."""
        assert self._drafted is not None, "no step was drafted"
        order, trees, _, drafting, _ = self._drafted
        acceptances, scores = self._ranks.receive()
        self.move_accepted(order, acceptances)
        return StepOutcome(trees.read(), acceptances, None, drafting, scores)

    def run_dummy_drafts(self, rows: Sequence[DraftRow]) -> None:
        """Do nothing: the last stage drafts."""


def sent_trees(trees: DraftTrees) -> list[DraftTree]:
    """Return trees as they are told to earlier stages: without what their drafter knows of them."""
    return [
        DraftTree(tree.tokens, tree.parents, ranks=tree.ranks, num_chained=tree.num_chained, check=False)
        for tree in trees.read()
    ]
