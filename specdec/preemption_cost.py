"""What it costs to take a request's memory away and to give it back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PreemptionCost:
    """Measured on the machine at hand; the defaults never swap.

    Attributes:
        recompute_token: seconds to compute one token of a prompt again.
        swap_block: seconds to copy one block to host memory, or back.
    """

    recompute_token: float = 0.0
    swap_block: float = 1.0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether a request of `num_tokens` cached tokens is swapped rather than recomputed."""
        return 2 * num_blocks * self.swap_block < num_tokens * self.recompute_token
