"""Draft trees drawn from the head's own distribution, for the rejection rules, which need each node's q."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_search import TreeLevels
from specdec.kernels.types.device_trees import NO_PROBS, DeviceNodes, DeviceTrees, node_table
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.tree_search import Frontier, SearchKernels
from specdec.kernels.types.types import DraftProbs, TopK


class DrawSizes(NamedTuple):
    """The numbers of nodes of drawn trees.

    Attributes:
        first: children of the root.
        width: nodes expanded at each level after it.
        each: children of each of these.
    """

    first: int
    width: int
    each: int

    def num_probs(self, depth: int) -> int:
        """Return the number of distributions that the children of a tree of `depth` levels are drawn from."""
        return 1 + (depth - 1) * self.width

    @staticmethod
    def of(branching: int, shape: DraftShape) -> "DrawSizes":
        per_level = max(1, shape.nodes // shape.depth)
        first = min(branching, per_level)
        width = min(branching, max(1, per_level // 2), first)
        return DrawSizes(first, width, max(1, min(branching, per_level // width)))


class TreeDraw(TreeLevels):
    """Candidates of a batch of rows, level by level, each node's children drawn without replacement.

    Every level has the same number of children, shared equally among its frontier: the most probable nodes of the
    level before, by q. So the number of a node's children depends only on what was drawn above it, never on the
    children themselves.

    Args:
        sizes: children per node and nodes per level.
        depth: most levels.
        kernels: choose the nodes of each frontier.
        probs: `[rows, sizes.num_probs(depth) or more, vocab]`, memory for the distributions that children are drawn
            from; None to allocate it.
    """

    def __init__(
        self, num_rows: int, sizes: DrawSizes, depth: int, kernels: SearchKernels, probs: Tensor | None = None
    ) -> None:
        super().__init__(num_rows, sizes.width, kernels)
        self.sizes, self.depth, self._table = sizes, depth, probs
        self._possible: list[Tensor] = []
        # The parts of the table, level by level.
        self._probs: list[Tensor] = []

    @property
    def count(self) -> int:
        """Children of each node of the level that is drawn next."""
        return self.sizes.each if self._tokens else self.sizes.first

    def expand(self, log_q: Tensor, tokens: Tensor, own_bits: Tensor | None = None) -> Frontier:
        """Add each frontier node's children, and take the most probable of them as the next frontier.

        Args:
            log_q: `[rows, frontier, vocab]`, of the root alone on the first call.
            tokens: int64 `[rows, frontier, count]`, drawn from q without replacement, in order: the largest of log q
                + Gumbel noise (Kool et al. 2019). One vector of noise serves all nodes of a level, since at most one
                of them is on the accepted path. Tokens that q cannot draw come last.
            own_bits: see `SearchKernels.next_frontier`.
        """
        values = log_q.gather(2, tokens)
        self._possible.append(values.isfinite().flatten(1))
        start = sum(part.shape[1] for part in self._probs)
        if self._table is None:
            self._table = log_q.new_empty(self.num_rows, self.sizes.num_probs(self.depth), log_q.shape[2])
        assert self._table.shape[2] == log_q.shape[2]
        part = self._table[:, start : start + log_q.shape[1]]
        self._probs.append(torch.exp(log_q, out=part))
        total = values.new_zeros(values.shape[:2].numel())
        return self._add(TopK(tokens.flatten(0, 1), values.flatten(0, 1), total), own_bits)

    def _parents(self) -> Tensor:
        """Return the parent of each candidate, int64 `[rows, candidates]`, `ROOT` for a child of the root."""
        parents = [torch.full_like(self._tokens[0], ROOT)]
        for start, best, tokens in zip([0, *self._ends()], self._best, self._tokens[1:], strict=False):
            parents.append((best + start).repeat_interleave(tokens.shape[1] // best.shape[1], 1))
        return torch.cat(parents, 1)

    def device_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> DeviceTrees:
        """Return `host_trees` on the device; with nodes also where q could draw nothing, which no rule accepts.

        Args:
            budgets: of the first rows; those behind them are padding and have no trees.
        """
        rows, ends = len(budgets), self._ends()
        widths = [level.shape[1] for level in self._tokens]
        sizes = []
        for budget, max_depth in zip(budgets, max_depths, strict=True):
            whole = [end for end in ends[: max(max_depth, 0)] if end <= budget]
            sizes.append(whole[-1] if whole else min(budget, ends[0]) if max_depth > 0 else 0)
        most = max(sizes)
        device = self._tokens[0].device
        # The root's distribution, then those of each frontier.
        probs = torch.full((rows, 1 + ends[-1]), NO_PROBS, dtype=torch.int64, device=device)
        probs[:, 0], place = 0, 1
        for start, best in zip([0, *ends], self._best[:-1], strict=False):
            own = torch.arange(place, place + best.shape[1], device=device)
            probs.scatter_(1, 1 + best[:rows] + start, own.expand(rows, -1))
            place += best.shape[1]
        table = self._table
        assert table is not None
        first = torch.arange(rows, device=device)[:, None] * table.shape[1]
        depths = [torch.full((width,), level + 1, device=device) for level, width in enumerate(widths)]
        columns = (
            torch.cat(self._tokens, 1)[:rows, :most],
            self._parents()[:rows, :most],
            torch.cat(depths).expand(rows, -1)[:, :most],
            torch.arange(most, device=device).expand(rows, -1),
        )
        draft_probs = DraftProbs(
            table.flatten(0, 1), torch.where(probs == NO_PROBS, probs, probs + first)[:, : 1 + most]
        )
        return DeviceTrees(DeviceNodes.made(node_table(columns, len(widths)), sizes, len(widths), probs=draft_probs))

    def host_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> HostTrees:
        """Return per row as many whole levels as `budget` nodes and `max_depth` allow, with the q of each parent."""
        parts = (self._tokens, self._possible, self._best)
        levels = list(zip(*([level.tolist() for level in part] for part in parts), strict=True))
        trees = []
        for row, (budget, max_depth) in enumerate(zip(budgets, max_depths, strict=True)):
            own = [(tokens[row], possible[row], best[row]) for tokens, possible, best in levels[: max(max_depth, 0)]]
            trees.append(self._tree(row, own, budget))
        return HostTrees(trees)

    def _tree(self, row: int, levels: list[tuple[list[int], list[bool], list[int]]], budget: int) -> DraftTree:
        kept_tokens: list[int] = []
        parents: list[int] = []
        kept: list[int] = []
        probs = [self._probs[0][row, 0]]
        # Index of each frontier node in the tree; None where q ran out of tokens to draw.
        frontier: list[int | None] = [ROOT]
        expanded = {ROOT: probs[0]}
        size = 0
        for level, (tokens, possible, best) in enumerate(levels):
            size += len(tokens)
            if size > budget and level:
                break
            each = len(tokens) // len(frontier)
            place: list[int | None] = []
            for candidate, token in enumerate(tokens):
                parent = frontier[candidate // each]
                if parent is None or not possible[candidate] or len(kept_tokens) >= budget:
                    place.append(None)
                    continue
                place.append(len(kept_tokens))
                kept_tokens.append(token)
                kept.append(size - len(tokens) + candidate)
                parents.append(parent)
                expanded[parent] = self._probs[level][row, candidate // each]
            frontier = [place[candidate] for candidate in best]
        nothing = torch.zeros_like(probs[0])
        table = torch.stack([expanded.get(node, nothing) for node in range(ROOT, len(kept_tokens))])
        return DraftTree(tuple(kept_tokens), tuple(parents), table, read_values=partial(self.values_of, row, kept))
