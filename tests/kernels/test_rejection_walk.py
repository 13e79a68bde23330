"""Rejection sampling on the device against the verifier's own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference.noise import uniforms
from specdec.kernels.triton.rejection_walk import rejection_walk
from specdec.kernels.triton.residual import uniform
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import DraftProbs, Stream
from specdec.verify import packed_walks
from tests.kernels.kernel_checks import DEVICE, DTYPES, huge, poisoned_outputs
from tests.kernels.walk_batches import (
    NAN,
    NEVER,
    TOO_NEAR,
    Batch,
    as_lists,
    batch,
    in_order,
    margin,
    verified,
    with_nodes_at,
)
from tests.profiles import num_cases
from tests.strategies import draft_trees, seeds
from tests.trees import chain_of
from tests.triton_launches import recorded_launches

pytestmark = pytest.mark.slow

numbers = st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1), st.just(2**63 - 1))
trees = st.lists(draft_trees(max_nodes=12, vocab_size=17), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("coupled_walk", "residual"):
        yield


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Set how many tokens the kernel reads at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.triton.rejection_walk.BLOCK_SIZE", size)
        yield


def prepared(drawn: Batch, extra: int = 0) -> dict[str, Any]:
    """Arguments with room for more nodes and longer paths than there are."""
    return drawn.arguments(extra, drawn.depth + extra)


@pytest.mark.long
@settings(max_examples=num_cases(60))
@given(trees, seeds, st.booleans(), st.sampled_from([0.0, 0.3]), st.integers(0, 3))
@example([DraftTree()], 0, False, 0.0, 0)
@example([DraftTree(), chain_of([3])], 0, True, 0.0, 0)
def test_the_twin_walks_as_the_verifier_does(
    many: list[DraftTree], seed: int, has_draft: bool, invalid: float, extra: int
) -> None:
    """Both in float64: none is allowed to differ."""
    drawn = batch(many, 17, seed, has_draft, invalid=invalid)
    found = as_lists(packed_walks.rejection_walk(**prepared(drawn, extra)))
    assert found == verified(drawn, drawn.depth + extra)
    arguments = prepared(drawn, extra)
    arguments["scores"] = arguments["scores"].double()
    if has_draft:
        arguments["draft_probs"] = in_order(arguments["draft_probs"].table.double())
    assert as_lists(packed_walks.rejection_walk(**arguments)) == found


def assert_equal(drawn: Batch, arguments: dict[str, Any], nearest: float = 0.0) -> None:
    """Kernel and twin, but for rows that a coin has decided by less than `nearest`."""
    ours, theirs = (as_lists(walk(**arguments)) for walk in (rejection_walk, packed_walks.rejection_walk))
    wrong = [row for row, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    assert all(margin(drawn, row) < nearest for row in wrong), [(row, ours[row], theirs[row]) for row in wrong]


@pytest.mark.long
@given(
    trees,
    seeds,
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 3),
    st.sampled_from(DTYPES),
    st.sampled_from([8, 32]),
    st.sampled_from([0.7, 4.0]),
)
@example([DraftTree()], 0, False, 0.0, 0, torch.float32, 8, 0.7)
@example([DraftTree(), chain_of([3] * 20), DraftTree()], 0, True, 0.0, 0, torch.bfloat16, 32, 0.7)
def test_the_kernel_walks_as_the_twin_does(
    many: list[DraftTree],
    seed: int,
    has_draft: bool,
    invalid: float,
    extra: int,
    dtype: torch.dtype,
    block: int,
    apart: float,
) -> None:
    drawn = batch(many, 17, seed, has_draft, dtype, invalid, apart)
    with blocks_of(block):
        assert_equal(drawn, prepared(drawn, extra), TOO_NEAR)


@pytest.mark.long
@pytest.mark.parametrize("has_draft", [False, True])
def test_siblings_are_tried_one_after_the_other(has_draft: bool) -> None:
    """Q loses most of its mass with the first child, which p mostly rejects; one child q cannot have drawn."""
    count, tree = 16, DraftTree((0, 4, 1, 2), (ROOT,) * 4)
    p = torch.tensor([0.1, 0.21, 0.25, 0.34, 0.1]).repeat(5 * count, 1)
    q = torch.tensor([0.9, 0.05, 0.03, 0.02, 0.0]).repeat(5 * count, 1)
    keys = [(seed, 1, 2) for seed in range(count)]
    drawn = Batch([tree] * count, p.log(), q if has_draft else None, keys, [True] * count)
    found = packed_walks.rejection_walk(**prepared(drawn))
    assert as_lists(found) == verified(drawn, 1)
    with blocks_of(2):
        assert_equal(drawn, prepared(drawn), TOO_NEAR)


@pytest.mark.long
@settings(max_examples=num_cases(12))
@given(trees, seeds, st.booleans())
def test_kernel_and_reference_agree_exactly_without_rounding(many: list[DraftTree], seed: int, has_draft: bool) -> None:
    """All possible tokens are equally likely, which for greedy rows is one great tie."""
    drawn = batch(many, 17, seed, has_draft, exact=True)
    with blocks_of(8):
        assert_equal(drawn, prepared(drawn))


@pytest.mark.long
@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize(("vocab", "nodes"), [(1, 3), (2, 9), (17, 128), (1025, 128), (4097, 5)])
def test_trees_and_vocabularies_of_every_size(vocab: int, nodes: int, has_draft: bool) -> None:
    """Beside each other: no node, one, and a tree as bushy as its vocabulary lets it be."""
    generator = random.Random(vocab)
    # Every node has up to 16 children.
    parents = [(node - min(vocab, 16)) // min(vocab, 16) if node >= min(vocab, 16) else ROOT for node in range(nodes)]
    first = {parent: generator.randrange(vocab) for parent in parents}
    bushy = DraftTree(tuple((first[parent] + node) % vocab for node, parent in enumerate(parents)), tuple(parents))
    for exact in (False, True):
        drawn = batch([bushy, DraftTree(), chain_of([vocab - 1])], vocab, vocab, has_draft, exact=exact)
        drawn = drawn._replace(sampled=[True, True, exact])
        assert_equal(drawn, prepared(drawn), 0.0 if exact else TOO_NEAR)


def without_below(tree: DraftTree, stumps: set[int]) -> tuple[DraftTree, list[int]]:
    """The tree without what grows on the nodes `stumps` (or `ROOT`), and the old index of each node left."""
    place = {ROOT: ROOT}
    for node, parent in enumerate(tree.parents):
        if parent in place and parent not in stumps:
            place[node] = len(place) - 1
    kept = list(place)[1:]
    parents = tuple(place[tree.parents[node]] for node in kept)
    return DraftTree(tuple(tree.tokens[node] for node in kept), parents), kept


@pytest.mark.long
@settings(max_examples=num_cases(12))
@given(trees, seeds, st.booleans(), st.integers(0, 3))
def test_a_path_of_the_greatest_length_ends_as_if_no_child_came_behind(
    many: list[DraftTree], seed: int, has_draft: bool, depth: int
) -> None:
    drawn = batch(many, 17, seed, has_draft)
    found = as_lists(packed_walks.rejection_walk(**drawn.arguments(0, depth)))
    for row, tree in enumerate(many):
        stumps = {node for node, own in zip([ROOT, *range(len(tree))], [0, *tree.depths], strict=True) if own == depth}
        one = drawn.only(row)
        pruned, kept = without_below(one.trees[0], stumps)
        rows = [0, *(1 + node for node in kept)]
        q = None if one.draft_probs is None else one.draft_probs[rows]
        ((path, length, token),) = verified(one._replace(trees=[pruned], scores=one.scores[rows], draft_probs=q), depth)
        assert found[row] == ([*(kept[node] for node in path[:length]), *path[length:]], length, token)
    assert_equal(drawn, drawn.arguments(0, depth), TOO_NEAR)


@triton.jit  # type: ignore[untyped-decorator]
def uniform_kernel(p_numbers, p_keys, stream, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    seed, sample_index, position = tl.load(p_keys), tl.load(p_keys + 1), tl.load(p_keys + 2)
    for place in range(COUNT):
        tl.store(p_numbers + place, uniform(seed, sample_index, position, stream, place))


@settings(max_examples=num_cases(8))
@given(st.tuples(numbers, numbers, numbers), st.sampled_from([Stream.COIN, Stream.RESIDUAL]))
def test_coins_are_the_verifiers_to_the_bit(key: tuple[int, int, int], stream: Stream) -> None:
    found = torch.full((7,), NAN, dtype=torch.float64, device=DEVICE)
    uniform_kernel[(1,)](found, torch.tensor(key, device=DEVICE), int(stream), COUNT=7)
    assert found.tolist() == uniforms(*key, 7, stream)


@pytest.mark.parametrize("bad", [NAN, -NAN, NEVER, float("inf")])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_walk_ends_where_there_is_no_law(sampled: bool, bad: float) -> None:
    """At the root, and at a node that is certainly reached: p = q, and as greedy the only token."""
    tree = DraftTree((1, 2), (ROOT, 0))
    one_hot = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    for q in (None, one_hot):
        for node, path in ((0, []), (1, [0]), (2, [0, 1])):
            scores = one_hot.log()
            # One number is enough, also a NaN whose bits are below those of every other.
            scores[node, : 3 if bad == NEVER else 1] = bad
            drawn = Batch([tree], scores, q, [(7, 0, 3)], [sampled])
            for walk in (rejection_walk, packed_walks.rejection_walk):
                assert as_lists(walk(**drawn.arguments())) == [([*path, *[-1] * (2 - len(path))], len(path), -1)]


def test_a_second_child_that_had_next_to_no_chance_is_drawn_from_all_that_q_has_left() -> None:
    """The rest of q beside 1 is less than a rounding of 1."""
    scores = torch.tensor([0.3, 0.7]).log().repeat(3, 1)
    q = torch.tensor([1.0, 1e-20]).repeat(3, 1)
    accepted = set()
    for seed in range(8):
        drawn = Batch([DraftTree((0, 1), (ROOT, ROOT))], scores, q, [(seed, 0, 0)], [True])
        assert as_lists(rejection_walk(**drawn.arguments())) == verified(drawn, 1)
        accepted.add(verified(drawn, 1)[0][0][0])
    assert accepted == {0, 1}


def test_scores_beyond_two_billion_numbers() -> None:
    """Columns of a wider tensor, so wide that its third row lies behind them; touches a few pages of it."""
    stride, drawn = 2**30, batch([chain_of([1, 2]), chain_of([3])], 5, 3, True)
    arguments = prepared(drawn)

    def wide(rows: Tensor, kind: torch.dtype) -> Tensor:
        memory = huge(4 * stride + 64 if kind == torch.bfloat16 else 2 * (4 * stride + 64)).view(kind)
        return memory.as_strided((5, 5), (stride, 1)).copy_(rows)

    laws = arguments["draft_probs"]
    far = {"scores": wide(arguments["scores"], torch.bfloat16)}
    far["draft_probs"] = laws._replace(table=wide(laws.table, torch.float32))
    near = {"scores": far["scores"].clone()}
    assert as_lists(rejection_walk(**{**arguments, **far})) == as_lists(rejection_walk(**{**arguments, **near}))


@pytest.mark.long
@pytest.mark.parametrize("has_draft", [False, True])
def test_the_first_token_follows_p(has_draft: bool) -> None:
    """One launch has many rows; the interpreter, which is slow, runs fewer of them than the twin."""
    on_gpu = DEVICE.type == "cuda"
    vocab, count = 5, 8000 if on_gpu else 400
    generator = torch.Generator().manual_seed(4)
    p = torch.tensor([0.4, 0.05, 0.3, 0.0, 0.25])
    q = torch.tensor([0.1, 0.5, 0.1, 0.2, 0.1])
    many = [
        DraftTree(tuple(torch.multinomial(q, 2, generator=generator).tolist()) if has_draft else (1, 2), (ROOT, ROOT))
        for _ in range(count)
    ]
    keys = [(row, 0, row % 3) for row in range(count)]
    drafts = q.expand(3 * count, vocab).contiguous() if has_draft else None
    drawn = Batch(many, p.log().repeat(3 * count, 1), drafts, keys, [True] * count)
    walk = rejection_walk if on_gpu else packed_walks.rejection_walk
    found = as_lists(walk(**drawn.arguments()))
    first = [tree.tokens[path[0]] if length else token for tree, (path, length, token) in zip(many, found, strict=True)]
    seen, expected = torch.bincount(torch.tensor(first), minlength=vocab), count * p
    assert seen[3] == 0
    likely = p > 0
    # Exceeded once in 10,000 by three degrees of freedom.
    assert ((seen - expected)[likely].square() / expected[likely]).sum() < 21.1
    some = [drawn.only(row) for row in range(8)]
    for row, one in enumerate(some):
        if margin(one, 0) > TOO_NEAR:
            assert as_lists(rejection_walk(**one.arguments())) == found[row : row + 1]


def test_misfits_are_refused() -> None:
    given_arguments = batch([chain_of([1, 2])], 4, 0, True).arguments()

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=match):
            rejection_walk(**{**given_arguments, **changed})

    scores, laws, packed, noise = (given_arguments[name] for name in ("scores", "draft_probs", "trees", "noise"))
    narrow = packed.starts.repeat_interleave(2)[::2]
    refused(r"tokens \(2,\) .*: not 1 of int64 in one piece, as there are 2 scores of 1 rows", scores=scores[:2])
    refused(r"parents \(1,\)", trees=packed._replace(parents=packed.parents[:1]))
    refused("float64", scores=scores.double())
    refused(r"strides \(1, 3\)", scores=scores.T.contiguous().T)
    refused(r"draft_probs \(3, 3\)", draft_probs=laws._replace(table=scores[:, :3]))
    refused("draft_probs .* torch.float16", draft_probs=laws._replace(table=scores.half()))
    refused(r"draft_probs.rows \(2,\)", draft_probs=laws._replace(rows=laws.rows[:2]))
    refused("tokens .*int32", trees=packed._replace(tokens=packed.tokens.int()))
    refused(r"strides \(2,\)", trees=packed._replace(starts=narrow))
    refused(r"seeds \(2,\)", noise=noise._replace(seeds=noise.seeds.repeat(2)))
    refused("positions .*int32", noise=noise._replace(positions=noise.positions.int()))
    refused(r"sampled \(1,\) torch.int64", noise=noise._replace(sampled=noise.seeds))


@pytest.mark.long
@settings(max_examples=num_cases(12))
@given(trees, seeds)
def test_laws_may_lie_in_any_order(many: list[DraftTree], seed: int) -> None:
    """Distributions that nothing was drawn from may be absent."""
    drawn = batch(many, 17, seed, True)
    arguments = prepared(drawn)
    order = torch.randperm(len(drawn.scores), generator=torch.Generator().manual_seed(seed))
    rows, start = order.argsort(), 0
    for tree in many:
        for node in (node for node in range(len(tree)) if node not in tree.children_of):
            rows[start + 1 + node] = -(2**40)
        start += 1 + len(tree)
    laws = DraftProbs(arguments["draft_probs"].table[order.to(DEVICE)], rows.to(DEVICE))
    for walk in (rejection_walk, packed_walks.rejection_walk):
        assert as_lists(walk(**{**arguments, "draft_probs": laws})) == as_lists(walk(**arguments))


@pytest.mark.parametrize("has_draft", [False, True])
def test_one_form_is_compiled_wherever_nodes_begin(has_draft: bool) -> None:
    """Another would be compiled while serving."""
    arguments = batch([chain_of([1, 2, 3]), chain_of([4])], 17, 5, has_draft).arguments()
    with recorded_launches() as found:
        outcomes = [
            as_lists(rejection_walk(**{**arguments, "trees": with_nodes_at(arguments["trees"], offset)}))
            for offset in (0, 1, 2, 3)
        ]
    assert outcomes == outcomes[:1] * 4
    assert len([launch for launch in found.values() if "rejection_walk" in launch.kernel]) == 1
