"""Block verification: a drafted chain is judged as a whole, which accepts at least as much as token by token."""

from collections.abc import Callable
from typing import Any

from specdec.kernels.types import Acceptance
from specdec.verify.chance import Chance, Vector
from specdec.verify.rejection import normalised, positive_part
from specdec.verify.tree import DraftTree


def walk_block(tree: DraftTree, target: Callable[[int], Vector], chance: Chance) -> Acceptance:
    """Accept the longest prefix whose coin falls below h, then draw (Sun et al. 2025, Algorithm 2).

    With X_1 .. X_n drawn one after the other from q, and p, q given X_1 .. X_i in the sums::

        w_0 = 1,  w_i = min(w_{i-1} p(X_i) / q(X_i), 1)
        h_n = w_n,  h_i = S_i / (S_i + 1 - w_i)  with  S_i = sum_x max(w_i p(x) - q(x), 0)

    After the whole chain the draw is from p, after i < n tokens from max(w_i p - q, 0), normalised.

    A rejected tail has had its say in where the chain was cut. The next step must therefore toss and draft
    anew: neither its coins nor its draft noise may be those of the same positions in this step.

    Args:
        tree: a chain with `draft_probs`, or the empty tree, which is plain sampling.
        target: node, or `ROOT`, to the target's distribution p after it, `[vocab]`.
        chance: coins by (depth, rank), and the last draw.

    Raises:
        ValueError: the tree has branches, or nothing says what it was drawn from.
    """
    length = len(tree)
    if tree.parents != tuple(range(-1, length - 1)):
        raise ValueError(f"block verification takes a chain, not parents {tree.parents}; use walk_rejection")
    if length and tree.draft_probs is None:
        raise ValueError(f"a chain of {length} tokens without draft_probs; block verification needs them")
    p = [target(node) for node in range(-1, length)]
    q: Any = tree.draft_probs
    weights: list[Any] = [1]
    for i, token in enumerate(tree.tokens):
        # What q cannot have drawn is never accepted, nor what follows it.
        ratio = p[i][token] / q[i][token] if q[i][token] > 0 else 0
        weights.append(min(weights[i] * ratio, 1))
    kept, h, rest = length, weights[length], p[length]
    while kept > 0 and not chance.accept(kept - 1, 0, h):
        kept -= 1
        residual = positive_part(weights[kept] * p[kept] - q[kept])
        h = _prefix_chance(residual.sum(), weights[kept])
        rest = normalised(residual, p[kept])
    return Acceptance(tuple(range(kept)), chance.draw(kept, rest))


def _prefix_chance(residual: Any, weight: Any) -> Any:
    """h_i. Where p = q and w_i = 1 all that follows is accepted at first asking, but for rounding; so is this."""
    total = residual + 1 - weight
    return residual / total if total > 0 else 1
