"""EAGLE-2's dynamic tree (Li et al. 2024): expand the best frontier nodes, then keep the best of all."""

from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.upload import upload
from specdec.verify.device_trees import DeviceNodes, DeviceTrees, NodeColumns
from specdec.verify.draft_trees import HostTrees
from specdec.verify.tree import ROOT, DraftTree


class Frontier(NamedTuple):
    """The nodes to expand next, the most probable first.

    Attributes:
        tokens: int64 `[rows, branching]`.
        parents: int64 `[rows, branching]`, index into the frontier before (0 for the root).
        values: float32 `[rows, branching]`, log-probability of each node's path.
    """

    tokens: Tensor
    parents: Tensor
    values: Tensor


class TreeSearch:
    """Candidates of a batch of rows, level by level.

    A node's value is the sum of its path's log-probabilities in float32. Values never rise along a path, and equal
    ones are ranked by depth, so a child is never kept without its parent. (The official code ranks half-precision
    values without that rule, and orphans nodes.)
    """

    def __init__(self, num_rows: int, branching: int) -> None:
        self.num_rows = num_rows
        self.branching = branching
        self._tokens: list[Tensor] = []
        self._values: list[Tensor] = []
        self._best: list[Tensor] = []
        self._frontier_values: Tensor | None = None

    def expand(self, tokens: Tensor, log_chances: Tensor) -> Frontier:
        """Add each frontier node's best children, and take the best of them as the next frontier.

        Args:
            tokens: int64 `[rows * frontier, k]`, the children of all rows' frontier nodes in turn, best first; of the
                roots alone on the first call.
            log_chances: of the same shape.
        """
        rows, k = self.num_rows, tokens.shape[1]
        width = len(tokens) // rows
        # A node after which no token is possible yields NaN; its children must not sort before all others.
        values = log_chances.float().nan_to_num(nan=float("-inf"), neginf=float("-inf")).view(rows, width, k)
        if self._frontier_values is not None:
            values = values + self._frontier_values[:, :, None]
        flat_values, flat_tokens = values.view(rows, -1), tokens.view(rows, -1)
        self._values.append(flat_values)
        self._tokens.append(flat_tokens)
        best_values, best = flat_values.topk(min(self.branching, width * k), dim=-1)
        self._frontier_values = best_values
        self._best.append(best)
        return Frontier(flat_tokens.gather(1, best), best // k, best_values)

    def frontier_paths(self) -> Tensor:
        """Return the tokens from the root's child down to each frontier node, int64 `[rows, frontier, level]`."""
        device = self._tokens[0].device if self._tokens else None
        paths = torch.empty(self.num_rows, 1, 0, dtype=torch.int64, device=device)
        for tokens, best in zip(self._tokens, self._best, strict=True):
            each = tokens.shape[1] // paths.shape[1]
            above = paths.gather(1, (best // each)[:, :, None].expand(-1, -1, paths.shape[2]))
            paths = torch.cat([above, tokens.gather(1, best)[:, :, None]], 2)
        return paths

    def device_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> DeviceTrees:
        """Return `host_trees` on the device; with as many nodes as there may be, also where none is possible."""
        ends = list(accumulate(tokens.shape[1] for tokens in self._tokens))
        above = [torch.full_like(self._tokens[0], ROOT)]
        # A level's candidates are the children of the frontier before it, in turn.
        for start, best, tokens in zip([0, *ends], self._best, self._tokens[1:], strict=False):
            above.append((best + start).repeat_interleave(tokens.shape[1] // best.shape[1], 1))
        values, tokens, parents = (torch.cat(parts, 1) for parts in (self._values, self._tokens, above))
        return _best_of(values, tokens, parents, ends, budgets, max_depths)

    def host_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> HostTrees:
        """Return per row the best `budget` candidates of at most `max_depth` levels, as a tree in order of depth."""
        values = torch.cat(self._values, 1)
        ends = [0]
        for values_of_level in self._values:
            ends.append(ends[-1] + values_of_level.shape[1])
        # Stable, so of equal values the shallower comes first.
        by_value = values.sort(dim=1, descending=True, stable=True).indices
        # One transfer for all.
        sizes = [ends[-1], ends[-1], *(chosen.shape[1] for chosen in self._best)]
        places = [0, *accumulate(sizes)]
        table = torch.cat([by_value, *self._tokens, *self._best], 1).tolist()
        order, tokens, *best = ([row[a:b] for row in table] for a, b in pairwise(places))
        trees = []
        for row in range(self.num_rows):
            deepest = ends[min(max_depths[row], len(self._values))]
            reachable = (node for node in order[row] if node < deepest)
            rank = {node: index for index, node in enumerate(islice(reachable, budgets[row]))}
            kept = sorted(rank)
            place = {node: index for index, node in enumerate(kept)}
            place[ROOT] = ROOT
            # A level's candidates are the children of the frontier before it, in turn.
            frontier, parents = [ROOT], list[int]()
            for level, chosen in enumerate(best):
                each = (ends[level + 1] - ends[level]) // len(frontier)
                parents += [parent for parent in frontier for _ in range(each)]
                frontier = [ends[level] + candidate for candidate in chosen[row]]
            trees.append(
                DraftTree(
                    tokens=tuple(tokens[row][node] for node in kept),
                    parents=tuple(place[parents[node]] for node in kept),
                    ranks=tuple(rank[node] for node in kept),
                )
            )
        return HostTrees(trees)


def _best_of(
    values: Tensor,
    tokens: Tensor,
    above: Tensor,
    level_ends: Sequence[int],
    budgets: Sequence[int],
    max_depths: Sequence[int],
) -> DeviceTrees:
    """Return the best candidates of each row as a tree in order of depth.

    Every tree has as many nodes as its bounds allow, so the host knows all sizes without reading a node.

    Args:
        values: float32 `[rows, candidates]`, level by level; a child's is at most its parent's.
        tokens: int64 of the same shape.
        above: int64 of the same shape: the parent of each candidate, `ROOT` for a child of the root.
        level_ends: number of candidates up to and including levels 1, 2, ….
    """
    device, (rows, count) = values.device, values.shape
    reach = [level_ends[min(depth, len(level_ends)) - 1] if depth > 0 else 0 for depth in max_depths]
    sizes = [min(budget, most) for budget, most in zip(budgets, reach, strict=True)]
    most = max(sizes, default=0)
    place = torch.arange(count, device=device)
    depth_of = torch.bucketize(place, upload(level_ends, device), right=True) + 1
    out_of_reach = place >= upload(reach, device)[:, None]
    # Stable, so of equal values the shallower comes first, and what is out of reach comes last.
    order = values.masked_fill(out_of_reach, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    beyond = torch.arange(most, device=device) >= upload(sizes, device)[:, None]
    kept, ranks = order[:, :most].masked_fill(beyond, count).sort(dim=1)
    # An extra candidate `count` stands for missing nodes.
    kept_safe = kept.clamp_max(count - 1)
    places = torch.full((rows, count + 1), ROOT, dtype=torch.int64, device=device)
    places.scatter_(1, kept, torch.arange(most, device=device).expand(rows, -1))
    # The root is candidate -1, and so the last place, which no kept candidate takes.
    places[:, count] = ROOT
    parents = places.gather(1, above.gather(1, kept_safe) % (count + 1))
    columns = NodeColumns(tokens.gather(1, kept_safe), parents, depth_of[kept_safe], ranks)
    return DeviceTrees(DeviceNodes(columns, sizes, len(level_ends)))
