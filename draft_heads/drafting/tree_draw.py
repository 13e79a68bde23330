"""Draft trees drawn from the head's own distribution, for acceptance rules that weigh p against q."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_search import Frontier
from specdec.kernels.types import DraftProbs
from specdec.verify.device_trees import NO_PROBS, DeviceNodes, DeviceTrees, NodeColumns
from specdec.verify.draft_trees import HostTrees
from specdec.verify.tree import ROOT, DraftTree


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

    @staticmethod
    def of(branching: int, shape: DraftShape) -> "DrawSizes":
        per_level = max(1, shape.nodes // shape.depth)
        first = min(branching, per_level)
        width = min(branching, max(1, per_level // 2), first)
        return DrawSizes(first, width, max(1, min(branching, per_level // width)))


class TreeDraw:
    """Candidates of a batch of rows, level by level, each node's children drawn without replacement.

    Every level has the same number of children, shared equally among its frontier: the most probable nodes of the
    level before, by q. So the number of a node's children depends only on what was drawn above it, never on the
    children themselves.

    Args:
        sizes: children per node and nodes per level.
    """

    def __init__(self, num_rows: int, sizes: DrawSizes) -> None:
        self.num_rows = num_rows
        self.sizes = sizes
        self._tokens: list[Tensor] = []
        self._possible: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._best: list[Tensor] = []
        self._paths = torch.empty(num_rows, 1, 0, dtype=torch.int64)
        self._values: Tensor | None = None

    @property
    def count(self) -> int:
        """Children of each node of the level that is drawn next."""
        return self.sizes.each if self._tokens else self.sizes.first

    def expand(self, log_q: Tensor, tokens: Tensor) -> Frontier:
        """Add each frontier node's children, and take the most probable of them as the next frontier.

        Args:
            log_q: `[rows, frontier, vocab]`, of the root alone on the first call.
            tokens: int64 `[rows, frontier, count]`, drawn from q without replacement, in order: the largest of log q
                + Gumbel noise (Kool et al. 2019). One vector of noise serves all nodes of a level, since at most one
                of them is on the accepted path. Tokens that q cannot draw come last.
        """
        rows, _, each = tokens.shape
        values = log_q.gather(2, tokens)
        self._possible.append(values.isfinite().view(rows, -1))
        if self._values is not None:
            values = values + self._values[:, :, None]
        flat_values, flat_tokens = values.view(rows, -1), tokens.view(rows, -1)
        self._tokens.append(flat_tokens)
        self._probs.append(log_q.exp())
        best_values, best = flat_values.topk(min(self.sizes.width, flat_values.shape[1]), dim=-1)
        self._values = best_values
        self._best.append(best)
        parents = best // each
        chosen = flat_tokens.gather(1, best)
        last = chosen[:, :, None]
        depth = self._paths.shape[2]
        above = [self._paths.gather(1, parents[:, :, None].expand(-1, -1, depth))] if depth else []
        self._paths = torch.cat([*above, last], 2)
        return Frontier(chosen, parents, best_values)

    def frontier_paths(self) -> Tensor:
        """Return the tokens from the root's child down to each frontier node, int64 `[rows, frontier, level]`."""
        return self._paths

    def device_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> DeviceTrees:
        """Return `host_trees` on the device; with nodes also where q could draw nothing, which no rule accepts."""
        widths = [level.shape[1] for level in self._tokens]
        ends = list(accumulate(widths))
        sizes = []
        for budget, max_depth in zip(budgets, max_depths, strict=True):
            whole = [end for end in ends[: max(max_depth, 0)] if end <= budget]
            sizes.append(whole[-1] if whole else min(budget, ends[0]) if max_depth > 0 else 0)
        most = max(sizes)
        device, rows = self._tokens[0].device, self.num_rows
        tokens = torch.cat(self._tokens, 1)
        parents = [torch.full_like(self._tokens[0], ROOT)]
        # The root's distribution, then those of each frontier.
        probs = torch.full((rows, 1 + ends[-1]), NO_PROBS, dtype=torch.int64, device=device)
        probs[:, 0], place = 0, 1
        for start, best, width in zip([0, *ends], self._best, widths[1:], strict=False):
            frontier = best + start
            parents.append(frontier.repeat_interleave(width // best.shape[1], 1))
            own = torch.arange(place, place + best.shape[1], device=device)
            probs.scatter_(1, 1 + frontier, own.expand(rows, -1))
            place += best.shape[1]
        table = torch.cat(self._probs, 1)
        first = torch.arange(rows, device=device)[:, None] * table.shape[1]
        depths = [torch.full((width,), level + 1, device=device) for level, width in enumerate(widths)]
        columns = NodeColumns(
            tokens=tokens[:, :most],
            parents=torch.cat(parents, 1)[:, :most],
            depths=torch.cat(depths).expand(rows, -1)[:, :most],
            ranks=torch.arange(most, device=device).expand(rows, -1),
        )
        draft_probs = DraftProbs(
            table.flatten(0, 1), torch.where(probs == NO_PROBS, probs, probs + first)[:, : 1 + most]
        )
        return DeviceTrees(DeviceNodes(columns, sizes, len(widths), draft_probs))

    def host_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> HostTrees:
        """Return per row as many whole levels as `budget` nodes and `max_depth` allow, with the q of each parent."""
        tokens, possible, best = (
            [level.tolist() for level in part] for part in (self._tokens, self._possible, self._best)
        )
        return HostTrees(
            [
                self._tree(row, [t[row] for t in tokens], [p[row] for p in possible], [b[row] for b in best], *bounds)
                for row, bounds in enumerate(zip(budgets, max_depths, strict=True))
            ]
        )

    def _tree(
        self,
        row: int,
        tokens: list[list[int]],
        possible: list[list[bool]],
        best: list[list[int]],
        budget: int,
        max_depth: int,
    ) -> DraftTree:
        kept_tokens: list[int] = []
        parents: list[int] = []
        probs = [self._probs[0][row, 0]]
        # Index of each frontier node in the tree; None where q ran out of tokens to draw.
        frontier: list[int | None] = [ROOT]
        expanded = {ROOT: probs[0]}
        size = 0
        for level in range(min(max_depth, len(tokens))):
            size += len(tokens[level])
            if size > budget and level:
                break
            each = len(tokens[level]) // len(frontier)
            place: list[int | None] = []
            for candidate, token in enumerate(tokens[level]):
                parent = frontier[candidate // each]
                if parent is None or not possible[level][candidate] or len(kept_tokens) >= budget:
                    place.append(None)
                    continue
                place.append(len(kept_tokens))
                kept_tokens.append(token)
                parents.append(parent)
                expanded[parent] = self._probs[level][row, candidate // each]
            frontier = [place[candidate] for candidate in best[level]]
        nothing = torch.zeros_like(probs[0])
        table = torch.stack([expanded.get(node, nothing) for node in range(ROOT, len(kept_tokens))])
        return DraftTree(tuple(kept_tokens), tuple(parents), table)
