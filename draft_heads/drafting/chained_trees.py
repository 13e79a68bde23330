"""Trees of several sources: the chains of the text beside the nodes that a model drafts."""

from collections.abc import Sequence

import torch

from specdec.draft_heads.drafting.chains import ChainNodes
from specdec.kernels.types.device_trees import DeviceNodes, DeviceTrees
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.tree import NO_DRAFTS, DraftTree
from specdec.kernels.types.types import ROOT


def add_chains(trees: DraftTrees, chains: Sequence[ChainNodes | None], device: torch.device) -> DraftTrees:
    """Add chains to a batch of trees; nodes that both have are verified once.

    On a GPU the host does not know a model's trees before their verification. Those that chains are added to are read
    here, which makes the host wait for the drafting. Rows that have either chains or a model's nodes need no such read.

    Args:
        trees: what the model has drafted, one tree per row; none drawn from q where there are chains.
        chains: of each row, None for none.
        device: where trees are verified.
    """
    if not any(chains):
        return trees
    if isinstance(trees, HostTrees) or not any(trees.sizes):
        drafted: Sequence[DraftTree] = trees.trees if isinstance(trees, HostTrees) else [NO_DRAFTS] * len(trees.sizes)
        return HostTrees([merged(tree, own) if own else tree for tree, own in zip(drafted, chains, strict=True)])
    rows = [row for row, own in enumerate(chains) if own]
    needs_read = any(trees.sizes[row] for row in rows)
    known = trees.read() if needs_read else [NO_DRAFTS] * len(trees.sizes)
    both = [merged(known[row], own) for row, own in enumerate(chains) if own]
    place = {row: len(trees.sizes) + index for index, row in enumerate(rows)}
    joined = trees.concat(DeviceTrees(DeviceNodes.of(both, device)))
    return joined.select([place.get(row, row) for row in range(len(trees.sizes))])


def merged(tree: DraftTree, chains: ChainNodes) -> DraftTree:
    """Return a tree with the nodes of chains behind its own, but for those that it has already."""
    assert tree.draft_probs is None, "chains do not mix with drawn nodes"
    tokens, parents, children = list(tree.tokens), list(tree.parents), dict(tree.children)
    place = {ROOT: ROOT}
    for node, (token, parent) in enumerate(zip(*chains, strict=True)):
        key = place[parent], token
        if key not in children:
            children[key] = len(tokens)
            tokens.append(token)
            parents.append(key[0])
        place[node] = children[key]
    ranks = (*(tree.ranks or range(len(tree))), *range(len(tree), len(tokens)))
    added = len(tokens) - len(tree)
    return DraftTree(tuple(tokens), tuple(parents), ranks=ranks, read_values=tree.read_values, num_chained=added)
