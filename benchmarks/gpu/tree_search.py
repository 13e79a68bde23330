"""The search of draft trees, against the same in plain torch, which is a kernel for each of its operations."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.race import EXACT, Case, Peer, Subject
from benchmarks.gpu.sizes import Sizes
from specdec.kernels.reference import tree_search as reference
from specdec.kernels.triton.tree_search import best_nodes, next_frontier
from specdec.kernels.types.tree_search import Frontier, SearchedLevel, SearchedLevels
from specdec.kernels.types.types import TopK

NUMBER = 8


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    for rows in sizes.walks:
        yield Subject("next_frontier", {"rows": rows}, partial(_next_frontier, sizes, rows, device))
        yield Subject("best_nodes", {"rows": rows}, partial(_best_nodes, sizes, rows, device))


def _next_frontier(sizes: Sizes, rows: int, device: torch.device) -> Case:
    width = sizes.tree.branching
    above = _searched(sizes, rows, 1, device)[0].frontier
    own = torch.ones(width, 1, dtype=torch.int64, device=device)
    inputs = (_children(rows * width, width, device), above, own, rows, width)
    return Case(
        run=lambda: _flat(next_frontier(*inputs)),
        twin=lambda: _flat(reference.next_frontier(*inputs)),
        num_bytes=rows * width * (2 * width + 5) * NUMBER,
        bound=EXACT,
        peers={"torch": Peer(lambda: _flat(reference.next_frontier(*inputs)))},
    )


def _best_nodes(sizes: Sizes, rows: int, device: torch.device) -> Case:
    tree = sizes.tree
    levels = _searched(sizes, rows, tree.depth, device)
    values = torch.cat([level.values for level in levels], 1)
    tokens = torch.cat([level.tokens for level in levels], 1)
    most, count = min(tree.nodes, values.shape[1]), values.shape[1]
    bounds = (torch.full((rows,), number, device=device) for number in (most, count))
    best = torch.stack([level.best for level in levels[:-1]], 1)
    given = SearchedLevels(values, tokens, best, *bounds)

    return Case(
        run=lambda: best_nodes(given, most, tree.branching),
        twin=lambda: reference.best_nodes(given, most, tree.branching),
        num_bytes=rows * (count + 5 * most) * NUMBER,
        bound=EXACT,
        peers={"torch": Peer(lambda: reference.best_nodes(given, most, tree.branching))},
    )


def _flat(level: SearchedLevel) -> tuple[Tensor, ...]:
    return (level.values, level.best, *(part for part in level.frontier if part is not None))


def _children(nodes: int, each: int, device: torch.device) -> TopK:
    """Return children, best first, whose log-probabilities have few bits, so that no sum is rounded."""
    scores = (-torch.randint(1, 1 << 10, (nodes, each), device=device) / 64).sort(1, descending=True).values
    return TopK(torch.randint(1000, (nodes, each), device=device), scores, torch.zeros(nodes, device=device))


def _searched(sizes: Sizes, rows: int, depth: int, device: torch.device) -> list[SearchedLevel]:
    width = sizes.tree.branching
    above: Frontier | None = None
    own = torch.ones(width, 1, dtype=torch.int64, device=device)
    levels = list[SearchedLevel]()
    for _ in range(depth):
        nodes = rows if above is None else rows * width
        level = reference.next_frontier(_children(nodes, width, device), above, own, rows, width)
        levels.append(level)
        above = level.frontier
    return levels
