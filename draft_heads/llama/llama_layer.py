"""The Llama decoder layer over packed rows: targets and heads, serving and training, are made of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, fuse
from specdec.draft_heads.llama.linear import Linear, give_up
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.mlp import mlp_kind
from specdec.draft_heads.llama.norm import RMSNorm, head_norms
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.elementwise import norm_heads
from specdec.kernels.types.fused import FusedLayer, LayerWeights
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.types import HeadNorms


class Attention(Protocol):
    """Attention of packed rows to each other and to earlier tokens."""

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        """Rotate and attend.

        Args:
            qkv: `[rows, num_heads + 2 * kv_heads, head_dim]`, queries, keys, values; not to be used afterwards.
            rotary: of the rows' positions.

        Returns:
            `[rows, num_heads, head_dim]`.
        """
        ...


class PagedAttention:
    """Attention over one layer's paged cache, in which it first stores the step's keys and values.

    Args:
        kv: `[slots, 2 * kv_heads, head_dim]`, keys first; numbers, or codes as in `kv_entries`.
        slots: int64 `[rows]`, where the rows' own keys and values go.
        rows: what each row sees.
        window: tokens that a row sees at most, itself included; 0 for all.
        scales: float32 `[2 * kv_heads]`, of codes, from the checkpoint; None: see `kv_entries.quantize`.
        slopes: of ALiBi, `[heads]`; None without.
    """

    def __init__(
        self,
        kv: Tensor,
        slots: Tensor,
        rows: RaggedRows,
        kernels: KernelSet,
        window: int = 0,
        scales: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        self.kv, self.slots, self.rows, self.kernels = kv, slots, rows, kernels
        self.window, self.scales, self.slopes = window, scales, slopes

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int, norms: HeadNorms | None = None) -> Tensor:
        """See `Attention`; queries and keys are normed first where there are `norms`."""
        query = self.kernels.rotary_store(qkv, *rotary, self.kv, self.slots, num_heads, self.scales, norms)
        scale = query.shape[-1] ** -0.5
        return self.kernels.tree_attention(query, self.kv, self.rows, scale, self.window, self.slopes, self.scales)


class DecoderLayer(nn.Module, ABC):
    """Weights of attention and MLP with residuals; subclasses make the input of the attention.

    Args:
        input_size: of what queries, keys and values are made from.
        window: of a layer that runs in one call; else `PagedAttention` has it, as it has ALiBi's slopes.

    Attributes:
        reduce: sums the outputs of attention over ranks, where each has some of the heads; None where one has all.
    """

    reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: LlamaConfig, input_size: int, window: int = 0) -> None:
        super().__init__()
        self.config, self.input_size, self.window = config, input_size, window
        hidden, dim = config.hidden_size, config.head_dim
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * dim
        self.qkv_proj = Linear(input_size, qkv_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(config.num_heads * dim, hidden, bias=config.output_bias)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = mlp_kind(config)(config)

    @abstractmethod
    def form(self, kernels: KernelSet | None) -> Any:
        """Return the layer as it is called; see `Linear`."""

    @property
    def linears(self) -> dict[str, Linear]:
        """The linear layers of attention that adapters may change, by their names in `LayerAdapter`."""
        return {"qkv": self.qkv_proj, "output": self.o_proj}

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism divides the weights of the attention or of the MLP among ranks."""
        return self.reduce is not None or self.mlp.reduce is not None

    def mixer(self, kernels: KernelSet | None, input_norm: RMSNorm | None = None) -> "Mixer":
        """Return attention and MLP in one call where the kernel set can, and part by part elsewhere.

        Args:
            input_norm: of the residual, which makes the input of attention, where that is to be in the call.
        """
        return self._fused(kernels, input_norm) or ComposedMixer(self, kernels)

    def _fused(self, kernels: KernelSet | None, input_norm: RMSNorm | None) -> "FusedMixer | None":
        """Return the layer in one call, which takes its weights; None where the kernel set has none for its parts."""
        if kernels is None or kernels.passes is None or self.reduce is not None:
            return None
        config, mlp, norms = self.config, self.mlp.weights(), (input_norm, self.q_norm, self.k_norm)
        if mlp is None:
            return None
        given, query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
        run = kernels.passes.layer(
            LayerWeights(
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                window=self.window,
                slopes=config.slopes(torch.float32, torch.device("cpu")),
                eps=config.rms_norm_eps,
                input_norm=given,
                query_norm=query_norm,
                key_norm=key_norm,
                post_norm=self.post_attention_layernorm.weight,
                qkv=(self.qkv_proj.weight, self.qkv_proj.bias),
                output=(self.o_proj.weight, self.o_proj.bias),
                mlp=mlp,
            )
        )
        give_up(self.qkv_proj, self.q_norm, self.k_norm, self.o_proj, self.post_attention_layernorm, self.mlp)
        return FusedMixer(run, self.input_size)


class ComposedMixer:
    """Attention and MLP with residuals, part by part: over modules in training, over their forms in serving.

    Attributes:
        products: by their names in `LayerAdapter`; those of the MLP are in `mlp`.
        input_size: see `DecoderLayer`.
    """

    fused = None

    def __init__(self, layer: DecoderLayer, kernels: KernelSet | None) -> None:
        config = layer.config
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.input_size = layer.input_size
        self.products = {name: part.form(kernels) for name, part in layer.linears.items()}
        query, key = layer.q_norm, layer.k_norm
        self.norms = None if query is None or key is None else head_norms(query, key, kernels)
        self.post_norm, self.mlp = layer.post_attention_layernorm.form(kernels), layer.mlp.form(kernels)
        self.reduce = layer.reduce

    def __call__(self, x: Tensor, residual: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        """Run attention and MLP: `x` `[rows, input_size]`, `residual` and output `[rows, hidden_size]`."""
        x, residual = self.post_norm.add(self.attend(x, rotary, attention), residual)
        return self.mlp(x).add_(residual)

    def attend(self, x: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        """Run attention: `[rows, input_size]` to `[rows, hidden_size]`, summed over ranks."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.products["qkv"](x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        if self.norms is not None and isinstance(attention, PagedAttention):
            mixed = attention(qkv, rotary, heads, self.norms)
        else:
            if self.norms is not None:
                norm_heads(qkv, self.norms, heads)
            mixed = attention(qkv, rotary, heads)
        output = self.products["output"](mixed.flatten(1))
        return output if self.reduce is None else self.reduce(output)


class FusedMixer:
    """Attention and MLP with residuals by a layer that runs in one call.

    Args:
        fused: the layer.
        input_size: see `DecoderLayer`.
    """

    def __init__(self, fused: FusedLayer, input_size: int) -> None:
        self.fused, self.input_size = fused, input_size

    def __call__(self, x: Tensor | None, residual: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        """See `ComposedMixer`; without `x` the layer makes it from the residual."""
        assert isinstance(attention, PagedAttention)
        return self.fused(x, residual, *rotary, attention.kv, attention.slots, attention.rows, attention.scales)


Mixer = ComposedMixer | FusedMixer


class LlamaLayer(DecoderLayer):
    """Llama decoder layer; without `input_norm` it is the first layer of an EAGLE-1/2 head."""

    def __init__(self, config: LlamaConfig, input_norm: bool = True, window: int = 0) -> None:
        super().__init__(config, config.hidden_size, window)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else None

    def form(self, kernels: KernelSet | None) -> "LayerForm":
        return LayerForm(self, kernels)


class LayerForm:
    """`LlamaLayer` as it is called.

    Attributes:
        mixer: its attention and MLP.
    """

    def __init__(self, layer: LlamaLayer, kernels: KernelSet | None) -> None:
        norm = layer.input_layernorm
        self.norm = None if norm is None else norm.form(kernels)
        self.mixer = layer.mixer(kernels, norm)

    def __call__(self, hidden: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        """Run the layer: `[rows, hidden_size]` to `[rows, hidden_size]`."""
        if isinstance(self.mixer, FusedMixer):
            return self.mixer(None, hidden, rotary, attention)
        return self.mixer(hidden if self.norm is None else self.norm(hidden), hidden, rotary, attention)


def fused_layers(mixers: Iterable[Mixer]) -> list[FusedLayer] | None:
    """Return layers in one call each; None if one has its parts called one by one."""
    found = [mixer.fused for mixer in mixers]
    fused = [layer for layer in found if layer is not None]
    return fused if len(fused) == len(found) else None


# Parts of a layer by their names in the Hugging Face layout, and here.
RENAMED = (
    ("self_attn.o_proj", "o_proj"),
    ("self_attn.q_norm", "q_norm"),
    ("self_attn.k_norm", "k_norm"),
)


def check_layers(tensors: Mapping[str, Tensor], num_layers: int) -> None:
    """Check that each layer has tensors, before any work is done per layer.

    Raises:
        CheckpointError: a layer has none.
    """
    found = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    missing = next((layer for layer in range(num_layers) if str(layer) not in found), None)
    if missing is not None:
        raise CheckpointError(f"config.json: num_hidden_layers = {num_layers}, but layers.{missing} has no tensors")


def fuse_layer(tensors: dict[str, Tensor], prefix: str, config: LlamaConfig) -> None:
    """Rename a layer's tensors from the Hugging Face layout to `LlamaLayer`'s, fusing what one product makes."""
    mlp_kind(config).fuse(tensors, f"{prefix}mlp.")
    for kind in ("weight", "bias"):
        parts = [f"{prefix}self_attn.{name}_proj.{kind}" for name in "qkv"]
        fuse(tensors, f"{prefix}qkv_proj.{kind}", parts)
        for old, new in RENAMED:
            if f"{prefix}{old}.{kind}" in tensors:
                tensors[f"{prefix}{new}.{kind}"] = tensors.pop(f"{prefix}{old}.{kind}")


def split_layer(tensors: dict[str, Tensor], prefix: str, config: LlamaConfig) -> None:
    """Rename and split a layer's tensors to the Hugging Face layout: the inverse of `fuse_layer`."""
    mlp_kind(config).split(tensors, f"{prefix}mlp.")
    sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for kind in ("weight", "bias"):
        if (qkv := tensors.pop(f"{prefix}qkv_proj.{kind}", None)) is not None:
            for name, part in zip("qkv", torch.split(qkv, sizes), strict=True):
                tensors[f"{prefix}self_attn.{name}_proj.{kind}"] = part.contiguous()
        for old, new in RENAMED:
            if (tensor := tensors.pop(f"{prefix}{new}.{kind}", None)) is not None:
                tensors[f"{prefix}{old}.{kind}"] = tensor


def new_embedding(tokens: int, size: int) -> nn.Embedding:
    """Return an embedding as `nn.Embedding` begins, but on the meta device without numbers.

    There torch would import its compiler to draw none, which takes seconds.
    """
    weight = torch.empty(tokens, size)
    if not weight.is_meta:
        nn.init.normal_(weight)
    return nn.Embedding(tokens, size, _weight=weight)
