"""Block verification on the device against the verifier's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import block_walk as block_walk_reference
from specdec.kernels.reference.block_walk import walk_block
from specdec.kernels.triton.block_walk import block_walk
from specdec.kernels.types.tree import DraftTree
from tests.kernels.kernel_checks import DEVICE, DTYPES, huge, poisoned_outputs
from tests.kernels.walk_batches import NAN, NEVER, TOO_NEAR, Batch, as_lists, batch, in_order, margin, verified
from tests.profiles import num_cases
from tests.strategies import seeds
from tests.trees import chain_of

VOCAB = 17
chains = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=9).map(chain_of), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("tree_walk"):
        yield


def prepared(drawn: Batch, extra: int = 0) -> dict[str, Any]:
    """Arguments with room for longer chains than there are."""
    return drawn.arguments(0, drawn.depth + extra)


def sampled_batch(many: list[DraftTree], vocab: int, seed: int, **settings: Any) -> Batch:
    return batch(many, vocab, seed, True, **settings)._replace(sampled=[True] * len(many))


def assert_equal(drawn: Batch, arguments: dict[str, Any], nearest: float = 0.0) -> None:
    """Kernel and twin, but for rows that a coin has decided by less than `nearest`."""
    ours, theirs = (as_lists(walk(**arguments)) for walk in (block_walk, block_walk_reference.block_walk))
    wrong = [row for row, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    assert all(margin(drawn, row, walk_block) < nearest for row in wrong), [(r, ours[r], theirs[r]) for r in wrong]


@settings(max_examples=num_cases(60))
@given(chains, seeds, st.sampled_from([0.0, 0.3]), st.integers(0, 3), st.sampled_from([0.3, 0.7, 4.0]))
@example([DraftTree()], 0, 0.0, 0, 0.7)
@example([DraftTree(), chain_of([3])], 0, 0.0, 0, 0.7)
def test_the_twin_walks_as_the_verifier_does(
    many: list[DraftTree], seed: int, invalid: float, extra: int, apart: float
) -> None:
    """Both in float64: none is allowed to differ."""
    drawn = sampled_batch(many, VOCAB, seed, invalid=invalid, apart=apart)
    found = as_lists(block_walk_reference.block_walk(**prepared(drawn, extra)))
    assert found == verified(drawn, drawn.depth + extra, walk_block)
    arguments = prepared(drawn, extra)
    arguments["scores"] = arguments["scores"].double()
    arguments["draft_probs"] = in_order(arguments["draft_probs"].table.double())
    assert as_lists(block_walk_reference.block_walk(**arguments)) == found


@given(
    chains,
    seeds,
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 3),
    st.sampled_from(DTYPES),
    st.sampled_from([8, 32]),
    st.sampled_from([0.3, 0.7, 4.0]),
)
@example([DraftTree()], 0, 0.0, 0, torch.float32, 8, 0.7)
@example([DraftTree(), chain_of([3] * 40), DraftTree()], 0, 0.0, 0, torch.bfloat16, 32, 0.3)
def test_the_kernel_walks_as_the_twin_does(
    many: list[DraftTree], seed: int, invalid: float, extra: int, dtype: torch.dtype, block: int, apart: float
) -> None:
    drawn = sampled_batch(many, VOCAB, seed, dtype=dtype, invalid=invalid, apart=apart)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.triton.block_walk.BLOCK_SIZE", block)
        assert_equal(drawn, prepared(drawn, extra), TOO_NEAR)


@settings(max_examples=num_cases(20))
@given(chains, seeds)
def test_kernel_and_reference_agree_exactly_without_rounding(many: list[DraftTree], seed: int) -> None:
    """All possible tokens are equally likely."""
    drawn = sampled_batch(many, VOCAB, seed, exact=True)
    assert_equal(drawn, prepared(drawn))


@pytest.mark.parametrize(("vocab", "length"), [(1, 3), (2, 9), (17, 128), (1025, 31), (4097, 5)])
def test_chains_and_vocabularies_of_every_size(vocab: int, length: int) -> None:
    """Beside each other: no token, one, and a chain as long as trees may have nodes."""
    generator = torch.Generator().manual_seed(vocab)
    longest = chain_of(torch.randint(vocab, (length,), generator=generator).tolist())
    for apart in (0.2, 0.7):
        drawn = sampled_batch([longest, DraftTree(), chain_of([vocab - 1])], vocab, vocab, apart=apart)
        assert_equal(drawn, prepared(drawn), TOO_NEAR)


def test_a_chain_drawn_from_the_targets_own_law_is_accepted_as_a_whole() -> None:
    """And the smallest rounding of a weight below 1 must not cut it."""
    generator = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(9, VOCAB, generator=generator), -1)
    chain = chain_of([int(probs.argmax()) for probs in p[:8]])
    for seed in range(6):
        drawn = Batch([chain], p.log(), p, [(seed, 0, 0)], [True])
        for walk in (block_walk, block_walk_reference.block_walk):
            (found,) = as_lists(walk(**prepared(drawn)))
            assert found[:2] == (list(range(8)), 8)


def test_a_token_made_likelier_by_what_comes_behind_it_is_kept() -> None:
    """The weight of the whole chain counts, where token by token the first would be rejected with chance 0.9."""
    p = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]])
    q = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    lengths = []
    for seed in range(40):
        drawn = Batch([chain_of([0, 0])], p.log(), q, [(seed, 0, 0)], [True])
        ours, theirs, host = (
            as_lists(block_walk(**prepared(drawn))),
            as_lists(block_walk_reference.block_walk(**prepared(drawn))),
            verified(drawn, 2, walk_block),
        )
        assert ours == theirs == host
        lengths.append(ours[0][1])
    # (1/9) * 9 = 1: with token by token 4 in 40 would be.
    assert lengths.count(2) == 40


@pytest.mark.parametrize("bad", [NAN, -NAN, NEVER, float("inf")])
def test_the_walk_ends_where_there_is_no_law(bad: float) -> None:
    """At the root, and at a token that is certainly reached; one that q cannot have drawn hides what is behind it."""
    tree = chain_of([1, 2])
    one_hot = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    for node in range(3):
        scores = one_hot.log()
        scores[node, : 3 if bad == NEVER else 1] = bad
        drawn = Batch([tree], scores, one_hot, [(7, 0, 3)], [True])
        for walk in (block_walk, block_walk_reference.block_walk):
            assert as_lists(walk(**prepared(drawn))) == [(list(range(node)) + [-1] * (2 - node), node, -1)]
    scores = one_hot.log()
    scores[2] = bad
    impossible = Batch([tree], scores, one_hot.roll(1, 0), [(7, 0, 3)], [True])
    for walk in (block_walk, block_walk_reference.block_walk):
        assert as_lists(walk(**prepared(impossible))) == [([-1, -1], 0, 1)]


def test_scores_beyond_two_billion_numbers() -> None:
    """Columns of a wider tensor, so wide that its third row lies behind them; touches a few pages of it."""
    stride, drawn = 2**30, sampled_batch([chain_of([1, 2]), chain_of([3])], 5, 3)
    arguments = prepared(drawn)

    def wide(rows: Tensor, kind: torch.dtype) -> Tensor:
        memory = huge(4 * stride + 64 if kind == torch.bfloat16 else 2 * (4 * stride + 64)).view(kind)
        return memory.as_strided((5, 5), (stride, 1)).copy_(rows)

    probs = arguments["draft_probs"]
    far = {"scores": wide(arguments["scores"], torch.bfloat16)}
    far["draft_probs"] = probs._replace(table=wide(probs.table, torch.float32))
    near = {"scores": far["scores"].clone()}
    assert as_lists(block_walk(**{**arguments, **far})) == as_lists(block_walk(**{**arguments, **near}))


def test_the_first_token_follows_p() -> None:
    """One launch has many rows, whose chains are drawn from q; the interpreter runs fewer of them."""
    on_gpu = DEVICE.type == "cuda"
    vocab, count = 3, 8000 if on_gpu else 600
    generator = torch.Generator().manual_seed(4)
    p = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.6, 0.2, 0.2]])
    draws = torch.stack([torch.multinomial(probs, count, replacement=True, generator=generator) for probs in q[:2]], 1)
    many = [chain_of(drawn) for drawn in draws.tolist()]
    keys = [(row, 0, row % 3) for row in range(count)]
    drawn = Batch(many, p.log().repeat(count, 1), q.repeat(count, 1), keys, [True] * count)
    walk = block_walk if on_gpu else block_walk_reference.block_walk
    found = as_lists(walk(**prepared(drawn)))
    first = [tree.tokens[0] if length else token for tree, (_, length, token) in zip(many, found, strict=True)]
    seen, expected = torch.bincount(torch.tensor(first), minlength=vocab), count * p[0]
    # Exceeded once in 10,000 by two degrees of freedom.
    assert ((seen - expected).square() / expected).sum() < 18.4
    assert {length for _, length, _ in found} == {0, 1, 2}
    for row in range(8):
        one = drawn.only(row)
        if margin(one, 0, walk_block) > TOO_NEAR:
            assert as_lists(block_walk(**prepared(one))) == found[row : row + 1]


def test_misfits_are_refused() -> None:
    arguments = prepared(sampled_batch([chain_of([1, 2])], 4, 0))
    trees = arguments["trees"]
    with pytest.raises(ValueError, match=r"tokens \(1,\) .*: not 2 of int64 in one piece, as there are 3 scores of 1"):
        block_walk(**{**arguments, "trees": trees._replace(tokens=trees.tokens[:1])})
    with pytest.raises(ValueError, match="float64"):
        block_walk(**{**arguments, "scores": arguments["scores"].double()})
