"""The target: Llama over the packed rows of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.formats.head_kinds import check_not_head
from specdec.draft_heads.heads.draft_head import TargetOutput, TargetParts
from specdec.draft_heads.llama.checkpoint_files import (
    CheckpointError,
    check_fit,
    check_weight_dtypes,
    error_context,
    place,
)
from specdec.draft_heads.llama.kv_scheme import take_kv_scales
from specdec.draft_heads.llama.llama_config import DEFAULTS, FOREIGN_FAMILIES, LlamaConfig
from specdec.draft_heads.llama.llama_layer import (
    Attention,
    LlamaLayer,
    Mixer,
    check_layers,
    fuse_layer,
    fused_layers,
    new_embedding,
)
from specdec.draft_heads.llama.norm import Norm, RMSNorm
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdapterBank
from specdec.kernels.types.fused import FeatureWeights, TargetWeights
from specdec.kernels.types.product import Product
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.models.checkpoint import read_settings, read_weights
from specdec.models.quantization_config import QuantizationConfig, with_plain_weights
from specdec.models.tp_plan import Shard

Model = TypeVar("Model", bound="LlamaModel")


class LlamaWeights(nn.Module):
    """Weights of decoder and lm_head. `lm_head` is None if the checkpoint ties it to the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = new_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, window=window) for window in config.layer_windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, False)

    @property
    def decoder_layers(self) -> list[LlamaLayer]:
        """The layers, typed."""
        return list(cast("Iterable[LlamaLayer]", self.layers))

    @property
    def lm_head_weight(self) -> Tensor:
        """`[vocab_size, hidden_size]`."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight


class LlamaModel:
    """A target that serves: the forms of its weights for a kernel set.

    Args:
        weights: the model's; those that a form has in a layout of its own are given up.

    Attributes:
        num_parameters: numbers in all weights.
        first_layer: number of the first layer, which is not 0 in a pipeline stage behind the first.
        is_last: whether the last norm and lm_head follow the layers; otherwise another stage does.
        num_stages: parts that the model's layers are split into.
        output: lm_head: `[rows, hidden_size]` features to `[rows, vocab_size]` logits.
        kv_scales: the checkpoint's scales of quantised keys and values, float32 `[layers, 2 * kv_heads]`, keys first;
            None where it has none.
        shard: the part of a whole model that this is; None of a model that is whole.
        adapters: the bank of its layers' adapters; None where requests may have none.
    """

    output: Product
    norm: Norm
    adapters: AdapterBank | None = None
    first_layer = 0
    is_last = True
    num_stages = 1
    kv_scales: Tensor | None = None
    shard: Shard | None = None

    def __init__(self, weights: LlamaWeights, kernels: KernelSet) -> None:
        self.weights, self.config = weights, weights.config
        self.num_parameters = sum(parameter.numel() for parameter in weights.parameters())
        self.dtype = next(weights.parameters()).dtype
        if self.is_last:
            self.norm, self.output = weights.norm.form(kernels), kernels.projection(weights.lm_head_weight, None)
        self.layers = [layer.form(kernels) for layer in weights.decoder_layers]

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The token embedding."""
        return self.weights.embed_tokens

    @property
    def mixers(self) -> Sequence[Mixer]:
        """Attention and MLP of the layers."""
        return [layer.mixer for layer in self.layers]

    @property
    def whole_config(self) -> LlamaConfig:
        """Sizes of the whole model, of which a rank may hold a part."""
        return self.config if self.shard is None else self.shard.whole

    def __call__(
        self,
        tokens: Tensor,
        rotary: Rotary,
        attentions: Iterable[Attention],
        tap_layers: Sequence[int] = (),
        received: Tensor | None = None,
    ) -> TargetOutput:
        """Run the decoder; in a pipeline stage, its own layers.

        Args:
            tokens: int64 `[rows]`.
            rotary: of the rows' positions.
            attentions: one per layer, taken when the layer is reached.
            tap_layers: layers whose input is wanted as well (k is transformers' `hidden_states[k]`; as many as there
                are layers for the stream behind the last).
            received: states of the stage before, if there is one.
        """
        hidden, taps = self.enter(tokens, tap_layers, received)
        for index, (layer, attention) in enumerate(zip(self.layers, attentions, strict=True), self.first_layer):
            if index in tap_layers:
                taps[index] = hidden
            hidden = layer(hidden, rotary, attention)
        return self.leave(hidden, taps, tap_layers)

    def enter(
        self,
        tokens: Tensor,
        tap_layers: Sequence[int],  # noqa: ARG002
        received: Tensor | None,  # noqa: ARG002
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the input of the first layer, `[rows, hidden_size]`, and the inputs of tapped layers before it."""
        hidden: Tensor = self.embed_tokens(tokens)
        return hidden, {}

    def leave(self, hidden: Tensor, taps: dict[int, Tensor], tap_layers: Sequence[int]) -> TargetOutput:
        """Return the decoder's output.

        Args:
            hidden: output of the last layer, `[rows, hidden_size]`.
            taps: inputs of the tapped layers.
        """
        taps[self.first_layer + len(self.layers)] = hidden
        return TargetOutput(self.norm(hidden), [taps[index] for index in tap_layers])

    def whole(self, logits: Tensor) -> Tensor:
        """Return logits of the whole vocabulary, `[rows, vocab_size]`: here those of `output`."""
        return logits

    @property
    def parts(self) -> TargetParts:
        """Sizes and weights of the target that a draft head is loaded against."""
        return TargetParts(self.embed_tokens.weight, self.output, self.config)

    def fused_weights(self, features: FeatureWeights | None) -> TargetWeights | None:
        """Return the parts for a pass in one call; None where a layer's are called one by one."""
        layers = fused_layers(self.mixers)
        if layers is None:
            return None
        norm, eps = self.norm.weight, self.config.rms_norm_eps
        return TargetWeights(self.embed_tokens.weight, eps, layers, norm, self.output, features)


def read_llama_config(folder: Path) -> LlamaConfig:
    """Read the sizes of a target from its checkpoint folder or GGUF file, without its weights.

    Raises:
        CheckpointError: no checkpoint, another model family, or a setting that this model would not honour.
    """
    settings = read_settings(folder)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        family = FOREIGN_FAMILIES.get(str(model_type))
        what = f"{family} (model_type {model_type!r})" if family else f"model_type {model_type!r}"
        raise CheckpointError(f"{folder}: {what} is not supported; this engine serves {', '.join(DEFAULTS)}")
    with error_context(folder):
        # Which weights are quantised is said by the tensors.
        QuantizationConfig.from_json(settings)
        return LlamaConfig.from_json(with_plain_weights(settings))


def load_llama(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    window: int | None = None,
    vocab_size: int | None = None,
) -> LlamaModel:
    """Load a Llama, Mistral, Qwen2, Qwen3 or Baichuan from a Hugging Face checkpoint folder or a GGUF file, strictly.

    Args:
        window: most tokens that its layers see; None for as many as the checkpoint says.
        vocab_size: of the target for which it drafts, see `with_vocab_size`; None for its own.

    Raises:
        CheckpointError: see `read_llama_config`; or tensors that are missing, unexpected or of another shape than
            config.json says.
    """
    config, tensors = read_llama_config(folder).with_window(window), read_weights(folder, dtype)
    with error_context(folder):
        check_not_head(read_settings(folder), tensors)
    config, tensors = with_vocab_size(config, untied(folder, config, tensors), vocab_size)
    return built_llama(folder, config, lambda: LlamaWeights(config), LlamaModel, tensors, dtype, device, kernels)


def untied(folder: Path, config: LlamaConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors without an output matrix that is the embedding once more.

    Raises:
        CheckpointError: another matrix where config.json says that it is the embedding.
    """
    if config.tie_word_embeddings:
        # Some checkpoints store the tied matrix twice.
        head = tensors.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, tensors.get("embed_tokens.weight", head)):
            raise CheckpointError(f"{folder}: tie_word_embeddings is true, but lm_head.weight is another matrix")
    return tensors


def with_vocab_size(
    config: LlamaConfig, tensors: dict[str, Tensor], vocab_size: int | None
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Return a draft model's sizes and tensors with as many rows of the vocabulary as its target has.

    Both have the same tokenizer. Models of one family pad their matrices to different sizes (Qwen2.5: 151,936 and
    152,064 rows for 151,665 tokens). Missing rows repeat the last one, so that their tokens are drafted no sooner than
    its token.
    """
    if vocab_size in (None, config.vocab_size):
        return config, tensors
    rows = torch.arange(vocab_size).clamp_(max=config.vocab_size - 1)
    matrices = {name: tensors[name] for name in ("embed_tokens.weight", "lm_head.weight") if name in tensors}
    # Others are refused by their shape.
    own = {name: matrix[rows] for name, matrix in matrices.items() if len(matrix) == config.vocab_size}
    return replace(config, vocab_size=vocab_size), tensors | own


def built_llama(
    folder: Path,
    config: LlamaConfig,
    make: Callable[[], LlamaWeights],
    served: Callable[[LlamaWeights, KernelSet], Model],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
) -> Model:
    """Make a model from its tensors, by their names in a checkpoint.

    Args:
        folder: where they come from, for messages.
        make: makes its weights, without numbers.
        served: makes the model of them.

    Raises:
        CheckpointError: tensors that are missing, unexpected or of another shape.
    """
    with error_context(folder):
        kv_scales = take_kv_scales(tensors, config.num_layers, config.num_kv_heads)
        weights = _fitting(config, make, tensors)
        if config.normalised_head and weights.lm_head is not None:
            tensors["lm_head.weight"] = normalised(tensors["lm_head.weight"], dtype)
    place(weights, tensors, dtype, device)
    model = served(weights.requires_grad_(False).eval(), kernels)
    model.kv_scales = kv_scales
    return model


def normalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Baichuan 2's output matrix, of which its model uses the rows divided by their length.

    Args:
        dtype: of the arithmetic, which is done in float32 at least.

    Raises:
        CheckpointError: a quantised matrix.
    """
    if isinstance(matrix, QuantizedTensor):
        raise CheckpointError("lm_head is quantised, which a normalised head cannot be; leave it in plain numbers")
    return F.normalize(matrix.to(torch.promote_types(dtype, torch.float32))).to(dtype)


def check_whole(folder: Path, config: LlamaConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check all tensors of a checkpoint, without reading them.

    Raises:
        CheckpointError: see `load_llama`.
    """
    with error_context(folder):
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        take_kv_scales(shapes, config.num_layers, config.num_kv_heads)
        _fitting(config, lambda: LlamaWeights(config), shapes)


def _fitting(config: LlamaConfig, make: Callable[[], LlamaWeights], tensors: dict[str, Tensor]) -> LlamaWeights:
    """Return weights without numbers that the tensors fit; those of layers are joined as in the model."""
    check_weight_dtypes(tensors)
    check_layers(tensors, config.num_layers)
    for layer in range(config.num_layers):
        fuse_layer(tensors, f"layers.{layer}.", config)
    with torch.device("meta"):
        weights = make()
    check_fit(tensors, {name: weight.shape for name, weight in weights.named_parameters()})
    return weights
