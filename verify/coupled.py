"""The coupled rule: the path along the target's own token after each node."""

from collections.abc import Sequence

from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, ROOT, Acceptance


def follow(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path, node, wanted = list[int](), ROOT, emitted[0]
    # A parent comes before its children, and siblings differ: one pass in order finds all of the path.
    for child, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent == node and token == wanted != NO_TOKEN:
            path.append(child)
            node, wanted = child, emitted[1 + child]
    return Acceptance(tuple(path), wanted)
