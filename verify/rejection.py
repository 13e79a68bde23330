"""The rejection rule: recursive rejection sampling, one text for exact tests and for plain torch."""

from collections.abc import Callable

from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, ROOT, Acceptance, Vector
from specdec.verify.chance import Chance


def walk_rejection(tree: DraftTree, target: Callable[[int], Vector | None], chance: Chance) -> Acceptance:
    """Walk down from the root while a child is accepted, then emit a draw from the residual of p.

    A child x, in order, is accepted with probability min(1, p[x] / q[x]); if it is not, p becomes
    norm(max(p - q, 0)), and q becomes q without x for the next. One child is the rule of Leviathan et al. 2023
    and Chen et al. 2023, several drawn without replacement are Jeon et al. 2024 and Yang et al. 2024. Where
    children were chosen without chance each is its own q: accepted with p[x], else p loses x.

    Args:
        tree: its draft; `draft_probs` must be what the children were really drawn from, and how many a node
            has must be settled before they are drawn.
        target: node, or `ROOT`, to the target's distribution p after it, `[vocab]`; None where there is none, which
            ends the path at the node with `NO_TOKEN`.
        chance: coins by (depth, rank), and the last draw.
    """
    path: list[int] = []
    node = ROOT
    while True:
        p = target(node)
        if p is None:
            return Acceptance(tuple(path), NO_TOKEN)
        child, rest = _try_children(tree, node, p, len(path), chance)
        if child is None:
            return Acceptance(tuple(path), chance.draw(len(path), rest))
        path.append(child)
        node = child


def _try_children(tree: DraftTree, node: int, p: Vector, depth: int, chance: Chance) -> tuple[int | None, Vector]:
    """Return the first accepted child, None if none is; and the residual of p by then."""
    q: Vector = None if tree.draft_probs is None else tree.draft_probs[1 + node]
    for rank, child in enumerate(tree.children_of.get(node, ())):
        token = tree.tokens[child]
        if q is None:
            if chance.accept(depth, rank, p[token]):
                return child, p
            p = normalised(without(p, token), p)
        # A child that q cannot have drawn is no draw from q, so its rejection says nothing: p and q stay.
        elif q[token] > 0:
            if chance.accept(depth, rank, p[token] / q[token]):
                return child, p
            p = normalised(positive_part(p - q), p)
            q = normalised(without(q, token), q)
    return None, p


def positive_part(weights: Vector) -> Vector:
    """Return max(weights, 0)."""
    return weights * (weights > 0)


def without(weights: Vector, token: int) -> Vector:
    """Return a copy of `weights` with 0 at `token`."""
    rest = weights * 1
    rest[token] = 0
    return rest


def normalised(weights: Vector, otherwise: Vector) -> Vector:
    """Return `weights` divided by their sum; `otherwise` where rounding has left nothing of them."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
