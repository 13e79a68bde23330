"""Where an acceptance rule's coins and draws come from."""

from typing import Any, Protocol

from specdec.kernels.types import Stream
from specdec.verify.noise import uniforms

# A 1-d torch tensor or numpy array of `Fraction`: the rules are the same code for the engine and for exact tests.
Vector = Any


class Chance(Protocol):
    """The random choices of one step of one request."""

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        """Whether the coin of (depth, rank) is below `probability`: never at 0, always from 1 on.

        Args:
            depth: 0 at the root.
            rank: the tested child's place among its siblings.
        """
        ...

    def draw(self, depth: int, weights: Vector) -> int:
        """An index of `weights` `[vocab]`, with probability proportional to its entry."""
        ...


class PhiloxChance:
    """Coins and draws that are functions of their key alone, whatever else is in the batch.

    Coins belong to the step, by its first position, not to the position that they decide about: block
    verification tosses coins for positions that it then rejects, and if the next step saw those again, knowing
    which way they fell, its output would be biased.

    Args:
        seed: of the request.
        sample_index: which of the request's samples this is.
        position: output position of the token after the root; grows with every step.
    """

    def __init__(self, seed: int, sample_index: int, position: int) -> None:
        self.seed = seed
        self.sample_index = sample_index
        self.position = position
        self._coins: list[float] = []

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        # Cantor's pairing: a place in one sequence for each (depth, rank), without a bound on either.
        place = (depth + rank) * (depth + rank + 1) // 2 + rank
        if place >= len(self._coins):
            self._coins = uniforms(self.seed, self.sample_index, self.position, 2 * place + 32, Stream.COIN)
        return self._coins[place] < float(probability)

    def draw(self, depth: int, weights: Vector) -> int:
        # A step draws once, for the last position that it emits, so no position sees the same draw twice.
        (u,) = uniforms(self.seed, self.sample_index, self.position + depth, 1, Stream.RESIDUAL)
        sums = weights.cumsum(0)
        # The first index whose sum is above u of the whole, so never one of weight 0; by rounding that may be none.
        index = int((sums > u * sums[-1]).byte().argmax())
        return index if weights[index] > 0 else int(weights.nonzero()[-1])
