"""Hypothesis strategies: structure and seeds are drawn, never arrays of numbers."""

import random
from typing import NamedTuple

from hypothesis import strategies as st

from specdec.core.sampling_params import SamplingParams, Speculation
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.verify.sampling import Sampling

seeds = st.integers(0, 2**32 - 1)


@st.composite
def draft_trees(draw: st.DrawFn, max_nodes: int, vocab_size: int, min_nodes: int = 0) -> DraftTree:
    """Trees of every build: a node's parent is one of the `reach` nodes before it, or the root."""
    size = draw(st.integers(min_nodes, max_nodes))
    reach = draw(st.integers(1, max(1, size)))
    generator = random.Random(draw(seeds))
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for node in range(size):
        parent = generator.randint(max(ROOT, node - reach), node - 1)
        token = generator.randrange(vocab_size)
        while (parent, token) in taken:
            # The node just before has no child yet, so this ends.
            parent, token = node - 1, generator.randrange(vocab_size)
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return DraftTree(tuple(tokens), tuple(parents))


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int, max_len: int, min_len: int = 1) -> list[int]:
    """Token ids."""
    size = draw(st.integers(min_len, max_len))
    generator = random.Random(draw(seeds))
    return [generator.randrange(vocab_size) for _ in range(size)]


def speculations(max_nodes: int = 12, max_depth: int = 4) -> st.SearchStrategy[Speculation]:
    """Requests that leave speculation to the engine, bound it, or turn it off."""
    nodes, depths = st.none() | st.integers(1, max_nodes), st.none() | st.integers(1, max_depth)
    bounded = st.builds(Speculation, st.just(True), nodes, depths)
    return st.one_of(st.just(Speculation()), bounded, bounded, st.builds(Speculation, st.just(False), nodes, depths))


@st.composite
def sampling_params(draw: st.DrawFn, max_tokens: int = 16) -> SamplingParams:
    """Greedy or sampled, with and without filters, always seeded."""
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.5])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5])),
        top_k=draw(st.sampled_from([0, 1, 5])),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=draw(st.integers(1, max_tokens)),
        ignore_eos=draw(st.booleans()),
        speculation=draw(speculations()),
    )


@st.composite
def samplings(draw: st.DrawFn, vocab_size: int) -> Sampling:
    """Any mix of parameters, most of them off most of the time."""
    token = st.integers(0, vocab_size - 1)
    word = st.lists(token, min_size=1, max_size=3).map(tuple)
    few = st.lists(token, min_size=2, max_size=vocab_size, unique=True).map(tuple)
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.3])),
        logit_bias=tuple(draw(st.dictionaries(token, st.sampled_from([-5.0, 1.5, 4.0]), max_size=2)).items()),
        allowed_token_ids=draw(st.one_of(st.none(), st.none(), few)),
        bad_words=tuple(draw(st.lists(word, max_size=3))),
        min_tokens=draw(st.sampled_from([0, 0, 2, 9])),
        end_tokens=draw(st.sampled_from([(), (0,), (1, 2)])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@st.composite
def draft_shapes(draw: st.DrawFn, max_depth: int = 5, max_branching: int = 6, max_nodes: int = 24) -> DraftShape:
    """Bounds of a draft tree."""
    return DraftShape(
        draw(st.integers(1, max_depth)),
        draw(st.integers(1, max_branching)),
        draw(st.integers(1, max_nodes)),
        draw(st.sampled_from([0.0, 0.0, 0.3, 0.6, 0.9])),
    )


class CachePlan(NamedTuple):
    """Which blocks each request holds; `num_blocks` is what the cache needs at least."""

    tables: list[list[int]]
    num_blocks: int


def shuffled_tables(lengths: list[int], block_size: int, seed: int) -> CachePlan:
    """Block tables for `lengths` entries, scattered over a cache that has some blocks to spare."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(blocks)
    tables, start = [], 0
    for count in counts:
        tables.append(blocks[start : start + count])
        start += count
    return CachePlan(tables, len(blocks))
