"""The acceptance rules: which draft tokens the target would have said itself."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types import Acceptance, NoiseKey, NoiseRows
from specdec.verify.sampling import Context
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.tree import ROOT, DraftTree


class SampledRow(NamedTuple):
    """A row to verify: a request and the draft tree under its last token."""

    tree: DraftTree
    context: Context

    def nodes(self, device: torch.device) -> NodeRows:
        """The root and the tree's nodes."""
        return NodeRows(self.context, 1 + len(self.tree), lambda: self.tree.paths_on(device))


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

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        return self.accept(rows, self.emitted_tokens(rows, logits))

    def accept(self, rows: Sequence[SampledRow], emitted: Tensor) -> list[Acceptance]:
        """Walk every row's tree by `emitted`, int64 `[sum of (1 + nodes)]`."""
        tokens: list[int] = emitted.tolist()
        acceptances, start = [], 0
        for row in rows:
            acceptances.append(walk(row.tree, tokens[start : start + 1 + len(row.tree)]))
            start += 1 + len(row.tree)
        return acceptances

    def emitted_tokens(self, rows: Sequence[SampledRow], logits: Tensor) -> Tensor:
        """int64 `[sum of (1 + nodes)]`: the token that the target emits after each root and node."""
        scores, samplings = logits, [row.context.sampling for row in rows]
        if any(sampling.edits or not sampling.is_greedy for sampling in samplings):
            scores = processed_logits(logits, [row.nodes(logits.device) for row in rows], self.kernels)
            # Noise is added in place, and the logits are still to be scored.
            scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
        return self.kernels.gumbel_argmax(scores, self.noise_of(rows, logits.device))

    def noise_of(
        self,
        rows: Sequence[SampledRow],
        device: torch.device,  # noqa: ARG002
    ) -> NoiseRows:
        """Of each root and node: that of the output position which the token after it would take.

        Args:
            device: of the logits.
        """
        keys: list[NoiseKey | None] = []
        for tree, context in rows:
            sampling = context.sampling
            if sampling.is_greedy:
                keys += [None] * (1 + len(tree))
            else:
                seed, index, position = sampling.seed, sampling.sample_index, context.num_output
                keys += [NoiseKey(seed, index, position + depth) for depth in (0, *tree.depths)]
        return NoiseRows(keys)


def walk(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path: list[int] = []
    node = ROOT
    while (child := tree.children.get((node, emitted[1 + node]))) is not None:
        path.append(child)
        node = child
    return Acceptance(tuple(path), emitted[1 + node])
