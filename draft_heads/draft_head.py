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
        feature_size: of what it reads of a token's past.
    """

    @property
    def llama(self) -> LlamaConfig: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def feature_size(self) -> int: ...

    def feature_of(self, output: TargetOutput) -> Tensor:
        """`[rows, feature_size]`, what the cache keeps of the target's pass for the head."""
        ...

    def __call__(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
        """`[rows, feature_size]`: the state after each token, to be read on and by the output matrix.

        Args:
            tokens: int64 `[rows]`, x_i.
            features: `[rows, feature_size]`, of token i - 1.
            rotary: of position i - 1.
            attentions: one per layer.
        """
        ...

    def read(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]`, what the output matrix takes of a state."""
        ...
