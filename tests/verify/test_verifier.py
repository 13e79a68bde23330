"""The walk down a tree against the rule said plainly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance
from specdec.verify.host_walks import follow
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.verifier import CoupledVerifier
from tests.kernel_sets import TORCH
from tests.trees import chain_of
from tests.verify.sampled_rows import SampledRow, verify


def context(sampling: Sampling, position: int) -> Context:
    return Context(sampling, [0] * (1 + position), 1)


TREE = DraftTree(tokens=(4, 7, 4, 9, 1), parents=(ROOT, ROOT, 0, 1, 2))


def test_follows_the_emitted_token_to_a_leaf() -> None:
    assert follow(TREE, [4, 4, 0, 1, 0, 8]) == Acceptance((0, 2, 4), 8)


def test_ends_where_no_child_carries_the_token() -> None:
    assert follow(TREE, [7, 4, 3, 1, 0, 8]) == Acceptance((1,), 3)
    assert follow(TREE, [5, 4, 9, 1, 0, 8]) == Acceptance((), 5)


def test_no_drafts_is_plain_decoding() -> None:
    assert follow(DraftTree(), [6]) == Acceptance((), 6)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    verifier = CoupledVerifier(TORCH)
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert verify(verifier, [SampledRow(DraftTree(), context(Sampling(), 0))], logits) == [Acceptance((), 1)]


@given(seed=st.integers(0, 1000), mixed=st.booleans())
def test_each_node_draws_with_its_own_position(seed: int, mixed: bool) -> None:
    """A node's token is what plain decoding draws there: argmax of log p + the noise of that output position."""
    torch.manual_seed(seed)
    vocab = 6
    verifier = CoupledVerifier(TORCH)
    tree = DraftTree(tokens=(1, 2, 3, 1), parents=(ROOT, 0, 1, 0))
    sampling = Sampling(temperature=0.8, top_k=4, seed=seed)
    rows = [SampledRow(tree, context(sampling, 5))]
    if mixed:
        more = [(Sampling(), 2), (Sampling(1.0, seed=3), 9)]
        before, after = (SampledRow(DraftTree(), context(*one)) for one in more)
        rows = [before, *rows, after]
    logits = torch.randn(sum(1 + len(row.tree) for row in rows), vocab)
    expected = []
    start = 1 if mixed else 0
    for index, depth in enumerate([0, 1, 2, 3, 2]):
        row = logits[start + index : start + index + 1]
        part = NodeRows(context(sampling, 5), 1, lambda: torch.zeros(1, 0).long())
        log_p = processed_logits(row, [part], TORCH)[0].log_softmax(-1)
        expected.append(int((log_p + gumbel(seed, 0, 5 + depth, vocab)).argmax()))
    wanted = [follow(tree, expected)]
    if mixed:
        first = Acceptance((), int(logits[0].argmax()))
        last = Acceptance((), int((logits[-1].log_softmax(-1) + gumbel(3, 0, 9, vocab)).argmax()))
        wanted = [first, *wanted, last]
    assert verify(verifier, rows, logits) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "forbidden"])
def test_a_row_without_a_token_ends_the_walk_and_no_other(temperature: float, bad: float | str) -> None:
    verifier = CoupledVerifier(TORCH)
    tree = DraftTree(tokens=(1, 2), parents=(ROOT, 0))
    logits = torch.full((5, 4), -30.0)
    logits[0, 1], logits[1, 2], logits[2, 3], logits[4, 1] = 30.0, 30.0, 30.0, 30.0
    if bad == "forbidden":
        logits[1] = float("-inf")
    else:
        logits[1, 3] = bad
    rows = [
        SampledRow(tree, context(Sampling(temperature), 0)),
        SampledRow(chain_of([0]), context(Sampling(), 3)),
    ]
    assert verify(verifier, rows, logits) == [Acceptance((0,), NO_TOKEN), Acceptance((0,), 1)]
