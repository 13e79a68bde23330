"""The parts of a search of draft trees, level by level."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from specdec.kernels.types.device_trees import NodeTable
from specdec.kernels.types.types import Candidates, NoiseRows, Stream, TopK


class Frontier(NamedTuple):
    """The nodes to expand next, the most probable first.

    Attributes:
        tokens: int64 `[rows, branching]`.
        parents: int64 `[rows, branching]`, index into the frontier before (0 for the root).
        values: float32 `[rows, branching]`, log-probability of each node's path.
        ancestors: int64 `[rows, branching, words]`, bits of the scratch entries on each node's path, its own included;
            None where they were not asked for.
    """

    tokens: Tensor
    parents: Tensor
    values: Tensor
    ancestors: Tensor | None = None


class SearchedLevel(NamedTuple):
    """The candidates of a level: the children of the frontier before it, in turn.

    Attributes:
        values: float32 `[rows, candidates]`, log-probability of each one's path, -inf where it is impossible.
        tokens: int64 `[rows, candidates]`.
        best: int64 `[rows, branching]`, which of them are the next frontier.
        frontier: these.
    """

    values: Tensor
    tokens: Tensor
    best: Tensor
    frontier: Frontier


class SearchedLevels(NamedTuple):
    """The candidates of all levels, one level after another.

    Attributes:
        values, tokens: `[rows, candidates]`; `branching` of the first level, its square of each other one.
        best: int64 `[rows, levels - 1, branching]`, the frontier of each level but the last, in its own candidates.
        counts: int64 `[rows]`, nodes of each row's tree.
        reach: int64 `[rows]`, candidates of the levels that a row may have.
    """

    values: Tensor
    tokens: Tensor
    best: Tensor
    counts: Tensor
    reach: Tensor


class SearchKernels(NamedTuple):
    """The operations of a search.

    Attributes:
        perturbed_top_k: the `k` largest scores plus noise of each row (arguments: candidates, noise, k, stream, lane).
            The candidates' scores are not to be used afterwards.
        next_frontier: a level, of the children of the frontier before it (arguments: children of all rows' frontier
            nodes in turn, best first; the frontier, None for the roots; own bits of the next frontier's entries, int64
            `[branching, words]`, or None; number of rows; nodes of the next frontier).
        best_nodes: the nodes of trees that stay on a device (arguments: levels, most nodes of a tree, branching).
    """

    perturbed_top_k: Callable[[Candidates, NoiseRows, int, Stream, int], TopK]
    next_frontier: Callable[[TopK, Frontier | None, Tensor | None, int, int], SearchedLevel]
    best_nodes: Callable[[SearchedLevels, int, int], NodeTable]
