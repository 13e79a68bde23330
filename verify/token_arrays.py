"""Token lists of a request's parameters as arrays, made once: a step copies them to the device and loops over none."""

from collections.abc import Sequence

import numpy as np

from specdec.verify.bad_words import BadWords


class TokenArrays:
    """Arrays of the parameters of a `Sampling`.

    Attributes:
        allowed: int64, `allowed_token_ids`; empty without them.
        biased, addends: int64 and float64, the tokens of `logit_bias` and what is added to their logits.
        bad_words: the packed words.
    """

    def __init__(
        self,
        allowed_token_ids: Sequence[int] | None,
        logit_bias: Sequence[tuple[int, float]],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        self.allowed = np.array(allowed_token_ids or (), np.int64)
        self.biased = np.array([token for token, _ in logit_bias], np.int64)
        self.addends = np.array([addend for _, addend in logit_bias], np.float64)
        self.bad_words = BadWords(bad_words)
