"""EAGLE-2's dynamic tree (Li et al. 2024): expand the best frontier nodes, then keep the best of all."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.device_trees import DeviceNodes, DeviceTrees, NodeTable
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.tree_search import Frontier, SearchedLevels, SearchKernels
from specdec.kernels.types.types import TopK
from specdec.kernels.types.upload import Packet


class TreeLevels:
    """Candidates of a batch of rows, level by level: the children of the frontier before it, in turn.

    Args:
        width: most nodes of a frontier.
        kernels: choose the nodes of each frontier.
    """

    def __init__(self, num_rows: int, width: int, kernels: SearchKernels) -> None:
        self.num_rows, self.width, self.kernels = num_rows, width, kernels
        self._frontier: Frontier | None = None
        self._tokens: list[Tensor] = []
        self._values: list[Tensor] = []
        self._best: list[Tensor] = []

    def _add(self, children: TopK, own_bits: Tensor | None) -> Frontier:
        """Add each frontier node's children, and take the best of them as the next frontier.

        Args:
            children: of all rows' frontier nodes in turn; of the roots alone on the first call.
            own_bits: see `SearchKernels.next_frontier`.
        """
        width = min(self.width, children.tokens.numel() // self.num_rows)
        level = self.kernels.next_frontier(children, self._frontier, own_bits, self.num_rows, width)
        self._values.append(level.values)
        self._tokens.append(level.tokens)
        self._best.append(level.best)
        self._frontier = level.frontier
        return level.frontier

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


class TreeBounds(NamedTuple):
    """Bounds of the trees of a search.

    Attributes:
        sizes: nodes of each row's tree.
        most: nodes that any tree may have.
        reach: int64 `[rows]`, candidates of the levels that a row may have.
        counts: int64 `[rows]`, `sizes` on the device.
    """

    sizes: list[int]
    most: int
    reach: Tensor
    counts: Tensor

    @staticmethod
    def of(
        budgets: Sequence[int], max_depths: Sequence[int], depth: int, branching: int, packet: Packet, most: int
    ) -> "TreeBounds":
        """Return the bounds of trees by a search of `depth` whole levels, on the device once the packet is sent.

        Args:
            most: nodes that any tree may have.
        """
        # The root's children, and those of each level's frontier.
        ends = [branching * (1 + level * branching) for level in range(depth)]
        reach = [ends[min(deepest, depth) - 1] if deepest > 0 else 0 for deepest in max_depths]
        sizes = [min(budget, within) for budget, within in zip(budgets, reach, strict=True)]
        return TreeBounds(sizes, most, *packet.add_lists(reach, sizes))


class Searched(NamedTuple):
    """Candidates of a search that stay on the device, until it is known how large the trees may be.

    Attributes:
        values, tokens, best: see `SearchedLevels`.
        width: most nodes of a frontier.
    """

    values: Tensor
    tokens: Tensor
    best: Tensor
    width: int

    def trees(self, bounds: TreeBounds, kernels: SearchKernels, packet: Packet) -> DeviceTrees:
        """Return the trees of the first rows: `TreeSearch.host_trees` on the device.

        Every tree has as many nodes as its bounds allow, also where none is possible, so the host knows all sizes
        without reading a node. They are chosen when they are first used.

        Args:
            packet: has the bounds, and is sent then at the latest.
        """
        values, tokens, best = (part[: len(bounds.sizes)] for part in self[:3])
        levels = SearchedLevels(values, tokens, best, bounds.counts, bounds.reach)
        most = min(bounds.most, values.shape[1])

        def make() -> NodeTable:
            packet.send()
            return kernels.best_nodes(levels, most, self.width)

        return DeviceTrees(DeviceNodes(make, bounds.sizes, 1 + best.shape[1], most))


class TreeSearch(TreeLevels):
    """Trees of the most probable candidates.

    A node's value is the sum of its path's log-probabilities in float32. Values never rise along a path, and equal
    ones are ranked by depth, so a child is never kept without its parent. (The official code ranks half-precision
    values without that rule, and orphans nodes.)
    """

    def expand(self, children: TopK, own_bits: Tensor | None = None) -> Frontier:
        """Add each frontier node's best children, and take the best of them as the next frontier; see `_add`."""
        return self._add(children, own_bits)

    def candidates(self) -> Searched:
        """Return the candidates of all levels."""
        values, tokens, depth = torch.cat(self._values, 1), torch.cat(self._tokens, 1), self.num_levels
        best = torch.stack(self._best[:-1], 1) if depth > 1 else self._best[0][:, None, :0].expand(-1, 0, -1)
        return Searched(values, tokens, best, self.width)

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
