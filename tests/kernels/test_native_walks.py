"""The compiled walks against the rules themselves."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.kernels.native.library import Library
from specdec.kernels.native.walks import NativeWalks
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.reference.sampling import HostSampling
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import Acceptance, NoiseKey, NoiseRows
from specdec.kernels.types.upload import Packet
from specdec.verify.host_walks import host_coupled_walk
from specdec.verify.rejection import walk_rejection
from tests.kernels.kernel_checks import DTYPES
from tests.kernels.native_forms import FORMS, NOISE, libraries, library, normal
from tests.kernels.walk_batches import TOO_NEAR, Batch, batch, margin
from tests.strategies import draft_trees, seeds
from tests.trees import chain_of

FASTEST = library(FORMS[-1], 2, torch.float32)
vocabularies = st.sampled_from([1, 2, 17, 300, 1025])
ODD_SCORES = [float("nan"), float("inf"), float("-inf"), 0.0, 3.0]


def walked(own: Library, drawn: Batch) -> list[Acceptance]:
    keys = [NoiseKey(*key) if sampled else None for key, sampled in zip(drawn.keys, drawn.sampled, strict=True)]
    probs: Sequence[torch.Tensor | None] = [None] * len(drawn.trees)
    if drawn.draft_probs is not None:
        probs = drawn.draft_probs.split([1 + len(tree) for tree in drawn.trees])
    trees = [DraftTree(tree.tokens, tree.parents, q) for tree, q in zip(drawn.trees, probs, strict=True)]
    return NativeWalks(own, NOISE).rejection_walk(drawn.scores, HostTrees(trees), NoiseRows(keys))


def assert_equal(own: Library, drawn: Batch, nearest: float = TOO_NEAR) -> None:
    """Library and rule, but for rows that a coin has decided by less than `nearest`."""
    ours, expected = walked(own, drawn), drawn.walks(walk_rejection)
    wrong = [row for row, (one, other) in enumerate(zip(ours, expected, strict=True)) if one != other]
    near = all(margin(drawn, row, walk_rejection) < nearest for row in wrong)
    assert near, [(row, ours[row], expected[row]) for row in wrong]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    vocab = draw(vocabularies)
    trees = draft_trees(max_nodes=12, vocab_size=vocab)
    many, has_draft = draw(st.lists(trees, min_size=1, max_size=4)), draw(st.booleans())
    exact = draw(st.booleans())
    drawn = batch(
        many,
        vocab,
        draw(seeds),
        has_draft,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([0.0, 0.3])),
        draw(st.sampled_from([0.3, 0.7, 4.0])),
        exact,
    )
    return drawn


@given(libraries, batches())
def test_a_walk_is_that_of_the_rule(own: Library, drawn: Batch) -> None:
    assert_equal(own, drawn)


@given(libraries, batches())
def test_a_row_walks_the_same_whatever_is_beside_it(own: Library, drawn: Batch) -> None:
    alone = library(own.form, 1, own.dtype)
    assert walked(own, drawn) == [found for row in range(len(drawn.trees)) for found in walked(alone, drawn.only(row))]


@pytest.mark.parametrize("has_draft", [False, True])
def test_siblings_are_tried_one_after_the_other(has_draft: bool) -> None:
    """Q loses most of its mass with the first child, which p mostly rejects; one child q cannot have drawn."""
    count, tree = 64, DraftTree((0, 4, 1, 2), (ROOT,) * 4)
    p = torch.tensor([0.1, 0.21, 0.25, 0.34, 0.1]).repeat(5 * count, 1)
    q = torch.tensor([0.9, 0.05, 0.03, 0.02, 0.0]).repeat(5 * count, 1)
    keys = [(seed, 1, 2) for seed in range(count)]
    drawn = Batch([tree] * count, p.log(), q if has_draft else None, keys, [True] * count)
    assert len(set(walked(FASTEST, drawn))) > 5
    assert_equal(FASTEST, drawn)


@example(0)
@given(seeds)
def test_a_chain_is_accepted_whole_when_q_is_p(seed: int) -> None:
    """Rounding leaves a residual of nothing, which must not end it."""
    drawn = batch([chain_of([3, 1, 2])] * 3, 17, seed, True)
    drawn = drawn._replace(sampled=[True] * 3, draft_probs=torch.softmax(drawn.scores, -1))
    possible = [
        all(drawn.draft_probs[4 * row + node, token] > 0 for node, token in enumerate((3, 1, 2))) for row in range(3)
    ]
    found = walked(FASTEST, drawn)
    assert all(path == (0, 1, 2) for (path, _), whole in zip(found, possible, strict=True) if whole)


def composed(scores: torch.Tensor, trees: HostTrees, noise: NoiseRows) -> list[Acceptance]:
    """The coupled walk of plain torch."""
    return host_coupled_walk(HostSampling(NOISE).gumbel_argmax)(trees, noise, Packet(scores.device))(
        scores.clone()
    ).read()


@given(libraries, st.integers(1, 70), st.integers(1, 5), st.data())
def test_a_coupled_walk_follows_the_argmax_with_noise(own: Library, size: int, rows: int, data: st.DataObject) -> None:
    """The lowest of the largest, no token where something is not a number or the largest is not finite."""
    trees = HostTrees(data.draw(st.lists(draft_trees(max_nodes=6, vocab_size=size), min_size=rows, max_size=rows)))
    count = rows + sum(trees.sizes)
    scores = normal(1, count, size).mul(2).round().to(data.draw(st.sampled_from([own.dtype, torch.float32])))
    odd = st.tuples(st.integers(0, count - 1), st.integers(0, size - 1), st.sampled_from(ODD_SCORES))
    for row, at, score in data.draw(st.lists(odd, max_size=4)):
        scores[row, at] = score
    if data.draw(st.booleans()):
        scores[0] = float("-inf")
    keys: list[NoiseKey | None] = [None] * rows
    if scores.dtype == torch.float32:
        keys = data.draw(st.lists(st.sampled_from([None, NoiseKey(1, 0, 4)]), min_size=rows, max_size=rows))
    before, noise = scores.clone(), NoiseRows(keys)
    assert NativeWalks(own, NOISE).coupled_walk(scores, trees, noise) == composed(scores, trees, noise)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("deep", [False, True])
def test_a_coupled_walk_with_more_noise_than_is_kept(deep: bool) -> None:
    """Rows are then walked in parts, and a tree that is deeper than what is kept takes a copy of its noise."""
    size, depth = 40, 90
    scores = normal(1, 150, size)
    emitted = [int((own + NOISE.at(NoiseKey(3, 0, at), size)).argmax()) for at, own in enumerate(scores[:depth])]
    trees = [chain_of(emitted), DraftTree(), chain_of([2, 1])] if deep else [DraftTree()] * 150
    drafts, noise = HostTrees(trees), NoiseRows([NoiseKey(3, 0, position) for position in range(len(trees))])
    scores = scores[: len(trees) + sum(drafts.sizes)]
    # Few vectors, so that early ones are gone when the last are made.
    small = GumbelNoise(torch.device("cpu"), cache_bytes=1)
    found = NativeWalks(library("portable", 1, torch.float32), small).coupled_walk(scores, drafts, noise)
    assert found == composed(scores, drafts, noise)
    assert len(found[0].path) == (depth if deep else 0)
