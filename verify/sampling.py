"""The sampling parameters of a request, and which work they ask for.

Three properties of `Sampling` decide what runs; everything else asks them, and no other place looks at single
parameters to find out whether there is something to do:

- `edits`: logits change so that the argmax may change (biases, penalties, forbidden and forced tokens, a grammar).
  Greedy rows too are then processed, node by node, in `transforms.processed_logits`; a drafter leaves its graphs and
  its processing of whole batches (`RowSampling`).
- `filters`: at temperature > 0 tokens are dropped by rank or probability. `limits` are the three numbers that
  `KernelSet.filter_logits` takes, those that keep all where a row has no filters.
- `is_greedy`: neither temperature nor noise; the argmax is taken.

A new parameter is a field of `SamplingParams` and of `Sampling`, a condition in `edits` or `filters`, and its
arithmetic: in `transforms._edit` if it edits, else in the filter kernel and its reference. `tests/verify/naive.py`
defines it, and `samplings` in `tests/strategies.py` draws it, which covers every path above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # They import numpy, which the command line's help does without.
    from specdec.verify.grammar_state import GrammarState
    from specdec.verify.thinking_state import ThinkingState
    from specdec.verify.token_arrays import TokenArrays

# Below this a temperature is 0, as in vLLM.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """Parameters of one request that shape its distribution, with the names and meanings of `SamplingParams`.

    Attributes:
        temperature: divisor of the logits; below 1e-5, the argmax.
        top_k: tokens kept, 0 for all.
        repetition_penalty: divides positive logits of tokens in prompt and output, multiplies negative ones.
        logit_bias: (token, addend) pairs.
        bad_words: token sequences that the output may not hold.
        min_tokens: output tokens before which no token of `end_tokens` is possible.
        end_tokens: tokens that end the output.
        seed: key of the request's randomness.
        sample_index: which of the request's samples this is.
        grammar: state of the grammar that the output follows, or of its thinking and then its grammar, of this sample
            alone; None for any output.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    seed: int = 0
    sample_index: int = 0
    grammar: "GrammarState | ThinkingState | None" = None

    @cached_property
    def token_arrays(self) -> "TokenArrays":
        """Token lists of these parameters as arrays."""
        from specdec.verify.token_arrays import TokenArrays

        return TokenArrays(self.allowed_token_ids, self.logit_bias, self.bad_words)

    @cached_property
    def without_grammar(self) -> "Sampling":
        return self if self.grammar is None else replace(self, grammar=None)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def divisor(self) -> float:
        """Return the divisor of the logits: the temperature, or 1 at temperature 0."""
        return self.temperature if self.temperature >= LEAST_TEMPERATURE else 1.0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filters(self) -> bool:
        """True if tokens are dropped by rank or probability, which never changes the argmax."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def limits(self) -> tuple[float, float, float]:
        """Return min_p, top_k and top_p; for a greedy row those that keep all tokens."""
        return (self.min_p, self.top_k, self.top_p) if self.filters else (0.0, 0, 1.0)

    @property
    def changes(self) -> bool:
        """True if processed logits differ from the logits."""
        return self.edits or self.filters or self.divisor != 1

    @property
    def edits(self) -> bool:
        """True if logits are changed in a way that can change the argmax."""
        return bool(self.forbids or self.logit_bias or self.penalises)

    @property
    def forbids(self) -> bool:
        """True if tokens are forbidden, which may leave none."""
        limited = self.allowed_token_ids is not None or self.grammar is not None or self.bad_words
        return bool(limited or (self.min_tokens and self.end_tokens))


class Context(NamedTuple):
    """The part of a request that sampling depends on.

    Attributes:
        token_ids: prompt and output.
        num_prompt: number of prompt tokens.
    """

    sampling: Sampling
    token_ids: Sequence[int]
    num_prompt: int

    @property
    def without_grammar(self) -> "Context":
        return self._replace(sampling=self.sampling.without_grammar)

    @property
    def num_output(self) -> int:
        """Tokens generated so far: the output position of the next one."""
        return len(self.token_ids) - self.num_prompt
