"""The coupled rule: the target's own token after each node, by noise of its position, and the path along them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, ROOT, Acceptance, NoiseRows
from specdec.kernels.types.upload import Packet


def coupled_walk(
    argmax: Callable[[Tensor, NoiseRows], Tensor],
    follow_all: Callable[[Tensor, DraftTrees], list[Acceptance]],
    scores: Tensor,
    trees: DraftTrees,
    noise: NoiseRows,
) -> list[Acceptance]:
    """Follow the token emitted after each node down its row's tree; see `Walks.coupled`.

    Args:
        argmax: the argmax of scores `[rows, vocab]` plus each row's noise, int64 `[rows]`: a sample of their softmax.
            The lowest id on ties, `NO_TOKEN` where the largest is not finite. It may overwrite scores of rows with
            noise.
        follow_all: `follow` for each tree, with the tokens emitted after its root and nodes, int64 `[rows + nodes]`.
    """
    packet = Packet(scores.device)
    own = trees.noise(noise.keys, packet)
    packet.send()
    return follow_all(argmax(scores, own()), trees)


def follow(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path, node, wanted = list[int](), ROOT, emitted[0]
    # A parent comes before its children, and siblings differ: one pass in order finds all of the path.
    for child, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent == node and token == wanted != NO_TOKEN:
            path.append(child)
            node, wanted = child, emitted[1 + child]
    return Acceptance(tuple(path), wanted)
