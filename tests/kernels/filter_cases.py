"""Scores and limits for the filters, and what they keep by definition."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

# Shares of a mass that a sum of thousands of roundings does not tell apart.
UNSURE = 1e-5
limits = st.tuples(
    st.one_of(st.just(0.0), st.sampled_from([0.01, 0.3, 1.0])),
    st.one_of(st.just(0), st.integers(1, 50), st.just(10**6)),
    st.one_of(st.just(1.0), st.sampled_from([1e-6, 0.3, 0.9, 0.999])),
)


def scores_of(rows: int, vocab: int, seed: int, step: float) -> Tensor:
    """Many of them equal where `step` is not 0; some impossible."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, vocab, generator=generator)
    if step:
        scores = (scores / step).round() * step
    impossible = torch.rand(rows, vocab, generator=generator) < 0.2
    impossible[:, seed % vocab] = False
    return scores.masked_fill(impossible, float("-inf"))


def kept_exactly(scores: Tensor, min_p: float, top_k: int, top_p: float, slack: float) -> set[int]:
    """The ids that one row keeps, by definition, in float64; bounds are widened by `slack` times themselves."""
    row = scores.double()
    best = row.max()
    possible = [v for v in range(len(row)) if row[v] > float("-inf")]
    if min_p:
        possible = [v for v in possible if row[v] >= best + math.log(min_p) - slack]
    ranked = sorted(possible, key=lambda v: (-row[v].item(), v))[: top_k or None]
    if top_p == 1:
        return set(ranked)
    weights = [(row[v] - best).exp().item() for v in ranked]
    wanted, before, kept = top_p * sum(weights) * (1 + slack), 0.0, set()
    for v, weight in zip(ranked, weights, strict=True):
        if kept and before >= wanted:
            break
        kept.add(v)
        before += weight
    return kept
