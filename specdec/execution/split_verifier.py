"""Verification where each rank has the logits of its own part of the vocabulary."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.types.draft_trees import DraftTrees, PreparedWalk, Walks
from specdec.kernels.types.types import NO_TOKEN, NoiseRows, Stream
from specdec.kernels.types.upload import Packet
from specdec.models.sharded_llama import ShardedLlama
from specdec.models.tp_plan import Span
from specdec.parallel.rank_group import RankGroup
from specdec.verify.host_walks import host_coupled_walk
from specdec.verify.sampling import Context
from specdec.verify.transforms import forbid_outside
from specdec.verify.verifier import CoupledVerifier, Verifier, node_rows


class SplitVerifier:
    """A verifier of logits that are split over ranks. All ranks come to the same acceptances.

    Under the coupled rule each rank takes the maximum of score plus noise over its own part, and the ranks exchange
    these maxima with their tokens: 16 bytes per row and rank. A grammar forbids tokens of each rank's own part.
    Filters (top_k, top_p, min_p), other edits of logits (penalties, biases, forbidden tokens), the rules that weigh p
    against q, and kernels that make noise themselves need all logits, which are then gathered.
    """

    def __init__(self, inner: Verifier, model: ShardedLlama, kernels: KernelSet) -> None:
        self.inner, self.model = inner, model
        self._split: CoupledVerifier | None = None
        if isinstance(inner, CoupledVerifier) and kernels.noise is not None and model.shard.plan.vocabulary:
            argmax = SplitArgmax(model.group, model.shard.vocab, kernels.noise)
            walks = Walks(coupled=host_coupled_walk(argmax))
            self._split = CoupledVerifier(replace(kernels, walks=walks))

    def prepare(self, trees: DraftTrees, contexts: Sequence[Context], packet: Packet) -> PreparedWalk:
        """See `CoupledVerifier.prepare`; the logits are `[sum of (1 + nodes), part of the vocabulary]`."""
        if self._split is not None:
            free = [context.without_grammar for context in contexts]
            if not any(one.sampling.edits or one.sampling.filters for one in free):
                own = self._split.prepare(trees, free, packet)
                return lambda logits: own(self._allowed(trees, contexts, logits))
        walk = self.inner.prepare(trees, contexts, packet)
        return lambda logits: walk(self.model.whole(logits))

    def _allowed(self, trees: DraftTrees, contexts: Sequence[Context], logits: Tensor) -> Tensor:
        """Return this rank's logits, -inf for tokens that the requests' grammars forbid."""
        if all(one.sampling.grammar is None for one in contexts):
            return logits
        scores, start = logits.clone(), 0
        for context, count, paths in node_rows(trees, contexts, logits.device):
            if (grammar := context.sampling.grammar) is not None:
                own = scores[start : start + count]
                forbid_outside(grammar, own, context, paths(), self.model.shard.vocab.start)
            start += count
        return scores


class SplitArgmax:
    """The argmax of `host_coupled_walk` over a vocabulary that is split over ranks.

    Args:
        span: this rank's part of the vocabulary.
        noise: of the whole vocabulary; the same on every rank.
    """

    def __init__(self, group: RankGroup, span: Span, noise: GumbelNoise) -> None:
        self.group, self.span, self.noise = group, span, noise

    def __call__(self, scores: Tensor, noise: NoiseRows) -> Tensor:
        """Return the argmax of each row's scores plus noise over all ranks' parts, int64 `[rows]`.

        Args:
            scores: `[rows, part of the vocabulary]`; not to be used afterwards where there is noise.
        """
        start, stop, total = self.span
        for row, key in enumerate(noise.keys):
            if key is not None:
                scores[row] += self.noise.at(key, total, Stream.TARGET, 0)[start:stop]
        values, tokens = scores.max(-1)
        # Float64 holds every score and every id exactly.
        own = torch.stack([values.double(), (tokens + start).double()])
        return best_of(torch.stack(self.group.all_gather(own)))


def best_of(parts: Tensor) -> Tensor:
    """Return the token of the largest value of each row: the lowest on ties, `NO_TOKEN` if it is not finite.

    Args:
        parts: float64 `[ranks, 2, rows]`, values and tokens, the ranks in the order of their tokens.
    """
    values, tokens = parts.unbind(1)
    most = values.max(0).values
    # A maximum that is not a number equals none.
    lowest = tokens.masked_fill(values != most, float("inf")).min(0).values
    return torch.where(most.isfinite(), lowest, float(NO_TOKEN)).long()
