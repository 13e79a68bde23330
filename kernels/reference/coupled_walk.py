"""The walk of the coupled rule, made of an argmax and a walk along emitted tokens."""

from collections.abc import Callable

from torch import Tensor

from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.types import Acceptance, NoiseRows


def coupled_walk(
    argmax: Callable[[Tensor, NoiseRows], Tensor],
    follow: Callable[[Tensor, DraftTrees], list[Acceptance]],
    scores: Tensor,
    trees: DraftTrees,
    noise: NoiseRows,
) -> list[Acceptance]:
    """Follow the token emitted after each node down its row's tree; see `KernelSet.coupled_walk`.

    Args:
        argmax: the argmax of scores `[rows, vocab]` plus each row's noise, int64 `[rows]`: a sample of their softmax.
            The lowest id on ties, `NO_TOKEN` where the largest is not finite. It may overwrite scores of rows with
            noise.
        follow: the path of each tree along the tokens emitted after its root and nodes, int64 `[rows + nodes]`.
    """
    return follow(argmax(scores, trees.noise(noise.keys, scores.device)), trees)
