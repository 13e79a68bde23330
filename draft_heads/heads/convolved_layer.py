"""DFlash2's decoder layer: short convolutions along a block around attention and MLP, with kernels that rows choose."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import Attention, ComposedMixer, DecoderLayer
from specdec.draft_heads.llama.norm import RMSNorm
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet


@dataclass(frozen=True)
class ConvolutionConfig:
    """Shape of a layer's convolutions.

    Attributes:
        taps: rows that an output reads: its own, and those before it in its block.
        group: channels that share a row's own part of the kernel.
    """

    taps: int = 2
    group: int = 16


class BlockConvolution(nn.Module):
    """The two convolutions around a sublayer, both with kernels from the sublayer's input.

    Output t is the sum over taps of `(base[tap] + own[t, tap]) * x[t - tap]`, where rows before the block are zero.

    Args:
        rows: of a block.
    """

    def __init__(self, hidden_size: int, config: ConvolutionConfig, rows: int) -> None:
        super().__init__()
        self.rows, self.taps, self.group = rows, config.taps, config.group
        self.base_kernel = nn.Parameter(torch.zeros(2, config.taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.taps * hidden_size // config.group, bias=False)
        if not self.base_kernel.is_meta:
            # The sublayer as it is.
            nn.init.ones_(self.base_kernel[:, 0])
            nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input, `[rows, hidden_size]`, and the kernels that `after` takes."""
        own = self.kernel_projection(x).view(len(x), 2, self.taps, -1).repeat_interleave(self.group, 3)
        kernels = self.base_kernel + own
        return self.after(x, kernels[:, 0]), kernels[:, 1]

    def after(self, x: Tensor, kernels: Tensor) -> Tensor:
        """Return what the sublayer adds to the residual, from its output."""
        blocks, found = x.view(-1, self.rows, x.shape[1]), torch.zeros_like(x)
        for tap in range(self.taps):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, : self.rows]
            found = found + shifted.reshape(x.shape) * kernels[:, tap]
        return found


class ConvolvedLayer(DecoderLayer):
    """A Llama layer over whole blocks, with convolutions around its sublayers.

    Args:
        rows: of a block.
        window: entries that a row's attention sees, 0 for all.
    """

    def __init__(self, config: LlamaConfig, convolution: ConvolutionConfig, rows: int, window: int = 0) -> None:
        super().__init__(config, config.hidden_size, window)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = BlockConvolution(config.hidden_size, convolution, rows)
        self.mlp_conv = BlockConvolution(config.hidden_size, convolution, rows)

    def form(self, kernels: KernelSet | None) -> "ConvolvedLayerForm":
        """Return the layer as it is called, always part by part."""
        return ConvolvedLayerForm(self, kernels)


class ConvolvedLayerForm:
    """`ConvolvedLayer` as it is called; see `LayerForm`."""

    def __init__(self, layer: ConvolvedLayer, kernels: KernelSet | None) -> None:
        self.norm, self.mixer = layer.input_layernorm.form(kernels), ComposedMixer(layer, kernels)
        self.attention_conv, self.mlp_conv = layer.attention_conv, layer.mlp_conv

    def __call__(self, hidden: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        x, kernels = self.attention_conv.before(self.norm(hidden))
        x = self.attention_conv.after(self.mixer.attend(x, rotary, attention), kernels)
        x, hidden = self.mixer.post_norm.add(x, hidden)
        x, kernels = self.mlp_conv.before(x)
        return self.mlp_conv.after(self.mixer.mlp(x), kernels).add_(hidden)
