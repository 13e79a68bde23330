"""Exact logits of few tokens, chosen by scores of low rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.heads import readout as candidate_readout
from specdec.draft_heads.heads.readout import CandidateReadout, MatrixReadout, leading_directions
from specdec.kernels.reference.projection import Projection
from tests.draft_heads.drawn_readouts import drawn, readouts
from tests.strategies import seeds


@given(readouts, st.data())
def test_scores_are_the_exact_logits_of_distinct_tokens(
    case: tuple[MatrixReadout, Tensor], data: st.DataObject
) -> None:
    whole, hidden = case
    width = hidden.shape[1]
    readout = CandidateReadout(whole, data.draw(st.integers(1, width)))
    found, exact = readout(hidden), whole(hidden).full()
    assert found.scores.shape == found.tokens.shape == (len(hidden), readout.size)
    assert readout.size == -(-whole.size // 4)
    torch.testing.assert_close(found.scores, exact.gather(1, found.tokens), rtol=1e-12, atol=1e-12)
    assert all(len(set(row)) == readout.size for row in found.tokens.tolist())
    full = found.full()
    assert full.shape == exact.shape
    assert torch.equal(full.isfinite().sum(1), torch.full((len(hidden),), readout.size))


@given(readouts)
def test_at_full_rank_the_candidates_are_the_best(case: tuple[MatrixReadout, Tensor]) -> None:
    """A recall of exactly 1."""
    whole, hidden = case
    readout = CandidateReadout(whole, hidden.shape[1])
    best = whole(hidden).full().topk(readout.size).indices
    assert torch.equal(readout(hidden).tokens.sort().values, best.sort().values)


@given(seeds, st.integers(1, 60), st.integers(1, 10), st.data())
def test_directions_are_those_of_the_singular_value_decomposition(
    seed: int, rows: int, columns: int, data: st.DataObject
) -> None:
    """No matrix of that rank is nearer, in one chunk or several."""
    matrix, rank = drawn(seed, rows, columns), data.draw(st.integers(1, columns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate_readout, "CHUNK", data.draw(st.sampled_from([7, 1000])))
        basis = leading_directions(matrix, rank)
    torch.testing.assert_close(basis @ basis.T, torch.eye(rank, dtype=torch.float64))
    values = torch.linalg.svdvals(matrix)
    left = torch.linalg.norm(matrix - matrix @ basis.T @ basis)
    torch.testing.assert_close(left, values[rank:].norm(), rtol=1e-6, atol=1e-6)


def test_no_more_than_so_many_are_scored() -> None:
    readout = CandidateReadout(MatrixReadout(Projection(drawn(0, 2000, 4)), 2000), 2)
    assert readout(drawn(1, 3, 4)).scores.shape == (3, readout.size) == (3, candidate_readout.CANDIDATES)


@pytest.mark.parametrize("rank", [-1, 0, 5])
def test_a_rank_that_the_matrix_has_not_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"draft_rank is {rank}; it must be from 1 to 4, the size of the states"):
        CandidateReadout(MatrixReadout(Projection(drawn(0, 20, 4)), 20), rank)
