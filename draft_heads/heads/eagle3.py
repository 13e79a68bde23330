"""The EAGLE-3 draft head: it reads three depths of the target, and has its own output matrix (Li et al. 2025)."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from specdec.draft_heads.heads.draft_head import FeatureHead, HeadConfig, HeadForm, TargetOutput
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import Attention, DecoderLayer, LlamaLayer, fused_layers
from specdec.draft_heads.llama.norm import RMSNorm
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.elementwise import rms_norm
from specdec.kernels.types.fused import FeatureWeights, HeadWeights


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Shape of an EAGLE-3 head.

    Attributes:
        taps: target layers whose inputs the head reads (k is transformers' `hidden_states[k]`), in the order of `fc`.
        target_hidden_size: size of each tap.
        draft_vocab_size: number of tokens that the head can propose.
        fc_bias: whether the projection of the taps has a bias.
        norm_before_fc: norm the concatenated taps as one vector.
        fc_norm: norm each tap by itself (EAGLE-3.1).
        norm_before_residual: use the normed state as the first layer's residual.
        norm_output: feed back states after the last norm instead of before it (EAGLE-3.1).
    """

    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the official low, middle and high layer of a target.

    Raises:
        CheckpointError: too few layers for three depths.
    """
    if num_layers < 7:
        raise CheckpointError(
            f"a target of {num_layers} layers has no three depths for EAGLE-3, which takes at least 7; train an "
            "EAGLE-1 head (--head eagle)"
        )
    return 2, num_layers // 2, num_layers - 3


class Eagle3Head(FeatureHead):
    """h_i = layer(embedding(x_i), g_{i-1}), logits of token i + 1 are lm_head(norm(h_i)).

    g is `fc` of the target's taps at verified tokens, and the head's own h at draft tokens.

    Attributes:
        draft_tokens: int64 `[draft_vocab_size]`, the target's ids of the tokens that the head can propose, ascending.
    """

    config: Eagle3Config
    draft_tokens: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        llama, self.taps = config.llama, config.taps
        width = len(config.taps) * config.target_hidden_size
        eps = llama.rms_norm_eps
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc_norm = TapNorm(len(config.taps), config.target_hidden_size, eps) if config.fc_norm else None
        self.fc = Linear(width, llama.hidden_size, bias=config.fc_bias)
        first, *others = self.windows
        later = (LlamaLayer(llama, window=window) for window in others)
        self.layers = nn.ModuleList([Eagle3Layer(llama, config.norm_before_residual, first), *later])
        self.norm = RMSNorm(llama.hidden_size, eps)
        self.lm_head = nn.Linear(llama.hidden_size, config.draft_vocab_size, bias=False)
        tokens = torch.empty(config.draft_vocab_size, dtype=torch.int64)
        # On the meta device torch imports its compiler for `arange`.
        self.register_buffer("draft_tokens", tokens if tokens.is_meta else torch.arange(len(tokens)))

    @property
    def first_layer(self) -> "Eagle3Layer":
        """The first layer, typed."""
        return cast("Eagle3Layer", self.layers[0])

    def form(self, kernels: KernelSet | None) -> "Eagle3Form":
        return Eagle3Form(self, kernels)


class Eagle3Form(HeadForm):
    """`Eagle3Head` as it is called."""

    config: Eagle3Config

    def __init__(self, head: Eagle3Head, kernels: KernelSet | None) -> None:
        self.input_norm = None if head.input_norm is None else head.input_norm.form(kernels)
        self.fc_norm = None if head.fc_norm is None else head.fc_norm.form(kernels)
        self.fc, self.norm = head.fc.form(kernels), head.norm.form(kernels)
        super().__init__(head, kernels)

    def reading(self, taps: tuple[int, ...]) -> "Eagle3Form":
        """Return a head with the same weights that reads other target layers, as many."""
        assert len(taps) == len(self.taps)
        head = copy(self)
        head.config, head.taps = replace(self.config, taps=taps), taps
        return head

    def feature_of(self, output: TargetOutput) -> Tensor:
        """Return g, `[rows, hidden_size]`."""
        taps = output.taps if self.fc_norm is None else self.fc_norm(output.taps)
        states = torch.cat(taps, -1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return self.fc(states)

    def __call__(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
        """Return the states that the head reads of itself one token later, `[rows, hidden_size]`; see `CachedHead`."""
        embedded = self.embed_tokens(tokens)
        first, *later = self.layers
        hidden: Tensor = first(embedded, features, rotary, attentions[0])
        for layer, attention in zip(later, attentions[1:], strict=True):
            hidden = layer(hidden, rotary, attention)
        return self.norm(hidden) if self.config.norm_output else hidden

    def read(self, hidden: Tensor) -> Tensor:
        """Return the output matrix's input for the states of `forward`, `[rows, hidden_size]`."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def feature_weights(self) -> FeatureWeights | None:
        if self.fc_norm is not None or self.input_norm is not None:
            return None
        return FeatureWeights(self.taps, self.fc)

    def drafting_weights(self) -> HeadWeights | None:
        first, layers = self.layers[0], fused_layers(self.mixers)
        if layers is None:
            return None
        return HeadWeights(
            self.embed_tokens.weight,
            self.llama.rms_norm_eps,
            layers,
            embed_norm=first.embed_norm.weight,
            state_norm=first.state_norm.weight,
            residual_is_normed=self.config.norm_before_residual,
            norm=self.norm.weight,
            states_are_normed=self.config.norm_output,
        )


class Eagle3Layer(DecoderLayer):
    """The first layer, whose attention reads embedding and state side by side; the residual is the state alone."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool, window: int = 0) -> None:
        super().__init__(config, 2 * config.hidden_size, window)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def form(self, kernels: KernelSet | None) -> "Eagle3LayerForm":
        return Eagle3LayerForm(self, kernels)


class Eagle3LayerForm:
    """`Eagle3Layer` as it is called."""

    def __init__(self, layer: Eagle3Layer, kernels: KernelSet | None) -> None:
        self.embed_norm, self.state_norm = layer.input_layernorm.form(kernels), layer.hidden_norm.form(kernels)
        self.norm_before_residual, self.mixer = layer.norm_before_residual, layer.mixer(kernels)

    def __call__(self, embedded: Tensor, hidden: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        """Return the new state, of the shape of both inputs, `[rows, hidden_size]`."""
        normed = self.state_norm(hidden)
        x = torch.cat([self.embed_norm(embedded), normed], -1)
        return self.mixer(x, normed if self.norm_before_residual else hidden, rotary, attention)


class TapNorm(nn.Module):
    """One norm per tap; `weight` is `[taps, size]`."""

    def __init__(self, taps: int, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(taps, size))
        self.eps = eps

    def form(self, kernels: KernelSet | None) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        norm = rms_norm if kernels is None else kernels.rms_norm

        def normed(taps: Sequence[Tensor]) -> list[Tensor]:
            return [norm(tap, weight, self.eps) for tap, weight in zip(taps, self.weight, strict=True)]

        return normed
