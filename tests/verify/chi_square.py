"""The chi-square test of a histogram against a distribution."""

import torch
from torch import Tensor


def chi_square_tail(found: Tensor, expected: Tensor) -> float:
    """Return the p-value of counts `found` where `expected` are expected; cells that expect fewer than 5 are pooled."""
    order = expected.argsort(descending=True)
    found, expected = found[order], expected[order]
    kept = int((expected >= 5).sum())
    if kept < len(expected):
        # The small cells become one cell, or join the smallest of the others if they expect fewer than 5 together.
        kept -= int(expected[kept:].sum() < 5)
        found = torch.cat([found[:kept], found[kept:].sum()[None]])
        expected = torch.cat([expected[:kept], expected[kept:].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))
