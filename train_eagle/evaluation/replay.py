"""Tau of a head on texts that the target is known to say, without running the target."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch

from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.drafters import drafter_of, shape_for
from specdec.draft_heads.heads.draft_head import DraftModel, HeadForm
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.train_eagle.passes.features import FeatureBatch
from specdec.verify.sampling import Context, Sampling

BLOCK_SIZE = 16


class KnownAnswer(NamedTuple):
    """An answer of the target at temperature 0.

    Attributes:
        batch: one conversation, which ends with the answer, and the target's states of all its tokens.
        start: tokens before the answer.
    """

    batch: FeatureBatch
    start: int


@torch.no_grad()
def replay(
    draft: DraftModel, answers: Sequence[KnownAnswer], shape: DraftShape, kernels: KernelSet
) -> list[SpeculationStats]:
    """Draft along answers as the engine does at temperature 0, with every tree as large as `shape` allows.

    No output depends on drafts, so the tokens that a step accepts are those that the tree shares with the answer. A
    step costs the head's passes alone.

    Args:
        draft: the head, in the form of `kernels`.

    Returns:
        The figures of each answer. As in the engine, its first token comes with the prompt and is no step's.
    """
    head, bounds = draft.head, shape_for(draft, shape)
    blocks = [ceil_div(len(answer.batch.tokens) + bounds.slots, BLOCK_SIZE) for answer in answers]
    tables = [range(end - count, end) for end, count in zip(accumulate(blocks), blocks, strict=True)]
    slots, llama, weight = sum(blocks) * BLOCK_SIZE, head.llama, draft.readout.projection.weight
    kv = weight.new_zeros(llama.num_layers, slots, 2 * llama.num_kv_heads, llama.head_dim)
    features = weight.new_zeros(slots, head.feature_size)
    for table, answer in zip(tables, answers, strict=True):
        # The features of tokens that are not known yet lie where nothing reads them.
        begin = table[0] * BLOCK_SIZE
        states = answer.batch.to(kv.device).read_by(cast("HeadForm", head))
        features[begin : begin + len(states)] = states
    drafter = drafter_of(draft, kv, features, BLOCK_SIZE, kv.dtype, bounds, Proposal.COUPLED, kernels)
    walks = [_Walk(answer, table) for answer, table in zip(answers, tables, strict=True)]
    while left := [walk for walk in walks if walk.known < len(walk.tokens)]:
        drafted = drafter.propose([walk.row(bounds) for walk in left])
        assert isinstance(drafted, HostTrees)
        for walk, tree in zip(left, drafted.trees, strict=True):
            walk.step(tree)
    return [walk.stats for walk in walks]


class _Walk:
    """An answer as far as it is known. Its first token comes with the prompt."""

    def __init__(self, answer: KnownAnswer, table: Sequence[int]) -> None:
        self.tokens, self.table, self.prompt = answer.batch.tokens.tolist(), table, answer.start
        self.known, self.read, self.stats = answer.start + 1, 0, SpeculationStats()

    def row(self, shape: DraftShape) -> DraftRow:
        """Return the row of the next step, whose tree is no deeper than the answer is long."""
        known, depth = self.known, min(shape.depth, len(self.tokens) - self.known - 1)
        context = Context(Sampling(), self.tokens[:known], self.prompt)
        row = DraftRow(self.table, self.read, known, shape.nodes if depth else 0, depth, context)
        self.read = known
        return row

    def step(self, tree: DraftTree) -> None:
        """Take the tokens that the tree shares with the answer, and the one behind them."""
        node, accepted = ROOT, 0
        while (child := tree.children.get((node, self.tokens[self.known + accepted]))) is not None:
            node, accepted = child, accepted + 1
        self.known += accepted + 1
        self.stats.count(accepted, accepted + 1, len(tree))
