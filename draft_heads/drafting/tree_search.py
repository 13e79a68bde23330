"""EAGLE-2's dynamic tree (Li et al. 2024): expand the best frontier nodes, then keep the best of all."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.device_trees import DeviceNodes, DeviceTrees, NodeColumns, ancestors_of
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.upload import Packet


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


class TreeLevels:
    """Candidates of a batch of rows, level by level: the children of the frontier before it, in turn.

    Args:
        width: most nodes of a frontier.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.num_rows, self.width = num_rows, width
        self._tokens: list[Tensor] = []
        self._values: list[Tensor] = []
        self._best: list[Tensor] = []
        self._frontier_values: Tensor | None = None

    def _add(self, tokens: Tensor, values: Tensor) -> Frontier:
        """Add each frontier node's children, and take the most probable of them as the next frontier.

        Args:
            tokens: int64 `[rows, frontier, children]`; of the roots alone on the first call.
            values: of the same shape, log-probabilities.
        """
        each = tokens.shape[2]
        if self._frontier_values is not None:
            values = values + self._frontier_values[:, :, None]
        flat_values, flat_tokens = values.flatten(1), tokens.flatten(1)
        self._frontier_values, best = flat_values.topk(min(self.width, flat_values.shape[1]), dim=-1)
        self._values.append(flat_values)
        self._tokens.append(flat_tokens)
        self._best.append(best)
        return Frontier(flat_tokens.gather(1, best), best // each, self._frontier_values)

    def frontier_paths(self) -> Tensor:
        """Return the tokens from the root's child down to each frontier node, int64 `[rows, frontier, level]`."""
        device = self._tokens[0].device if self._tokens else None
        paths = torch.empty(self.num_rows, 1, 0, dtype=torch.int64, device=device)
        for tokens, best in zip(self._tokens, self._best, strict=True):
            each = tokens.shape[1] // paths.shape[1]
            above = paths.gather(1, (best // each)[:, :, None].expand(-1, -1, paths.shape[2]))
            paths = torch.cat([above, tokens.gather(1, best)[:, :, None]], 2)
        return paths

    def values_of(self, row: int, candidates: Sequence[int]) -> list[float]:
        """Return the log-probabilities of candidates' paths."""
        values: list[float] = torch.cat([level[row] for level in self._values]).tolist()
        return [values[candidate] for candidate in candidates]

    @property
    def num_levels(self) -> int:
        """Levels that have candidates."""
        return len(self._tokens)

    def _ends(self) -> list[int]:
        """Return the number of candidates up to and including each level."""
        return list(accumulate(tokens.shape[1] for tokens in self._tokens))

    def _parents(self) -> Tensor:
        """Return the parent of each candidate, int64 `[rows, candidates]`, `ROOT` for a child of the root."""
        parents = [torch.full_like(self._tokens[0], ROOT)]
        for start, best, tokens in zip([0, *self._ends()], self._best, self._tokens[1:], strict=False):
            parents.append((best + start).repeat_interleave(tokens.shape[1] // best.shape[1], 1))
        return torch.cat(parents, 1)


class TreeBounds(NamedTuple):
    """Bounds of the trees of a search.

    Attributes:
        sizes: nodes of each row's tree.
        most: nodes that any tree may have.
        ends: int64 `[levels]`, candidates up to and including each level.
        reach: int64 `[rows]`, candidates of the levels that a row may have.
        counts: int64 `[rows]`, `sizes` on the device.
    """

    sizes: list[int]
    most: int
    ends: Tensor
    reach: Tensor
    counts: Tensor

    @staticmethod
    def of(
        budgets: Sequence[int], max_depths: Sequence[int], depth: int, branching: int, packet: Packet, most: int = 0
    ) -> "TreeBounds":
        """Return the bounds of trees by a search of `depth` whole levels, on the device once the packet is sent.

        Args:
            most: nodes that any tree may have; 0 for as many as the largest of these has.
        """
        # The root's children, and those of each level's frontier.
        ends = [branching * (1 + level * branching) for level in range(depth)]
        reach = [ends[min(deepest, depth) - 1] if deepest > 0 else 0 for deepest in max_depths]
        sizes = [min(budget, within) for budget, within in zip(budgets, reach, strict=True)]
        return TreeBounds(sizes, most or max(sizes, default=0), *map(packet.add, (ends, reach, sizes)))


class SearchedNodes(NamedTuple):
    """The trees of a search, as far as the device knows them.

    Attributes:
        columns: their nodes.
        ancestors: see `DeviceNodes`.
        depth: levels that were searched.
    """

    columns: NodeColumns
    ancestors: Tensor
    depth: int

    def like(self) -> "SearchedNodes":
        """Return memory for others of their size, or of fewer rows."""
        columns = NodeColumns(*(torch.zeros_like(column) for column in self.columns))
        return SearchedNodes(columns, torch.zeros_like(self.ancestors), self.depth)

    def copied_to(self, memory: "SearchedNodes") -> "SearchedNodes":
        """Copy the nodes to the first rows of other memory; return them there."""
        rows, (*kept, ancestors) = len(self.ancestors), (*memory.columns, memory.ancestors)
        own = SearchedNodes(NodeColumns(*(column[:rows] for column in kept)), ancestors[:rows], self.depth)
        for mine, given in zip((*own.columns, own.ancestors), (*self.columns, self.ancestors), strict=True):
            mine.copy_(given)
        return own

    def trees(self, sizes: Sequence[int]) -> DeviceTrees:
        """Return the trees.

        Args:
            sizes: nodes of each row's tree.
        """
        return DeviceTrees(DeviceNodes(self.columns, sizes, self.depth, ancestors=self.ancestors))


class TreeSearch(TreeLevels):
    """Trees of the most probable candidates.

    A node's value is the sum of its path's log-probabilities in float32. Values never rise along a path, and equal
    ones are ranked by depth, so a child is never kept without its parent. (The official code ranks half-precision
    values without that rule, and orphans nodes.)
    """

    def expand(self, tokens: Tensor, log_chances: Tensor) -> Frontier:
        """Add each frontier node's best children, and take the best of them as the next frontier.

        Args:
            tokens: int64 `[rows * frontier, k]`, the children of all rows' frontier nodes in turn, best first; of the
                roots alone on the first call.
            log_chances: of the same shape.
        """
        # A node after which no token is possible yields NaN; its children must not sort before all others.
        values = log_chances.float().nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        return self._add(*(part.view(self.num_rows, -1, tokens.shape[1]) for part in (tokens, values)))

    def nodes(self, bounds: TreeBounds) -> SearchedNodes:
        """Return `host_trees` on the device; with as many nodes as there may be, also where none is possible.

        Every tree has as many nodes as its bounds allow, so the host knows all sizes without reading a node.
        """
        values, tokens = torch.cat(self._values, 1), torch.cat(self._tokens, 1)
        device, (rows, count) = values.device, values.shape
        most = min(bounds.most, count)
        place = torch.arange(count, device=device)
        depth_of = torch.bucketize(place, bounds.ends, right=True) + 1
        out_of_reach = place >= bounds.reach[:, None]
        # Stable, so of equal values the shallower comes first, and what is out of reach comes last.
        order = values.masked_fill(out_of_reach, float("-inf")).sort(dim=1, descending=True, stable=True).indices
        beyond = torch.arange(most, device=device) >= bounds.counts[:, None]
        kept, ranks = order[:, :most].masked_fill(beyond, count).sort(dim=1)
        # An extra candidate `count` stands for missing nodes.
        kept_safe = kept.clamp_max(count - 1)
        places = torch.full((rows, count + 1), ROOT, dtype=torch.int64, device=device)
        places.scatter_(1, kept, torch.arange(most, device=device).expand(rows, -1))
        # The root is candidate -1, and so the last place, which no kept candidate takes.
        places[:, count].fill_(ROOT)
        parents = places.gather(1, self._parents().gather(1, kept_safe) % (count + 1))
        columns = NodeColumns(tokens.gather(1, kept_safe), parents, depth_of[kept_safe], ranks)
        return SearchedNodes(columns, ancestors_of(parents, self.num_levels), self.num_levels)

    def host_trees(self, budgets: Sequence[int], max_depths: Sequence[int]) -> HostTrees:
        """Return per row the best `budget` candidates of at most `max_depth` levels, as a tree in order of depth.

        Impossible ones are left out.
        """
        values = torch.cat(self._values, 1)
        ends = [0, *self._ends()]
        # Stable, so of equal values the shallower comes first.
        by_value = values.sort(dim=1, descending=True, stable=True).indices
        possible = values.isfinite().sum(1, keepdim=True)
        # One transfer for all.
        sizes = [1, ends[-1], ends[-1], *(chosen.shape[1] for chosen in self._best)]
        places = [0, *accumulate(sizes)]
        table = torch.cat([possible, by_value, *self._tokens, *self._best], 1).tolist()
        counts, order, tokens, *best = ([row[a:b] for row in table] for a, b in pairwise(places))
        trees = []
        for row in range(self.num_rows):
            deepest = ends[min(max_depths[row], len(self._values))]
            reachable = (node for node in order[row][: counts[row][0]] if node < deepest)
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
                    read_values=partial(self.values_of, row, kept),
                )
            )
        return HostTrees(trees)
