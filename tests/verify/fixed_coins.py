"""Coins and draws that a test decides."""

from typing import Any

import torch

LARGEST_COIN = 1 - 2.0**-53


class FixedCoins:
    """A `Chance` whose coins are all `coin` and whose draws are the most probable tokens. It records its calls."""

    def __init__(self, coin: float) -> None:
        self.coin = coin
        self.asked: list[tuple[int, int, float]] = []
        self.drawn_from: list[float] = []

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        self.asked.append((depth, rank, float(probability)))
        return self.coin < float(probability)

    def draw(self, depth: int, weights: Any) -> int:  # noqa: ARG002
        assert torch.isfinite(weights).all()
        assert weights.sum() > 0
        assert (weights >= 0).all()
        self.drawn_from = weights.tolist()
        return int(weights.argmax())


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
