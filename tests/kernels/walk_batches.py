"""Batches of drafts to walk down, and what the verifier makes of them."""

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.noise import uniforms
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import Acceptance, DraftProbs, NoiseColumns, NoiseKey, PackedTrees, Stream, Walk
from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.host_walks import Rule, walk_rows
from specdec.verify.rejection import walk_rejection
from tests.kernels.kernel_checks import DEVICE

NAN, NEVER = float("nan"), float("-inf")
# Distance from a coin to its threshold below which float32 may decide the other way.
TOO_NEAR = 1e-5


class Batch(NamedTuple):
    """Trees under rows, and all that decides about them.

    Attributes:
        scores: `[rows + nodes, vocab]`.
        draft_probs: of the same shape, or None.
        keys: seed, sample index and position of each row.
        sampled: which rows are.
    """

    trees: list[DraftTree]
    scores: Tensor
    draft_probs: Tensor | None
    keys: list[tuple[int, int, int]]
    sampled: list[bool]

    def arguments(self, extra_nodes: int = 0, max_depth: int | None = None) -> dict[str, Any]:
        starts = [0]
        for tree in self.trees:
            starts.append(starts[-1] + 1 + len(tree))
        tokens = [token for tree in self.trees for token in tree.tokens]
        parents = [parent for tree in self.trees for parent in tree.parents]
        lists = (tokens, parents, starts, *zip(*self.keys, strict=True))
        parts = [torch.tensor(part, dtype=torch.int64, device=DEVICE) for part in lists]
        max_nodes = max(len(tree) for tree in self.trees) + extra_nodes
        return {
            "scores": self.scores.to(DEVICE),
            "draft_probs": None if self.draft_probs is None else in_order(self.draft_probs),
            "trees": PackedTrees(*parts[:3], max_nodes, self.depth if max_depth is None else max_depth),
            "noise": NoiseColumns(*parts[3:], torch.tensor(self.sampled, device=DEVICE)),
        }

    def only(self, row: int) -> "Batch":
        """The batch of this row alone."""
        start = sum(1 + len(tree) for tree in self.trees[:row])
        part, own = slice(start, start + 1 + len(self.trees[row])), slice(row, row + 1)
        q = None if self.draft_probs is None else self.draft_probs[part]
        return Batch(self.trees[own], self.scores[part], q, self.keys[own], self.sampled[own])

    @property
    def depth(self) -> int:
        return max(max(tree.depths, default=0) for tree in self.trees)

    def walks(self, rule: Rule) -> list[Acceptance]:
        """Return a rule's outcome for the rows on the host, with q in float64."""
        trees, start = [], 0
        for tree in self.trees:
            part = slice(start, start + 1 + len(tree))
            start = part.stop
            q = None if self.draft_probs is None else self.draft_probs[part].double()
            trees.append(DraftTree(tree.tokens, tree.parents, q))
        keys = [NoiseKey(*key) if sampled else None for key, sampled in zip(self.keys, self.sampled, strict=True)]
        return walk_rows(rule, self.scores.float(), trees, keys)


def in_order(laws: Tensor) -> DraftProbs:
    """One law for every root and node."""
    return DraftProbs(laws.to(DEVICE), torch.arange(len(laws), device=DEVICE))


def batch(
    trees: list[DraftTree],
    vocab: int,
    seed: int,
    has_draft: bool,
    dtype: torch.dtype = torch.float32,
    invalid: float = 0.0,
    apart: float = 0.7,
    exact: bool = False,
) -> Batch:
    """Drawn from a seed, with some tokens that have no chance.

    Args:
        invalid: share of the rows of scores that are NaN, infinite or forbid every token.
        apart: of p and q; where they have much in common paths grow long, else many children are rejected.
        exact: scores of 0 and -inf alone and q of few bits, so that float32 makes no rounding that matters.
    """
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = sum(1 + len(tree) for tree in trees)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    drafted = logits + apart * torch.randn(rows, vocab, generator=generator)
    draft_probs = torch.softmax(drafted.masked_fill(torch.rand(logits.shape, generator=generator) < 0.2, NEVER), -1)
    # Of a vocabulary forbidden as a whole.
    draft_probs = torch.where(draft_probs.isnan(), 1 / vocab, draft_probs)
    gone = torch.rand(logits.shape, generator=generator) < 0.2
    gone[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] = False
    if exact:
        logits = torch.zeros(rows, vocab)
        counts = torch.bincount(torch.randint(vocab * rows, (8 * rows,), generator=generator), minlength=vocab * rows)
        draft_probs = counts.view(rows, vocab) + 8 * torch.nn.functional.one_hot(torch.arange(rows) % vocab, vocab)
        draft_probs = draft_probs / draft_probs.sum(-1, keepdim=True)
    scores = logits.masked_fill(gone, NEVER).to(dtype)
    for row in range(rows):
        if choice.random() < invalid:
            scores[row] = choice.choice([NAN, NEVER, float("inf")])
        elif choice.random() < invalid / 2:
            scores[row, choice.randrange(vocab)] = choice.choice([NAN, float("inf")])
    keys = [(choice.randrange(2**63), choice.randrange(3), choice.randrange(40)) for _ in trees]
    sampled = [choice.random() < 0.8 for _ in trees]
    return Batch(trees, scores, draft_probs if has_draft else None, keys, sampled)


def as_lists(found: Walk) -> list[tuple[list[int], int, int]]:
    return list(zip(*(part.tolist() for part in found), strict=True))


def verified(given_batch: Batch, depth: int, rule: Rule = walk_rejection) -> list[tuple[list[int], int, int]]:
    """Return the verifier's outcome on the host, in the form of a walk."""
    found = given_batch.walks(rule)
    return [([*path, *[-1] * (depth - len(path))], len(path), token) for path, token in found]


class Margin(PhiloxChance):
    """Remembers how near the nearest of its coins and draws was to going another way."""

    least = 1.0

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        accepted = super().accept(depth, rank, probability)
        coin = self._coins[(depth + rank) * (depth + rank + 1) // 2 + rank]
        self.least = min(self.least, abs(coin - float(probability)))
        return accepted

    def draw(self, depth: int, weights: Any) -> int:
        (u,) = uniforms(*self.key[:2], self.key.position + depth, 1, Stream.RESIDUAL)
        sums = weights.cumsum(0)
        self.least = min(self.least, float((sums / sums[-1] - u).abs().min()))
        return super().draw(depth, weights)


def margin(given_batch: Batch, row: int, rule: Rule = walk_rejection) -> float:
    """Return the margin of one row of the batch."""
    margins: list[float] = []

    def spied(tree: DraftTree, target: Any, chance: Chance) -> Acceptance:
        assert isinstance(chance, PhiloxChance)
        spy = Margin(chance.key)
        found = rule(tree, target, spy)
        margins.append(spy.least)
        return found

    given_batch.only(row).walks(spied)
    return margins[0] if margins else 1.0


def with_nodes_at(trees: PackedTrees, offset: int) -> PackedTrees:
    """Return the trees with nodes that begin so far in their memory, as columns of a table do."""

    def moved(part: Tensor) -> Tensor:
        memory = part.new_zeros(offset + len(part))
        memory[offset:] = part
        return memory[offset:]

    return trees._replace(tokens=moved(trees.tokens), parents=moved(trees.parents))
