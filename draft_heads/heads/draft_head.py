"""What a drafter asks of a head, whatever its kind."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from specdec.draft_heads.heads.readout import Readout
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import Attention
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.linear import Projection


class TargetOutput(NamedTuple):
    """Of each packed row.

    Attributes:
        features: `[rows, hidden_size]` hidden states after the final norm: what lm_head and EAGLE-1/2 heads read.
        taps: `[rows, hidden_size]` each: the residual stream before the layers asked for, in their order.
    """

    features: Tensor
    taps: list[Tensor]


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


class DraftModel(NamedTuple):
    """What proposes tokens.

    Attributes:
        head: states from tokens.
        readout: scores from states.
    """

    head: DraftHead
    readout: Readout


class TargetSizes(NamedTuple):
    """What a target must have in common with its head."""

    vocab_size: int
    hidden_size: int
    num_layers: int


class TargetParts(NamedTuple):
    """What a head may use of its target.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        output: its output matrix as it serves.
        num_layers: of its decoder.
    """

    embedding: Tensor
    output: Projection
    num_layers: int

    @property
    def sizes(self) -> TargetSizes:
        vocab_size, hidden_size = self.embedding.shape
        return TargetSizes(vocab_size, hidden_size, self.num_layers)
