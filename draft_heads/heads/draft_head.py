"""What a drafter asks of a head, whatever its kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head, to which each kind adds its own settings.

    Attributes:
        llama: the head's decoder layers; rotary settings are the head's own, `vocab_size` is the target's.
    """

    llama: LlamaConfig


class FeatureHead(nn.Module):
    """Base of heads that read the target's states, with rows and positions as EAGLE has them.

    Attributes:
        config: the head's shape.
        embed_tokens: its token embedding, which may be the target's own tensor.
    """

    config: HeadConfig
    embed_tokens: nn.Embedding

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.llama.vocab_size, config.llama.hidden_size)

    @property
    def llama(self) -> LlamaConfig:
        return self.config.llama

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def feature_size(self) -> int:
        return self.config.llama.hidden_size

    @property
    def first_entry(self) -> int:
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def feature_of(self, output: TargetOutput) -> Tensor:
        """Return what the head reads of the target, by default its states behind the final norm."""
        return output.features

    def read(self, hidden: Tensor) -> Tensor:
        """Return what the output matrix takes, by default the state itself."""
        return hidden


class DraftModel(NamedTuple):
    """What proposes tokens.

    Attributes:
        head: states from tokens.
        readout: scores from states.
    """

    head: DraftHead
    readout: Readout


class TargetParts(NamedTuple):
    """Parts of a target that its head may use.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        output: the output matrix, prepared for inference.
        config: the target's shape.
    """

    embedding: Tensor
    output: Projection
    config: LlamaConfig
