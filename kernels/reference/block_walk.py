"""Block verification, the rule itself: what exact tests and a CPU run, and the Triton kernel's reference."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec.kernels.reference.chance import Chance
from specdec.kernels.reference.host_walks import walk_packed
from specdec.kernels.reference.rejection_walk import normalised, positive_part, walk_rejection
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance, DraftProbs, NoiseColumns, PackedTrees, Vector, Walk


def walk_block(tree: DraftTree, target: Callable[[int], Vector | None], chance: Chance) -> Acceptance:
    """Accept the longest prefix whose coin falls below h, then draw (Sun et al. 2025, Algorithm 2).

    With X_1 .. X_n drawn one after the other from q, and p, q given X_1 .. X_i in the sums::

        w_0 = 1,  w_i = min(w_{i-1} p(X_i) / q(X_i), 1)
        h_n = w_n,  h_i = S_i / (S_i + 1 - w_i)  with  S_i = sum_x max(w_i p(x) - q(x), 0)

    After the whole chain the draw is from p, after i < n tokens from max(w_i p - q, 0), normalised.

    A rejected tail has influenced where the chain was cut. The next step must therefore toss and draft
    anew: neither its coins nor its draft noise may be those of the same positions in this step.

    A tree that was chosen without chance, such as chains of the text, has no q: `walk_rejection` is its rule.

    Args:
        tree: a chain with `draft_probs`, a tree without, or the empty tree, which is plain sampling.
        target: node, or `ROOT`, to the target's distribution p after it, `[vocab]`; None where there is none. Nothing
            behind such a node is looked at, and a path that reaches it ends there with `NO_TOKEN`.
        chance: coins by (depth, rank), and the last draw.

    Raises:
        ValueError: a tree with `draft_probs` has branches.
    """
    check_chain(tree)
    length = len(tree)
    if length and tree.draft_probs is None:
        return walk_rejection(tree, target, chance)
    p: list[Any] = []
    while len(p) <= length and (distribution := target(len(p) - 1)) is not None:
        p.append(distribution)
    length = min(length, len(p))
    p += [None] * (1 + length - len(p))
    q: Any = tree.draft_probs
    weights: list[Any] = [1]
    for i, token in enumerate(tree.tokens[:length]):
        # What q cannot have drawn is never accepted, nor what follows it.
        ratio = p[i][token] / q[i][token] if q[i][token] > 0 else 0
        weights.append(min(weights[i] * ratio, 1))
    kept, h, rest = length, weights[length], p[length]
    while kept > 0 and not chance.accept(kept - 1, 0, h):
        kept -= 1
        residual = positive_part(weights[kept] * p[kept] - q[kept])
        h = _prefix_chance(residual.sum(), weights[kept])
        rest = normalised(residual, p[kept])
    return Acceptance(tuple(range(kept)), NO_TOKEN if rest is None else chance.draw(kept, rest))


def check_chain(tree: DraftTree) -> None:
    """Refuse a drawn tree that is no chain; see `walk_block`."""
    if tree.draft_probs is not None and tuple(tree.parents) != tuple(range(-1, len(tree) - 1)):
        raise ValueError(f"block verification takes a chain, not parents {tree.parents}; use walk_rejection")


def _prefix_chance(residual: Any, weight: Any) -> Any:
    """Return h_i. Where p = q and w_i = 1 all that follows is accepted at once, but for rounding; so is this."""
    total = residual + 1 - weight
    return residual / total if total > 0 else 1


def block_walk(scores: Tensor, draft_probs: DraftProbs, trees: PackedTrees, noise: NoiseColumns) -> Walk:
    """See `specdec.kernels.triton.block_walk`; computes in float64, and takes it."""
    return walk_packed(walk_block, scores, draft_probs, trees, noise)
