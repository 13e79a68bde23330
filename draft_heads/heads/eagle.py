"""The EAGLE-1/2 draft head: one Llama layer that predicts the target's next feature (Li et al. 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.draft_heads.heads.draft_head import FeatureHead, HeadConfig, HeadForm
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_layer import Attention, LlamaLayer, fused_layers
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.fused import FeatureWeights, HeadWeights


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Shape of an EAGLE-1/2 head.

    Attributes:
        fc_bias: whether the input projection has a bias.
    """

    fc_bias: bool


class EagleHead(FeatureHead):
    """f_i = layer(fc(cat(embedding(x_i), f_{i-1}))): row i predicts the target's feature of token i.

    The feature is the target's hidden state after its final norm, so the target's lm_head turns a prediction
    into logits of token i + 1. The first layer has no input norm, and there is no final one, as published.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        llama = config.llama
        self.fc = Linear(2 * llama.hidden_size, llama.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            LlamaLayer(llama, input_norm=i > 0, window=window) for i, window in enumerate(self.windows)
        )

    def form(self, kernels: KernelSet | None) -> "EagleForm":
        return EagleForm(self, kernels)


class EagleForm(HeadForm):
    """`EagleHead` as it is called."""

    def __init__(self, head: EagleHead, kernels: KernelSet | None) -> None:
        self.fc = head.fc.form(kernels)
        super().__init__(head, kernels)

    def __call__(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
        """Return the predicted features, `[rows, hidden_size]`; for the arguments see `CachedHead`."""
        hidden = self.fc(torch.cat([self.embed_tokens(tokens), features], -1))
        for layer, attention in zip(self.layers, attentions, strict=True):
            hidden = layer(hidden, rotary, attention)
        return hidden

    def feature_weights(self) -> FeatureWeights | None:
        return FeatureWeights((), None)

    def drafting_weights(self) -> HeadWeights | None:
        layers = fused_layers(self.mixers)
        if layers is None:
            return None
        return HeadWeights(self.embed_tokens.weight, self.llama.rms_norm_eps, layers, input=self.fc)
