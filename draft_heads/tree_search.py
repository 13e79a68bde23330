"""EAGLE-2's dynamic tree (Li et al. 2024): expand the best frontier nodes, then keep the best of all."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.verify.tree import ROOT, DraftTree


class Frontier(NamedTuple):
    """The nodes to expand next, best first.

    Attributes:
        tokens: int64 `[rows, branching]`.
        parents: int64 `[rows, branching]`, index into the frontier before (0 for the root).
    """

    tokens: Tensor
    parents: Tensor


class TreeSearch:
    """Candidates of a batch of rows, level by level.

    A node's value is the sum of its path's log-probabilities in float32. Values fall along a path or stay
    equal, and equal ones are ranked by depth, so a child is never kept without its parent. (The official
    code ranks half-precision values without that rule, and orphans nodes.)
    """

    def __init__(self, num_rows: int, branching: int) -> None:
        self.num_rows = num_rows
        self.branching = branching
        self._tokens: list[Tensor] = []
        self._values: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._count = 0
        self._frontier_values: Tensor | None = None
        self._frontier_ids: Tensor | None = None

    def expand(self, log_probs: Tensor) -> Frontier:
        """Add each frontier node's best children, and take the best of them as the next frontier.

        Args:
            log_probs: `[rows, frontier, vocab]`, of the root alone on the first call.
        """
        rows, width, vocab = log_probs.shape
        k = min(self.branching, vocab)
        values, tokens = log_probs.float().topk(k, dim=-1)
        if self._frontier_values is None or self._frontier_ids is None:
            parents = torch.full((rows, width), ROOT, device=values.device)
        else:
            values = values + self._frontier_values[:, :, None]
            parents = self._frontier_ids
        flat_values, flat_tokens = values.view(rows, -1), tokens.view(rows, -1)
        self._values.append(flat_values)
        self._tokens.append(flat_tokens)
        self._parents.append(parents[:, :, None].expand(-1, -1, k).reshape(rows, -1))
        best_values, best = flat_values.topk(min(self.branching, width * k), dim=-1)
        self._frontier_values = best_values
        self._frontier_ids = best + self._count
        self._count += width * k
        return Frontier(flat_tokens.gather(1, best), best // k)

    def trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> list[DraftTree]:
        """Per row the best `budget` candidates of at most `max_depth` levels, as a tree in order of depth."""
        values = torch.cat(self._values, 1)
        ends = [0]
        for level in self._values:
            ends.append(ends[-1] + level.shape[1])
        # Stable, so of equal values the shallower comes first.
        order = values.sort(dim=1, descending=True, stable=True).indices.tolist()
        tokens = torch.cat(self._tokens, 1).tolist()
        parents = torch.cat(self._parents, 1).tolist()
        trees = []
        for row in range(self.num_rows):
            deepest = ends[min(max_depths[row], len(self._values))]
            reachable = (node for node in order[row] if node < deepest)
            kept = sorted(islice(reachable, budgets[row]))
            place = {node: index for index, node in enumerate(kept)}
            place[ROOT] = ROOT
            trees.append(
                DraftTree(
                    tokens=tuple(tokens[row][node] for node in kept),
                    parents=tuple(place[parents[row][node]] for node in kept),
                )
            )
        return trees
