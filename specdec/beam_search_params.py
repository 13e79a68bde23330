"""What beam search is asked for."""

import math
from dataclasses import dataclass
from typing import Literal

# A length to this power is still a float.
MOST_LENGTH_PENALTY = 50


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, by vLLM's names; `early_stopping` is transformers'.

    A sequence's score is its cumulative log-probability divided by its number of generated tokens, the end token
    included, to the power of `length_penalty`.

    Attributes:
        beam_width: sequences kept at every step, and returned; 1 is greedy decoding.
        max_tokens: most tokens generated.
        ignore_eos: go on after the end token.
        length_penalty: above 0 favours longer sequences, below 0 shorter ones; in [-50, 50].
        early_stopping: when a search ends that has `beam_width` ended sequences. True: at once. False: as soon as
            the best live beam, were it to end now, would not score better than the worst of them. "never": as soon as
            no live beam could, up to its greatest length.

    Raises:
        ValueError: a value outside its range, named.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        def demand(name: str, holds: bool, wanted: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            demand(name, whole and value >= 1, "a whole number of at least 1")
        demand("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        penalty, most = self.length_penalty, MOST_LENGTH_PENALTY
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool) and math.isfinite(penalty)
        demand("length_penalty", number and abs(penalty) <= most, f"a number of at least -{most} and at most {most}")
        stopping = self.early_stopping
        demand("early_stopping", isinstance(stopping, bool) or stopping == "never", "True, False or 'never'")

    def score(self, cum_logprob: float, num_tokens: int) -> float:
        """What sequences of so many generated tokens are compared by."""
        return cum_logprob / math.pow(num_tokens, self.length_penalty)
