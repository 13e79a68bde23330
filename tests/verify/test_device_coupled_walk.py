"""The walk where the logits are takes the path that the host's takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN
from specdec.verify.sampling import Context, Sampling
from specdec.verify.verifier import CoupledVerifier
from tests.kernel_sets import REFERENCES, TORCH
from tests.profiles import num_cases
from tests.strategies import draft_trees
from tests.trees import chain_of
from tests.verify.sampled_rows import SampledRow, verify

VOCAB = 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    sample_index=st.integers(0, 3),
    top_k=st.sampled_from([0, 0, 3]),
)
cases = st.lists(st.tuples(draft_trees(7, VOCAB), samplings, st.integers(0, 9)), min_size=1, max_size=4)


def rows_of(cases: list[tuple[DraftTree, Sampling, int]]) -> list[SampledRow]:
    return [SampledRow(tree, Context(sampling, [3] * (2 + said), 2)) for tree, sampling, said in cases]


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
def test_paths_and_tokens_are_those_of_the_host(kernels: str) -> None:
    ours = REFERENCES if kernels == "torch" else choose_kernels("triton", DEVICE, torch.float32)
    device = torch.device("cpu") if kernels == "torch" else DEVICE

    @settings(max_examples=num_cases(100 if kernels == "torch" else 15))
    @given(cases, st.integers(0, 999))
    def check(cases: list[tuple[DraftTree, Sampling, int]], seed: int) -> None:
        rows = rows_of(cases)
        # Few likely tokens, which drafts do meet.
        logits = 3 * torch.randn(
            sum(1 + len(row.tree) for row in rows), VOCAB, generator=torch.Generator().manual_seed(seed)
        )
        wanted = verify(CoupledVerifier(TORCH), rows, logits.clone())
        assert verify(CoupledVerifier(ours), rows, logits.to(device)) == wanted

    check()


def test_a_row_without_a_possible_token_says_so() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1:] = float("nan")
    rows = rows_of([(chain_of([0]), Sampling(), 0), (DraftTree(), Sampling(), 0)])
    found = verify(CoupledVerifier(REFERENCES), rows, logits)
    assert found == [((0,), NO_TOKEN), ((), NO_TOKEN)]
