"""All walks of a step in one call, against one walk after another on the host."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance
from specdec.verify.sampling import Context, Sampling
from specdec.verify.verifier import RejectionVerifier
from tests.kernel_sets import REFERENCES, TORCH
from tests.strategies import draft_trees, seeds
from tests.verify.sampled_rows import SampledRow, verify

VOCAB = 7


@given(
    st.lists(
        st.tuples(draft_trees(6, VOCAB), st.booleans(), st.sampled_from([0.0, 0.6, 1.0]), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    seeds,
)
def test_walks_equal_those_of_the_host(cases: list[tuple[DraftTree, bool, float, int]], seed: int) -> None:
    """Trees with q and without, greedy and sampled rows, logits from which no token can come."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, (tree, weighed, temperature, output) in enumerate(cases):
        probs = None
        if weighed:
            probs = torch.rand(1 + len(tree), VOCAB, generator=generator).add(0.1)
            probs = probs / probs.sum(-1, keepdim=True)
        drawn = DraftTree(tree.tokens, tree.parents, probs)
        context = Context(Sampling(temperature=temperature, seed=seed, sample_index=index), [0] * (1 + output), 1)
        rows.append(SampledRow(drawn, context))
    count = sum(1 + len(row.tree) for row in rows)
    logits = 2 * torch.randn(count, VOCAB, generator=generator, dtype=torch.float64)
    if seed % 3 == 0:
        logits[seed % count] = torch.nan
    expected = verify(RejectionVerifier(TORCH), rows, logits)
    assert verify(RejectionVerifier(REFERENCES), rows, logits) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_drafts(temperature: float) -> None:
    rows = [SampledRow(DraftTree(), Context(Sampling(temperature=temperature), [3], 1))] * 2
    logits = torch.full((2, VOCAB), float("-inf"), dtype=torch.float64)
    logits[0, 4] = 0.0
    assert verify(RejectionVerifier(REFERENCES), rows, logits) == [Acceptance((), 4), Acceptance((), NO_TOKEN)]
