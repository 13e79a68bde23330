"""The interface between drafters and draft heads, and the base of heads that read the target's states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import DecoderLayer, Mixer, new_embedding, split_layer
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdapterBank, LowRank
from specdec.kernels.types.fused import FeatureWeights, HeadWeights
from specdec.kernels.types.product import Product


class TargetOutput(NamedTuple):
    """Outputs of a target pass, one row per packed row.

    Attributes:
        features: `[rows, hidden_size]`, hidden states after the final norm, which lm_head and EAGLE-1/2 heads read.
        taps: `[rows, hidden_size]` each, the residual stream before each requested layer, in the order requested.
    """

    features: Tensor
    taps: list[Tensor]


class Block(NamedTuple):
    """Positions that a block head drafts in one pass.

    Attributes:
        rows: of the pass.
        slots: positions drafted, the depth of the deepest tree.
    """

    rows: int
    slots: int


class CachedHead(ABC):
    """A network with keys and values of its own in the paged cache, as cache, target's pass and drafter see it.

    Args:
        llama: sizes of the head's layers, cache and rotary table.
        windows: entries that a row's attention sees in each layer, as `PagedAttention.window`; 0 for all.
        mixers: attention and MLP of its layers.

    Attributes:
        taps: target layers whose inputs the head reads (k is transformers' `hidden_states[k]`).
        feature_size: size of the feature that the cache keeps per token; 0 if the head reads only keys and values.
        first_entry: index of the first token that has a row: 1 if a row reads the previous token's feature, else 0.
            Rotary positions count from it.
        reach: number of the last entries that a row depends on through all layers, its own included; 0 for all.
        block: what it drafts in one pass; None for a head that drafts by levels.
        beside: products beside the layers that adapters of the layers' "qkv" change as well, by their names in
            `LayerAdapter`: keys and values of known tokens in all layers of a block head.
        module: the weights of a head that reads the target's states; None of another.
        lm_head: its output matrix as it was loaded; None without one of its own.
    """

    taps: tuple[int, ...] = ()
    feature_size = 0
    first_entry = 0
    block: Block | None = None
    module: "FeatureHead | None" = None
    lm_head: nn.Linear | None = None

    def __init__(self, llama: LlamaConfig, windows: tuple[int, ...], mixers: Sequence[Mixer]) -> None:
        self.llama, self.windows, self.mixers = llama, windows, mixers
        # Each layer reads the one below.
        self.reach = 1 + sum(window - 1 for window in windows) if all(windows) else 0
        self.beside: dict[str, Product] = {}

    @abstractmethod
    def __call__(self, *inputs: Any) -> Tensor:
        """Return the state after each token, `[rows, hidden_size]`; the inputs of a block head are its own.

        Args:
            tokens: int64 `[rows]`, x_i.
            features: the target's features of token i - 1, `[rows, feature_size]`, or the head's own states,
                `[rows, hidden_size]`; ignored by a head that reads none.
            rotary: rotary table rows of position i - `first_entry`.
            attentions: one per layer, how the rows see each other.
        """

    @property
    def projects_features(self) -> bool:
        """True if `feature_of` has weights of the head."""
        return type(self).feature_of is not CachedHead.feature_of

    def feature_of(self, output: TargetOutput) -> Tensor:
        """Return the features that the cache keeps, `[rows, feature_size]`: by default the states after the final norm.

        Never called where the head reads no features, as `feature_weights`.
        """
        return output.features

    def feature_weights(self) -> FeatureWeights | None:
        """Return the parts of `feature_of` for a pass in one call, None if it has others than such a pass knows."""
        return None

    def read(self, hidden: Tensor) -> Tensor:
        """Return the output matrix's input for each state, `[rows, hidden_size]`: by default the state itself."""
        return hidden

    def drafting_weights(self) -> HeadWeights | None:
        """Return the head's parts for drafting in one call, None if it has others than such a call knows."""
        return None


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head, to which each kind adds its own settings.

    Attributes:
        llama: the head's decoder layers; rotary settings are the head's own, `vocab_size` is the target's.
    """

    llama: LlamaConfig


def first_difference(config: HeadConfig, other: HeadConfig) -> str | None:
    """Return the first setting in which a head's shape differs from another's, with both values; None if in none."""
    if type(config) is not type(other):
        kinds = [type(each).__name__.removesuffix("Config") for each in (config, other)]
        return f"kind is {kinds[0]}, not {kinds[1]}"
    for one, its in ((config.llama, other.llama), (config, other)):
        for name in (field.name for field in fields(one)):
            if name != "llama" and getattr(one, name) != getattr(its, name):
                return f"{name} is {getattr(one, name)}, not {getattr(its, name)}"
    return None


class FeatureHead(nn.Module, ABC):
    """Weights of a head that reads the target's states, with rows and positions as EAGLE has them.

    Attributes:
        config: the head's shape.
        embed_tokens: its token embedding, which may be the target's own tensor.
        layers: its decoder layers.
    """

    layers: nn.ModuleList
    taps: tuple[int, ...] = ()
    first_entry = 1

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config, self.llama = config, config.llama
        self.embed_tokens = new_embedding(config.llama.vocab_size, config.llama.hidden_size)

    @abstractmethod
    def form(self, kernels: KernelSet | None) -> "HeadForm":
        """Return the head as it is called; see `Linear`."""

    @property
    def windows(self) -> tuple[int, ...]:
        return self.llama.layer_windows

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        """The layers, typed."""
        return list(cast("Iterable[DecoderLayer]", self.layers))

    def split_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name, those of `layers` split as in `split_layer`."""
        named: dict[str, Tensor] = dict(self.named_parameters())
        for layer in range(self.llama.num_layers):
            split_layer(named, f"layers.{layer}.", self.llama)
        return named


class HeadForm(CachedHead):
    """A head as it is called, over its own modules in training and over their forms in serving.

    Attributes:
        module: its weights; those that a form has in a layout of its own are given up.
        embed_tokens: its token embedding.
        layers: its decoder layers.
    """

    module: FeatureHead

    def __init__(self, head: FeatureHead, kernels: KernelSet | None) -> None:
        # Layers that ranks share are not rounded: they would read prompts in 4 bits too, which takes longer with tiles.
        rounding = None if kernels is None else kernels.rounding
        self.layers: list[Any] = [
            layer.form(kernels if layer.is_split else rounding or kernels) for layer in head.decoder_layers
        ]
        super().__init__(head.llama, head.windows, [layer.mixer for layer in self.layers])
        self.module, self.config, self.taps, self.first_entry = head, head.config, head.taps, head.first_entry
        self.feature_size, self.embed_tokens = head.llama.hidden_size, head.embed_tokens
        self.lm_head = getattr(head, "lm_head", None)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype


class ModelPart(Protocol):
    """A rank's part of a draft model.

    Attributes:
        whole: sizes of the whole model.
    """

    @property
    def whole(self) -> LlamaConfig: ...

    @property
    def layer_range(self) -> range:
        """The layers of the part."""
        ...

    def cut_low_rank(self, module: str, update: LowRank) -> LowRank:
        """Return the rank's part of an update of a weight, by its module in a checkpoint."""
        ...


class DraftModel(NamedTuple):
    """A draft head with its readout.

    Attributes:
        head: computes states from tokens.
        readout: computes scores of next tokens from states.
        adapters: the bank of adapters of the head's layers; None where requests may have none.
        part: the part of it that this rank has; None where it has all.
    """

    head: CachedHead
    readout: MatrixReadout
    adapters: AdapterBank | None = None
    part: ModelPart | None = None


class TargetParts(NamedTuple):
    """Parts of a target that its head may use.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        output: the output matrix, as a product.
        config: the target's shape.
        divide: replaces parts of a head that was made on the meta device by a rank's own, where ranks share it.
    """

    embedding: Tensor
    output: Product
    config: LlamaConfig
    divide: Callable[[FeatureHead], None] = lambda _: None
