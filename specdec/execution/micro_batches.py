"""Groups of a step's rows, which follow each other through the pipeline stages."""

from collections.abc import Sequence
from itertools import pairwise

from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import TreeRow


def micro_batches(
    parts: Sequence[TreeRow], trees: DraftTrees, count: int
) -> list[tuple[Sequence[TreeRow], DraftTrees]]:
    """Cut rows, with their trees, into up to `count` groups of neighbours with about as many tokens each."""
    if count == 1:
        return [(parts, trees)]
    ends = [0]
    for part, size in zip(parts, trees.sizes, strict=True):
        ends.append(ends[-1] + len(part.tokens) + size)
    cuts = [0]
    for group in range(1, count + 1):
        # The end of the row that takes the group past its share of all tokens.
        cut = next(row for row, end in enumerate(ends) if end * count >= ends[-1] * group)
        if cut > cuts[-1]:
            cuts.append(cut)
    return [(parts[start:stop], trees.select(range(start, stop))) for start, stop in pairwise(cuts)]
