"""What a drafter asks of a head, whatever its kind."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.draft_heads.llama_config import LlamaConfig
from specdec.draft_heads.llama_layer import Attention
from specdec.draft_heads.rope import Rotary
from specdec.draft_heads.target_output import TargetOutput


class DraftHead(Protocol):
    """Predicts the next token's state from a token and the state before it, the target's or its own.

    Attributes:
        llama: sizes of its layers, cache and rotary table.
        taps: layers of the target whose inputs it reads (k is transformers' `hidden_states[k]`).
        feature_size: of what it reads of a token's past, 0 for nothing but keys and values.
        first_entry: of the first token that it has a row of: 1 where a row reads the feature of the token before, else
            0. Its rotary positions count from there.
    """

    @property
    def llama(self) -> LlamaConfig: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def first_entry(self) -> int: ...

    def feature_of(self, output: TargetOutput) -> Tensor:
        """`[rows, feature_size]`, what the cache keeps of the target's pass; not asked where that is nothing."""
        ...

    def __call__(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
        """`[rows, hidden_size]`: the state after each token, to be read on and by the output matrix.

        Args:
            tokens: int64 `[rows]`, x_i.
            features: of token i - 1, `[rows, feature_size]` of the target's or `[rows, hidden_size]` of its own; of
                no meaning to a head that reads none.
            rotary: of position i - `first_entry`.
            attentions: one per layer.
        """
        ...

    def read(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]`, what the output matrix takes of a state."""
        ...
