"""Steps of a benchmark: random draft trees under contexts that lie scattered over the cache."""

import random

import torch

from specdec import DraftShape
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.tree import ROOT, DraftTree, TreeRow
from specdec.verify.tree_batch import TreeBatch

# Of the children's chances: so that the trees have some nodes in each of six levels, most in the middle ones.
SKEW = 12


def random_tree(shape: DraftShape, chance: random.Random) -> DraftTree:
    """Grown as EAGLE-2 grows its trees, from random child chances: `shape.nodes` nodes, or all that there are.

    Of each level the `branching` best nodes have children, `branching` each; of all nodes the best are kept.
    """
    # Of each candidate; the root is none.
    values: list[float] = []
    parents: list[int] = []
    frontier = [(1.0, ROOT)]
    for _ in range(shape.depth):
        level = []
        for value, parent in frontier:
            weights = sorted((chance.random() ** SKEW for _ in range(shape.branching)), reverse=True)
            for weight in weights:
                level.append((value * weight / (sum(weights) + 0.1), len(values)))
                values.append(level[-1][0])
                parents.append(parent)
        frontier = sorted(level, reverse=True)[: shape.branching]
    # A child is worth less than its parent, so that none is kept without it.
    best = sorted(range(len(values)), key=lambda node: (-values[node], node))[: shape.nodes]
    place = {ROOT: ROOT} | {node: at for at, node in enumerate(sorted(best))}
    # All tokens of a tree differ, and so do those of siblings.
    tokens = chance.sample(range(len(values)), len(best))
    return DraftTree(tuple(tokens), tuple(place[parents[node]] for node in sorted(best)))


def path_of(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from the root's child down to `node`."""
    return [above for above in range(len(tree)) if tree.ancestors[node] >> above & 1]


def random_batch(
    context: int, chain: int, trees: list[DraftTree], block_size: int, num_blocks: int, device: torch.device, seed: int
) -> TreeBatch:
    """A request for each tree: `context` entries in the cache, `chain` known tokens, then the tree.

    Args:
        num_blocks: of the cache, of which each request has its own, in any order.
    """
    chance = random.Random(seed)
    counts = [ceil_div(context + chain + len(tree), block_size) for tree in trees]
    blocks = iter(chance.sample(range(num_blocks), sum(counts)))
    parts = [TreeRow([0] * chain, context, [next(blocks) for _ in range(count)], 1) for count in counts]
    return TreeBatch.pack(parts, HostTrees(trees), block_size, device)
