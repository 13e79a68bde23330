"""Choice of the acceptance rule, and of the drafts and the verifier that go with it."""

from dataclasses import replace

from specdec.config import Verify
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.kernels.kernel_set import KernelSet
from specdec.verify.verifier import CoupledVerifier, Verifier, WeighingVerifier


class AcceptanceRule:
    """An acceptance rule.

    Attributes:
        proposal: how drafts are chosen for the rule.
    """

    def __init__(self, name: Verify) -> None:
        self.name = name
        self.proposal = Proposal.COUPLED if name == "coupled" else Proposal.DRAWN

    def shape(self, asked: DraftShape) -> DraftShape:
        """Return the bounds of a tree, reduced to a chain for the rule that takes chains alone."""
        return replace(asked, branching=1, nodes=asked.depth) if self.name == "block" else asked

    def verifier(self, kernels: KernelSet) -> Verifier:
        """Make the rule's verifier for a device's kernels."""
        if self.name == "coupled":
            return CoupledVerifier(kernels)
        return WeighingVerifier(kernels, kernels.block_walk if self.name == "block" else kernels.rejection_walk)
