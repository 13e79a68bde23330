"""Choice of the acceptance rule, and of the drafts and the verifier that go with it."""

from dataclasses import replace
from typing import get_args

from specdec.config import Verify
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.kernels.kernel_set import KernelSet
from specdec.verify.block import walk_block
from specdec.verify.kernel_coupled_verifier import KernelCoupledVerifier
from specdec.verify.kernel_walk_verifier import KernelWalkVerifier
from specdec.verify.rejection import walk_rejection
from specdec.verify.verifier import CoupledVerifier, Verifier
from specdec.verify.walk_verifier import WalkVerifier

RULES = get_args(Verify)


class AcceptanceRule:
    """An acceptance rule, by its name in `RULES`.

    Attributes:
        proposal: how drafts are chosen for the rule.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str) -> None:
        if name not in RULES:
            raise ValueError(f"verify is {name!r}; it must be one of {', '.join(RULES)}")
        self.name = name
        self.proposal = Proposal.COUPLED if name == "coupled" else Proposal.DRAWN

    def shape(self, asked: DraftShape) -> DraftShape:
        """Return the bounds of a tree, reduced to a chain for the rule that takes chains alone."""
        return replace(asked, branching=1, nodes=asked.depth) if self.name == "block" else asked

    def verifier(self, kernels: KernelSet) -> Verifier:
        """Make the rule's verifier for a device's kernels."""
        if self.name == "coupled":
            return KernelCoupledVerifier(kernels) if kernels.on_device else CoupledVerifier(kernels)
        if kernels.on_device:
            return KernelWalkVerifier(kernels, in_blocks=self.name == "block")
        return WalkVerifier(walk_block if self.name == "block" else walk_rejection, kernels)
