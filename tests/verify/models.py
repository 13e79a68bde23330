"""Strategies of exact models, and of trees small enough to enumerate."""

import random

from hypothesis import strategies as st

from specdec.kernels.types.tree import ROOT, DraftTree
from tests.strategies import seeds
from tests.verify.exact import Model, Shape

# Most nodes of a drawn tree and of a drawn chain, by size of the vocabulary: some thousand drafts.
SAMPLED_NODES = {2: 10, 3: 7, 4: 5, 5: 5}
CHAIN_LENGTH = {2: 7, 3: 5, 4: 4, 5: 4}

models = st.builds(Model, st.integers(2, 5), seeds)


@st.composite
def tree_shapes(draw: st.DrawFn, max_nodes: int, width: int, depth: int = 3) -> Shape:
    """Shapes of up to `max_nodes` nodes under the root."""
    generator = random.Random(draw(seeds))
    budget = draw(st.sampled_from([0, *range(max_nodes // 2, max_nodes + 1)]))

    def grow(depth: int) -> Shape:
        nonlocal budget
        if depth == 0:
            return ()
        count = min(budget, generator.randint(1, width))
        budget -= count
        return tuple(grow(depth - 1) for _ in range(count))

    return grow(depth)


@st.composite
def fixed_trees(draw: st.DrawFn, vocab_size: int) -> DraftTree:
    """Trees whose tokens owe nothing to q."""
    shape = draw(tree_shapes(max_nodes=10, width=min(3, vocab_size)))
    generator = random.Random(draw(seeds))
    tokens: list[int] = []
    parents: list[int] = []
    level = [(ROOT, shape)]
    while level:
        below = []
        for parent, under in level:
            for token, shape in zip(generator.sample(range(vocab_size), len(under)), under, strict=True):
                tokens.append(token)
                parents.append(parent)
                below.append((len(tokens) - 1, shape))
        level = below
    return DraftTree(tuple(tokens), tuple(parents))
