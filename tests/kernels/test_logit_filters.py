"""min_p, top_k and top_p on the device: what is kept is what plain torch keeps, but where a rounding decides."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import logit_filters as logit_filters_reference
from specdec.kernels.triton.logit_filters import BLOCK_SIZE, filter_logits
from tests.kernels.filter_cases import UNSURE, kept_exactly, limits, scores_of
from tests.kernels.kernel_checks import DEVICE, huge
from tests.strategies import seeds

pytestmark = pytest.mark.slow

vocabularies = st.one_of(
    st.integers(1, 40), st.sampled_from([999, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1, 3100])
)


@pytest.mark.long
@given(vocabularies, st.lists(limits, min_size=1, max_size=3), seeds, st.sampled_from([0.0, 0.5, 4.0]))
@example(1, [(1.0, 1, 1e-6)], 0, 0.0)
# Less than the least float32: the likeliest token stays.
@example(97, [(0.0, 0, 1e-46)] * 3, 7, 0.0)
# Mass of what top_k has left, half of it in a score that equals the best.
@example(40, [(0.0, 2, 0.9), (0.0, 3, 0.6)], 0, 4.0)
@example(3100, [(0.0, 0, 0.999), (0.0, 2, 0.9), (0.3, 10**6, 1.0)], 5, 4.0)
def test_kept_tokens_are_those_of_the_parameters(
    vocab: int, asked: list[tuple[float, int, float]], seed: int, step: float
) -> None:
    scores = scores_of(len(asked), vocab, seed, step)
    table = torch.tensor(asked, dtype=torch.float32, device=DEVICE)
    found = filter_logits(scores.to(DEVICE, copy=True), table).cpu()
    twin = logit_filters_reference.filter_logits(scores.clone(), table.cpu())
    for row, own, other, bounds in zip(scores, found, twin, asked, strict=True):
        kept = own > float("-inf")
        assert torch.equal(own[kept], row[kept])
        least, most = (kept_exactly(row, *bounds, slack) for slack in (-UNSURE, UNSURE))
        for ids in (set(kept.nonzero()[:, 0].tolist()), set((other > float("-inf")).nonzero()[:, 0].tolist())):
            assert least <= ids <= most


@pytest.mark.long
@given(vocabularies, limits, seeds)
def test_a_row_keeps_the_same_whatever_runs_beside_it(vocab: int, asked: tuple[float, int, float], seed: int) -> None:
    """Speculation is invisible only so: a token of the step's root is judged alike with a tree and without."""
    scores = scores_of(4, vocab, seed, 0.0).to(DEVICE)
    others = [asked, (0.0, 1, 1.0), asked, (0.0, 0, 1.0)]
    together = filter_logits(scores.clone(), torch.tensor(others, device=DEVICE))
    alone = filter_logits(scores[2:3].clone(), torch.tensor([asked], device=DEVICE))
    assert torch.equal(together[2:3], alone)
    assert torch.equal(together[3], scores[3])


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so(spoilt: float) -> None:
    """So the sampler says that no token can follow, and only for that row."""
    scores = scores_of(3, 100, 1, 0.0).to(DEVICE)
    scores[1, 40], scores[2] = spoilt, float("-inf")
    table = torch.tensor([[0.0, 2, 0.5]] * 3, device=DEVICE)
    found = filter_logits(scores.clone(), table)
    assert not found[1].amax().isfinite()
    assert not found[2].isfinite().any()
    assert torch.equal(found[:1], filter_logits(scores[:1].clone(), table[:1]))


def test_columns_of_a_wider_tensor_and_rows_far_apart() -> None:
    """Rows lie more than 2**31 elements from the first; the memory beside them is untouched."""
    stride = 2**30 + 8
    memory = huge(2 * (2 * stride + 64)).view(torch.float32)
    rows = memory.as_strided((3, 40), (stride, 1), 8)
    rows[:] = scores_of(3, 40, 3, 0.0).to(DEVICE)
    beside = memory.as_strided((3, 8), (stride, 1), 48)
    beside[:] = 7.0
    table = torch.tensor([[0.0, 5, 1.0]] * 3, device=DEVICE)
    expected = filter_logits(rows.clone(), table)
    assert torch.equal(filter_logits(rows, table), expected)
    assert (expected > float("-inf")).sum(1).tolist() == [5, 5, 5]
    assert (beside == 7.0).all()


@pytest.mark.parametrize(
    ("scores", "table", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 3), "scores .* not .rows, vocab. of float32"),
        (torch.zeros(5, 2).T, torch.zeros(2, 3), "scores .* not .rows, vocab. of float32"),
        (torch.zeros(2, 5), torch.zeros(1, 3), r"limits .* not float32 \(2, 3\)"),
        (torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.float64), r"limits .* not float32 \(2, 3\)"),
    ],
)
def test_wrong_shapes_are_refused(scores: Tensor, table: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filter_logits(scores.to(DEVICE), table.to(DEVICE))
    assert filter_logits(torch.zeros(0, 5, device=DEVICE), torch.zeros(0, 3, device=DEVICE)).shape == (0, 5)
