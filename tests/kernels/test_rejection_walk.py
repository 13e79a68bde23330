"""Rejection sampling on the device against the verifier's own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import reference_rejection
from specdec.kernels.reference_sampling import Walk
from specdec.kernels.rejection_walk import _uniform, rejection_walk
from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.noise import Stream, uniforms
from specdec.verify.rejection import walk_rejection
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree import ROOT, DraftTree
from specdec.verify.verifier import Acceptance, SampledRow
from specdec.verify.walk_verifier import WalkVerifier
from tests.kernels.kernel_checks import DEVICE, DTYPES, huge, poisoned_outputs
from tests.strategies import draft_trees, seeds

NAN, NEVER = float("nan"), float("-inf")
# How near a coin may be to what it decides for float32 to see it on the other side.
TOO_NEAR = 1e-5
numbers = st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1), st.just(2**63 - 1))
trees = st.lists(draft_trees(max_nodes=12, vocab_size=17), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("rejection_walk"):
        yield


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """How many tokens the kernel reads at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.rejection_walk.BLOCK_SIZE", size)
        yield


class Batch(NamedTuple):
    """Trees under rows, and all that decides about them.

    Attributes:
        scores: `[rows + nodes, vocab]`.
        draft_probs: of the same shape, or None.
        keys: seed, sample index and position of each row.
        sampled: which rows are.
    """

    trees: list[DraftTree]
    scores: Tensor
    draft_probs: Tensor | None
    keys: list[tuple[int, int, int]]
    sampled: list[bool]

    def arguments(self, extra_nodes: int = 0, max_depth: int | None = None) -> dict[str, Any]:
        starts = [0]
        for tree in self.trees:
            starts.append(starts[-1] + 1 + len(tree))
        seeds, indices, positions = zip(*self.keys, strict=True)
        lists = {
            "tokens": [token for tree in self.trees for token in tree.tokens],
            "parents": [parent for tree in self.trees for parent in tree.parents],
            "starts": starts,
            "seeds": seeds,
            "sample_indices": indices,
            "positions": positions,
        }
        return {
            "scores": self.scores.to(DEVICE),
            "draft_probs": None if self.draft_probs is None else self.draft_probs.to(DEVICE),
            **{name: torch.tensor(part, dtype=torch.int64, device=DEVICE) for name, part in lists.items()},
            "sampled": torch.tensor(self.sampled, device=DEVICE),
            "max_nodes": max(len(tree) for tree in self.trees) + extra_nodes,
            "max_depth": self.depth if max_depth is None else max_depth,
        }

    def only(self, row: int) -> "Batch":
        """The batch of this row alone."""
        start = sum(1 + len(tree) for tree in self.trees[:row])
        part, own = slice(start, start + 1 + len(self.trees[row])), slice(row, row + 1)
        q = None if self.draft_probs is None else self.draft_probs[part]
        return Batch(self.trees[own], self.scores[part], q, self.keys[own], self.sampled[own])

    @property
    def depth(self) -> int:
        return max(max(tree.depths, default=0) for tree in self.trees)

    def rows(self) -> list[SampledRow]:
        """As the verifier takes them: with room for output before the position, and q in float64."""
        rows, start = [], 0
        for tree, (seed, index, position), sampled in zip(self.trees, self.keys, self.sampled, strict=True):
            part = slice(start, start + 1 + len(tree))
            start = part.stop
            q = None if self.draft_probs is None else self.draft_probs[part].double()
            sampling = Sampling(float(sampled), seed=seed, sample_index=index)
            rows.append(SampledRow(DraftTree(tree.tokens, tree.parents, q), Context(sampling, [0] * (1 + position), 1)))
        return rows


def batch(
    trees: list[DraftTree],
    vocab: int,
    seed: int,
    has_draft: bool,
    dtype: torch.dtype = torch.float32,
    lawless: float = 0.0,
    apart: float = 0.7,
    exact: bool = False,
) -> Batch:
    """Drawn from a seed, with some tokens that have no chance.

    Args:
        lawless: share of the rows of scores that are NaN, infinite or forbid every token.
        apart: of p and q; where they have much in common paths grow long, else many children are rejected.
        exact: scores of 0 and -inf alone and q of few bits, so that float32 makes no rounding that matters.
    """
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = sum(1 + len(tree) for tree in trees)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    drafted = logits + apart * torch.randn(rows, vocab, generator=generator)
    draft_probs = torch.softmax(drafted.masked_fill(torch.rand(logits.shape, generator=generator) < 0.2, NEVER), -1)
    # Of a vocabulary forbidden as a whole.
    draft_probs = torch.where(draft_probs.isnan(), 1 / vocab, draft_probs)
    gone = torch.rand(logits.shape, generator=generator) < 0.2
    gone[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] = False
    if exact:
        logits = torch.zeros(rows, vocab)
        counts = torch.bincount(torch.randint(vocab * rows, (8 * rows,), generator=generator), minlength=vocab * rows)
        draft_probs = counts.view(rows, vocab) + 8 * torch.nn.functional.one_hot(torch.arange(rows) % vocab, vocab)
        draft_probs = draft_probs / draft_probs.sum(-1, keepdim=True)
    scores = logits.masked_fill(gone, NEVER).to(dtype)
    for row in range(rows):
        if choice.random() < lawless:
            scores[row] = choice.choice([NAN, NEVER, float("inf")])
        elif choice.random() < lawless / 2:
            scores[row, choice.randrange(vocab)] = choice.choice([NAN, float("inf")])
    keys = [(choice.randrange(2**63), choice.randrange(3), choice.randrange(40)) for _ in trees]
    sampled = [choice.random() < 0.8 for _ in trees]
    return Batch(trees, scores, draft_probs if has_draft else None, keys, sampled)


def as_lists(found: Walk) -> list[tuple[list[int], int, int]]:
    return list(zip(*(part.tolist() for part in found), strict=True))


def verified(given_batch: Batch, depth: int) -> list[tuple[list[int], int, int]]:
    """What `WalkVerifier` makes of it, in the form of a walk."""
    found = WalkVerifier(walk_rejection).verify(given_batch.rows(), given_batch.scores.float())
    return [([*path, *[-1] * (depth - len(path))], len(path), token) for path, token in found]


class Margin(PhiloxChance):
    """Remembers how near the nearest of its coins and draws was to going another way."""

    least = 1.0

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        accepted = super().accept(depth, rank, probability)
        coin = self._coins[(depth + rank) * (depth + rank + 1) // 2 + rank]
        self.least = min(self.least, abs(coin - float(probability)))
        return accepted

    def draw(self, depth: int, weights: Any) -> int:
        (u,) = uniforms(self.seed, self.sample_index, self.position + depth, 1, Stream.RESIDUAL)
        sums = weights.cumsum(0)
        self.least = min(self.least, float((sums / sums[-1] - u).abs().min()))
        return super().draw(depth, weights)


def margin(given_batch: Batch, row: int) -> float:
    """Of one row of the batch."""
    margins: list[float] = []

    def spied(tree: DraftTree, target: Any, chance: Chance) -> Acceptance:
        assert isinstance(chance, PhiloxChance)
        spy = Margin(chance.seed, chance.sample_index, chance.position)
        found = walk_rejection(tree, target, spy)
        margins.append(spy.least)
        return found

    one = given_batch.only(row)
    WalkVerifier(spied).verify(one.rows(), one.scores.float())
    return margins[0] if margins else 1.0


def prepared(drawn: Batch, extra: int = 0) -> dict[str, Any]:
    """Arguments with room for more nodes and longer paths than there are."""
    return drawn.arguments(extra, drawn.depth + extra)


@settings(max_examples=60)
@given(trees, seeds, st.booleans(), st.sampled_from([0.0, 0.3]), st.integers(0, 3))
@example([DraftTree()], 0, False, 0.0, 0)
@example([DraftTree(), DraftTree.chain([3])], 0, True, 0.0, 0)
def test_the_twin_walks_as_the_verifier_does(
    many: list[DraftTree], seed: int, has_draft: bool, lawless: float, extra: int
) -> None:
    """Both in float64: none is allowed to differ."""
    drawn = batch(many, 17, seed, has_draft, lawless=lawless)
    found = as_lists(reference_rejection.rejection_walk(**prepared(drawn, extra)))
    assert found == verified(drawn, drawn.depth + extra)
    arguments = prepared(drawn, extra)
    arguments["scores"] = arguments["scores"].double()
    if has_draft:
        arguments["draft_probs"] = arguments["draft_probs"].double()
    assert as_lists(reference_rejection.rejection_walk(**arguments)) == found


def assert_equal(drawn: Batch, arguments: dict[str, Any], nearest: float = 0.0) -> None:
    """Kernel and twin, but for rows that a coin has decided by less than `nearest`."""
    ours, theirs = (as_lists(walk(**arguments)) for walk in (rejection_walk, reference_rejection.rejection_walk))
    wrong = [row for row, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    assert all(margin(drawn, row) < nearest for row in wrong), [(row, ours[row], theirs[row]) for row in wrong]


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
@example([DraftTree(), DraftTree.chain([3] * 20), DraftTree()], 0, True, 0.0, 0, torch.bfloat16, 32, 0.7)
def test_the_kernel_walks_as_the_twin_does(
    many: list[DraftTree],
    seed: int,
    has_draft: bool,
    lawless: float,
    extra: int,
    dtype: torch.dtype,
    block: int,
    apart: float,
) -> None:
    drawn = batch(many, 17, seed, has_draft, dtype, lawless, apart)
    with blocks_of(block):
        assert_equal(drawn, prepared(drawn, extra), TOO_NEAR)


@pytest.mark.parametrize("has_draft", [False, True])
def test_siblings_are_tried_one_after_the_other(has_draft: bool) -> None:
    """Where q loses most of itself with its first child, which p mostly rejects; one child q cannot have drawn."""
    count, tree = 16, DraftTree((0, 4, 1, 2), (ROOT,) * 4)
    p = torch.tensor([0.1, 0.21, 0.25, 0.34, 0.1]).repeat(5 * count, 1)
    q = torch.tensor([0.9, 0.05, 0.03, 0.02, 0.0]).repeat(5 * count, 1)
    keys = [(seed, 1, 2) for seed in range(count)]
    drawn = Batch([tree] * count, p.log(), q if has_draft else None, keys, [True] * count)
    found = reference_rejection.rejection_walk(**prepared(drawn))
    assert as_lists(found) == verified(drawn, 1)
    with blocks_of(2):
        assert_equal(drawn, prepared(drawn), TOO_NEAR)


@settings(max_examples=12)
@given(trees, seeds, st.booleans())
def test_where_nothing_is_rounded_nothing_differs(many: list[DraftTree], seed: int, has_draft: bool) -> None:
    """All possible tokens are equally likely, which for greedy rows is one great tie."""
    drawn = batch(many, 17, seed, has_draft, exact=True)
    with blocks_of(8):
        assert_equal(drawn, prepared(drawn))


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
        drawn = batch([bushy, DraftTree(), DraftTree.chain([vocab - 1])], vocab, vocab, has_draft, exact=exact)
        drawn = drawn._replace(sampled=[True, True, exact])
        assert_equal(drawn, prepared(drawn), 0.0 if exact else TOO_NEAR)


@settings(max_examples=12)
@given(trees, seeds, st.booleans(), st.integers(0, 3))
def test_a_path_of_the_greatest_length_ends_as_if_no_child_came_behind(
    many: list[DraftTree], seed: int, has_draft: bool, depth: int
) -> None:
    drawn = batch(many, 17, seed, has_draft)
    found = as_lists(reference_rejection.rejection_walk(**drawn.arguments(0, depth)))
    for row, tree in enumerate(many):
        stumps = {node for node, own in zip([ROOT, *range(len(tree))], [0, *tree.depths], strict=True) if own == depth}
        one = drawn.only(row)
        pruned, kept = one.trees[0].without_below(stumps)
        rows = [0, *(1 + node for node in kept)]
        q = None if one.draft_probs is None else one.draft_probs[rows]
        ((path, length, token),) = verified(one._replace(trees=[pruned], scores=one.scores[rows], draft_probs=q), depth)
        assert found[row] == ([*(kept[node] for node in path[:length]), *path[length:]], length, token)
    assert_equal(drawn, drawn.arguments(0, depth), TOO_NEAR)


@triton.jit  # type: ignore[untyped-decorator]
def uniform_kernel(p_numbers, p_keys, stream, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    seed, sample_index, position = tl.load(p_keys), tl.load(p_keys + 1), tl.load(p_keys + 2)
    for place in range(COUNT):
        tl.store(p_numbers + place, _uniform(seed, sample_index, position, stream, place))


@settings(max_examples=8)
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
            for walk in (rejection_walk, reference_rejection.rejection_walk):
                assert as_lists(walk(**drawn.arguments())) == [([*path, *[-1] * (2 - len(path))], len(path), -1)]


def test_a_second_child_that_had_next_to_no_chance_is_drawn_from_all_that_q_has_left() -> None:
    """In q, what is left beside 1 is less than a rounding of 1."""
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
    stride, drawn = 2**30, batch([DraftTree.chain([1, 2]), DraftTree.chain([3])], 5, 3, True)
    arguments = prepared(drawn)
    for name, kind in (("scores", torch.bfloat16), ("draft_probs", torch.float32)):
        rows = arguments[name]
        memory = huge(4 * stride + 64 if kind == torch.bfloat16 else 2 * (4 * stride + 64)).view(kind)
        wide = memory.as_strided((5, 5), (stride, 1))
        wide.copy_(rows)
        arguments[name] = wide
    near = {**arguments, "scores": arguments["scores"].clone(), "draft_probs": arguments["draft_probs"].clone()}
    assert as_lists(rejection_walk(**arguments)) == as_lists(rejection_walk(**near))


@pytest.mark.parametrize("has_draft", [False, True])
def test_the_first_token_follows_p(has_draft: bool) -> None:
    """Of many rows in one launch; the interpreter, which takes long for one, sees some of those that the twin does."""
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
    walk = rejection_walk if on_gpu else reference_rejection.rejection_walk
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
    given_arguments = batch([DraftTree.chain([1, 2])], 4, 0, True).arguments()

    def refused(match: str, **changed: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            rejection_walk(**{**given_arguments, **changed})

    scores, starts, seed = (given_arguments[name] for name in ("scores", "starts", "seeds"))
    refused(r"scores \(2, 4\), 2 nodes, 2 parents and 1 rows", scores=scores[:2])
    refused("2 nodes, 1 parents", parents=given_arguments["parents"][:1])
    refused("float64", scores=scores.double())
    refused(r"strides \(1, 3\)", scores=scores.T.contiguous().T)
    refused(r"draft_probs \(3, 3\)", draft_probs=scores[:, :3])
    refused("draft_probs .* torch.float16", draft_probs=scores.half())
    refused("int32", tokens=given_arguments["tokens"].int())
    refused(r"\(2,\)", starts=starts.repeat_interleave(2)[::2])
    refused(r"seeds \(2,\)", seeds=seed.repeat(2))
    refused("positions .*int32", positions=given_arguments["positions"].int())
    refused(r"sampled \(1,\) torch.int64", sampled=seed)
