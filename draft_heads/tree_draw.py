"""Draft trees drawn from the head's own distribution, for acceptance rules that weigh p against q."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.draft_heads.draft_shape import DraftShape
from specdec.draft_heads.tree_search import Frontier
from specdec.verify.tree import ROOT, DraftTree


class TreeDraw:
    """Candidates of a batch of rows, level by level, each node's children drawn without replacement.

    Every level has the same number of children, shared equally among the level's frontier: the nodes of the
    level before that are likeliest by q. So how many children a node has depends on what was drawn above it
    alone, and never on the children themselves.

    Args:
        branching: most nodes expanded per level, and most children of one.
        shape: bounds of a tree; `min_reach` is not used.
    """

    def __init__(self, num_rows: int, branching: int, shape: DraftShape) -> None:
        self.num_rows = num_rows
        per_level = max(1, shape.nodes // shape.depth)
        self.first = min(branching, per_level)
        self.width = min(branching, max(1, per_level // 2), self.first)
        self.each = max(1, min(branching, per_level // self.width))
        self._tokens: list[Tensor] = []
        self._possible: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._best: list[Tensor] = []
        self._paths = torch.empty(num_rows, 1, 0, dtype=torch.int64)
        self._values: Tensor | None = None

    def expand(self, log_q: Tensor, noise: Tensor) -> Frontier:
        """Draw each frontier node's children, and take the likeliest of them as the next frontier.

        Args:
            log_q: `[rows, frontier, vocab]`, of the root alone on the first call.
            noise: `[rows, vocab]` Gumbel noise. The largest of log q + noise are a draw without replacement,
                in order (Kool et al. 2019). One vector serves all nodes of a level, since at most one of them
                is on the accepted path.
        """
        rows, _, vocab = log_q.shape
        each = min(self.each if self._tokens else self.first, vocab)
        tokens = (log_q + noise[:, None]).topk(each, dim=-1).indices
        values = log_q.gather(2, tokens)
        self._possible.append(values.isfinite().view(rows, -1))
        if self._values is not None:
            values = values + self._values[:, :, None]
        flat_values, flat_tokens = values.view(rows, -1), tokens.view(rows, -1)
        self._tokens.append(flat_tokens)
        self._probs.append(log_q.exp())
        best_values, best = flat_values.topk(min(self.width, flat_values.shape[1]), dim=-1)
        self._values = best_values
        self._best.append(best)
        parents = best // each
        chosen = flat_tokens.gather(1, best)
        above = self._paths.to(best.device).gather(1, parents[:, :, None].expand(-1, -1, self._paths.shape[2]))
        self._paths = torch.cat([above, chosen[:, :, None]], 2)
        return Frontier(chosen, parents, best_values)

    def frontier_paths(self) -> Tensor:
        """int64 `[rows, frontier, level]`: the tokens from the root's child down to each frontier node."""
        return self._paths

    def trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> list[DraftTree]:
        """Per row as many whole levels as `budget` nodes and `max_depth` allow, with the q of each parent."""
        tokens, possible, best = (
            [level.tolist() for level in part] for part in (self._tokens, self._possible, self._best)
        )
        return [
            self._tree(row, [t[row] for t in tokens], [p[row] for p in possible], [b[row] for b in best], *bounds)
            for row, bounds in enumerate(zip(budgets, max_depths, strict=True))
        ]

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
