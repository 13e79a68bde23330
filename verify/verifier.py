"""The acceptance rules: which draft tokens the target would have said itself."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.verify.noise import GumbelNoise, Stream
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.tree import ROOT, DraftTree

# What is emitted where no token can be: the row's logits are not finite, or every token is forbidden.
NO_TOKEN = -1


class Acceptance(NamedTuple):
    """What a sampled row's step yields: the tokens of `path`, then `next_token`.

    Attributes:
        path: accepted nodes from the root's child downwards.
        next_token: the target's own token after them, or `NO_TOKEN`.
    """

    path: tuple[int, ...]
    next_token: int


class SampledRow(NamedTuple):
    """A row to verify: a request and the draft tree under its last token."""

    tree: DraftTree
    context: Context

    @property
    def nodes(self) -> NodeRows:
        """The root and the tree's nodes."""
        return NodeRows(self.context, 1 + len(self.tree), lambda: torch.from_numpy(self.tree.path_tokens))


class Verifier(Protocol):
    """One of the rules."""

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        """Walk every row's tree.

        Args:
            rows: the sampled rows.
            logits: `[sum of (1 + nodes), vocab]`, per row its root, then its nodes.
        """
        ...


class CoupledVerifier:
    """Gumbel-max coupling: each output position has its own noise, shared by everything that samples there.

    The token emitted after a node is `argmax_v log p(v) + G_t(v)`, an exact sample from p; at temperature 0,
    `argmax_v` of the processed logits, lowest id on ties. The walk follows the child that carries it, and ends
    where there is none. The result is a function of p and the seed, whatever the tree (Daliri et al. 2024).
    """

    def __init__(self, noise: GumbelNoise) -> None:
        self.noise = noise

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        emitted = self.emitted_tokens(rows, logits).tolist()
        acceptances, start = [], 0
        for row in rows:
            acceptances.append(walk(row.tree, emitted[start : start + 1 + len(row.tree)]))
            start += 1 + len(row.tree)
        return acceptances

    def emitted_tokens(self, rows: Sequence[SampledRow], logits: Tensor) -> Tensor:
        """int64 `[sum of (1 + nodes)]`: the token that the target emits after each root and node."""
        samplings = [row.context.sampling for row in rows]
        if all(s.is_greedy and not s.edits for s in samplings):
            return argmax(logits)
        scores = processed_logits(logits, [row.nodes for row in rows])
        if not all(s.is_greedy for s in samplings):
            scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
            self._perturb_(scores, rows)
        return argmax(scores)

    def _perturb_(self, scores: Tensor, rows: Sequence[SampledRow]) -> None:
        """Add noise where a row is sampled. Log p differs from scores by a constant, which moves no argmax."""
        start = 0
        for tree, context in rows:
            part = slice(start, start + 1 + len(tree))
            if not context.sampling.is_greedy:
                depths = [0, *tree.depths]
                scores[part] += self.noise_vectors(context.sampling, context.num_output, max(depths) + 1)[depths]
            start = part.stop

    def noise_vectors(self, sampling: Sampling, position: int, count: int) -> Tensor:
        """float32 `[count, vocab]`: the noise of `count` output positions from `position` on."""
        key = (sampling.seed, sampling.sample_index)
        return self.noise.stack([(*key, position + depth, Stream.TARGET, 0) for depth in range(count)])


def argmax(scores: Tensor) -> Tensor:
    """int64 `[rows]`, the lowest id on ties, `NO_TOKEN` where the largest is no finite number.

    Below float32, torch's own argmax takes several times as long as its max.
    """
    values, indices = scores.max(-1)
    return indices.masked_fill_(~values.isfinite(), NO_TOKEN)


def walk(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path: list[int] = []
    node = ROOT
    while (child := tree.children.get((node, emitted[1 + node]))) is not None:
        path.append(child)
        node = child
    return Acceptance(tuple(path), emitted[1 + node])
