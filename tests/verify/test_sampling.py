"""Processed log-probabilities against a plain definition, row by row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.verify.sampling import Sampling, processed_log_probs


def naive(logits: list[float], sampling: Sampling) -> list[float]:
    if sampling.is_greedy:
        sampling = Sampling()
    scaled = [x / (sampling.temperature or 1.0) for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[: sampling.top_k] if sampling.top_k else order
    top = max(scaled)
    weight = {i: math.exp(scaled[i] - top) for i in kept}
    total = sum(weight.values())
    nucleus, before = [], 0.0
    for i in kept:
        if nucleus and sampling.top_p < 1 and before / total >= sampling.top_p:
            break
        nucleus.append(i)
        before += weight[i]
    mass = sum(weight[i] for i in nucleus)
    return [math.log(weight[i] / mass) if i in nucleus else -math.inf for i in range(len(logits))]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
)


@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 10_000), st.integers(2, 9))
def test_equals_the_definition(rows: list[Sampling], seed: int, vocab: int) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    got = processed_log_probs(logits, rows)
    want = torch.tensor([naive(row.tolist(), s) for row, s in zip(logits, rows, strict=True)], dtype=torch.float64)
    assert torch.equal(got == -math.inf, want == -math.inf)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_ties_keep_the_lowest_ids() -> None:
    kept = processed_log_probs(torch.zeros(1, 5), [Sampling(temperature=1.0, top_k=2)])[0].exp()
    torch.testing.assert_close(kept, torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    got = processed_log_probs(torch.randn(2, 11).to(dtype), [Sampling(temperature=0.7, top_p=0.9)] * 2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(2))
