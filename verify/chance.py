"""The coins and draws of an acceptance rule."""

from typing import Any, Protocol

from specdec.kernels.reference.noise import uniforms
from specdec.kernels.types.types import NoiseKey, Stream, Vector


class Chance(Protocol):
    """The random choices of one step of one request."""

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        """Return whether the coin of (depth, rank) is below `probability`: never at 0, always from 1 on.

        Args:
            depth: 0 at the root.
            rank: the tested child's place among its siblings.
        """
        ...

    def draw(self, depth: int, weights: Vector) -> int:
        """Draw an index of `weights` `[vocab]`, with probability proportional to its entry."""
        ...


class PhiloxChance:
    """Coins and draws that are functions of their key alone, whatever else is in the batch.

    Coins are keyed by the step (its first position), not by the position that they decide about: coins of one step are
    never used in another, so no rule has to prove that their earlier outcomes do not matter.

    Args:
        key: of the request's sample, at the output position of the token after the root, which grows with every step.
    """

    def __init__(self, key: NoiseKey) -> None:
        self.key = key
        self._coins: list[float] = []

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        # Cantor's pairing: a place in one sequence for each (depth, rank), without a bound on either.
        place = (depth + rank) * (depth + rank + 1) // 2 + rank
        if place >= len(self._coins):
            self._coins = uniforms(*self.key, 2 * place + 32, Stream.COIN)
        return self._coins[place] < float(probability)

    def draw(self, depth: int, weights: Vector) -> int:
        # A step draws once, for the last position that it emits, so no position sees the same draw twice.
        key = self.key._replace(position=self.key.position + depth)
        (u,) = uniforms(*key, 1, Stream.RESIDUAL)
        sums = weights.cumsum(0)
        # The first index whose sum is above u of the whole, so never one of weight 0; by rounding that may be none.
        index = int((sums > u * sums[-1]).byte().argmax())
        return index if weights[index] > 0 else int(weights.nonzero()[-1])
