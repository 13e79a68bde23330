"""Settings of Llama-family config.json files. Settings that the engine would not honour are refused."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, flag, items
from specdec.draft_heads.llama.kv_scheme import kv_cache_dtype_of, quantizes_kv_alone
from specdec.draft_heads.llama.rope import WITHOUT_ROTATION, RopeConfig

logger = logging.getLogger(__name__)

# Keys that change what the model computes, with the only values that are supported.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "quantization_config": (None,),
    "attention_chunk_size": (None,),
    "use_qk_norm": (None, False),
}

# Bounds above every real model, so that sizes of tensors can be computed without overflow.
LARGEST_SIZE = 2**26
LARGEST_SIZES = {"num_hidden_layers": 10_000, "max_position_embeddings": 2**31 - 1, "sliding_window": 2**31 - 1}

# Defaults of each family in transformers that differ from those of Llama.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False, "head_dim": 128},
    "baichuan": {"model_max_length": 4096},
}

# Baichuan's config.json says neither whether positions are rotary, as in the models of 7 billion parameters, nor
# whether the head is normalised, as in Baichuan 2. vLLM and SGLang tell it by these.
ROTARY_BAICHUAN_HIDDEN, ROTARY_BAICHUAN, BAICHUAN_2_VOCAB = 4096, "BaiChuanForCausalLM", 125696

# Families whose attention may have a sliding window, and the first layer of Qwen's that has it by default.
SLIDING_FAMILIES = ("mistral", "qwen2", "qwen3")
MAX_WINDOW_LAYERS = 28

# Families that are asked for and not supported, by their `model_type`.
FOREIGN_FAMILIES = {
    "phi3": "Phi-3",
    "gemma": "Gemma",
    "gemma2": "Gemma-2",
    "gemma3": "Gemma-3",
    "gemma3_text": "Gemma-3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2 with experts",
    "qwen3_moe": "Qwen3 with experts",
    "llama4": "Llama 4",
    "mllama": "Llama 3.2 with vision",
    "mistral3": "Mistral 3 with vision",
    "smollm3": "SmolLM3",
}


def positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive whole number of a config.json.

    Raises:
        CheckpointError: the value is none, or is missing without a default.
    """
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise CheckpointError(f"config.json: {name!r} is missing")
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {name} = {value!r} must be a positive whole number")
    return value


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model of the Llama family, or of a draft head made of Llama layers.

    Qwen2 has biases at queries, keys and values only. Qwen3 normalises the queries and keys of each head (`qk_norm`).
    Mistral is a Llama. Baichuan-13B has ALiBi in place of rotary embeddings.

    Attributes:
        windows: tokens that each layer's attention sees, the own one included, 0 for all; empty where all see all.
        alibi_slopes: of each head's ALiBi bias; empty without.
        normalised_head: whether the rows of the output matrix are divided by their length (Baichuan 2).
        kv_cache_dtype: of keys and values in the cache, where the checkpoint asks for 8 bits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    alibi_slopes: tuple[float, ...] = ()
    normalised_head: bool = False
    kv_cache_dtype: str | None = None

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Window of each layer, 0 for none."""
        return self.windows or (0,) * self.num_layers

    def slopes(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the slopes of ALiBi for attention in `dtype`, `[num_heads]`, in float32 at least; None without."""
        if not self.alibi_slopes:
            return None
        return torch.tensor(self.alibi_slopes, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def with_window(self, window: int | None) -> "LlamaConfig":
        """Return the same layers, none of which sees more than `window` tokens; None for no such limit."""
        if window is None:
            return self
        return replace(self, windows=tuple(min(own or window, window) for own in self.layer_windows))

    def has_bias(self, module: str) -> bool:
        """Return whether a linear layer has a bias, by its name in a checkpoint."""
        last = module.rpartition(".")[2]
        if last in ("q_proj", "k_proj", "v_proj"):
            return self.attention_bias
        return self.output_bias if last == "o_proj" else self.mlp_bias

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read a config.json.

        Raises:
            CheckpointError: a missing number, one that does not fit the others, or a setting that this
                model would not honour (sliding window, quantisation, another activation, ...).
        """
        family = config.get("model_type")
        config = {**DEFAULTS.get(str(family), {}), **config}
        if family == "baichuan" and config.get("max_position_embeddings") is None:
            config["max_position_embeddings"] = config["model_max_length"]
        kv_cache_dtype = kv_cache_dtype_of(config)
        if quantizes_kv_alone(config):
            config["quantization_config"] = None
        for key, allowed in REQUIRED_VALUES.items():
            if config.get(key) not in allowed:
                raise CheckpointError(f"config.json: {key} = {config[key]!r} is not supported")

        def count(name: str, default: int | None = None) -> int:
            value, largest = positive(config, name, default), LARGEST_SIZES.get(name, LARGEST_SIZE)
            if value > largest:
                raise CheckpointError(f"config.json: {name} = {value!r:.100} must be at most {largest}")
            return value

        hidden, heads = count("hidden_size"), count("num_attention_heads")
        kv_heads = count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key-value heads")
        if config.get("head_dim") is None and hidden % heads:
            raise CheckpointError(f"config.json: hidden_size {hidden} is no multiple of {heads} attention heads")
        head_dim = count("head_dim", hidden // heads)
        if heads * head_dim > LARGEST_SIZE:
            raise CheckpointError(f"config.json: {heads} attention heads of head_dim {head_dim} are too many")
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {head_dim} must be even for rotary embeddings")
        epsilon = config.get("rms_norm_eps", 1e-6)
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1e18:
            raise CheckpointError(f"config.json: rms_norm_eps = {epsilon!r} must be a positive number")
        layers, windows = count("num_hidden_layers"), tuple[int, ...]()
        sliding = _sliding_layers(config, layers)
        # For Mistral, use_sliding_window is without effect, as in transformers.
        if config.get("sliding_window") is not None and (
            family == "mistral" or flag(config, "use_sliding_window", True)
        ):
            window = count("sliding_window")
            if family not in SLIDING_FAMILIES:
                raise CheckpointError(f"config.json: sliding_window = {window} is not supported")
            windows = tuple(window if is_sliding else 0 for is_sliding in sliding)
        max_position = count("max_position_embeddings", 2048)
        rope, has_alibi = RopeConfig.from_json(config, max_position), _has_alibi(config, hidden)
        longest = rope.longest_context(config, max_position)
        if longest > LARGEST_SIZES["max_position_embeddings"]:
            raise CheckpointError(f"config.json: YaRN's factor {rope.factor:g} makes {longest} positions, too many")
        if longest > max_position:
            _log_longer(max_position, longest, rope)
        if has_alibi and rope.rope_type != "default":
            raise CheckpointError(f"config.json: rope type {rope.rope_type!r} is not supported beside ALiBi")
        tied, vocab_size = flag(config, "tie_word_embeddings"), count("vocab_size")
        normalised = family == "baichuan" and vocab_size == BAICHUAN_2_VOCAB
        if normalised and tied:
            raise CheckpointError("config.json: tie_word_embeddings is not supported with a normalised head")
        # Where a family's own model has no biases, their settings are without effect.
        bias = flag(config, "attention_bias") and family not in ("mistral", "qwen2", "baichuan")
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=count("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=longest,
            rms_norm_eps=float(epsilon),
            rope=WITHOUT_ROTATION if has_alibi else rope,
            tie_word_embeddings=tied,
            attention_bias=bias or family == "qwen2",
            output_bias=bias,
            mlp_bias=flag(config, "mlp_bias") and family not in ("mistral", "qwen2", "qwen3", "baichuan"),
            qk_norm=family == "qwen3",
            windows=windows if any(windows) else (),
            alibi_slopes=alibi_slopes(heads) if has_alibi else (),
            normalised_head=normalised,
            kv_cache_dtype=kv_cache_dtype,
        )


@cache
def _log_longer(max_position: int, longest: int, rope: RopeConfig) -> None:
    """Log once that a model has more positions than its config.json says, which is read several times."""
    logger.info(
        f"{longest} positions by YaRN's factor {rope.factor:g} of {rope.original_max_position}, instead of "
        f"max_position_embeddings {max_position}"
    )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi: by how much a head's scores fall with every position that a key lies farther back.

    Attention with linear biases: Press et al. 2021, 2108.12409.

    Of n heads, a power of two, head i from 1 on has 2^(-8 i / n). Other numbers take those of the next lower power of
    two, and behind them every other one of twice as many heads, as the authors' code does.

    Args:
        heads: of the whole layer; a rank's are a part of theirs.
    """
    power = 1 << (heads.bit_length() - 1)
    return tuple(2 ** (-8 * i / power) for i in range(1, power + 1)) + tuple(
        2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)
    )


def _has_alibi(config: Mapping[str, Any], hidden: int) -> bool:
    """Return whether a config.json is of a Baichuan with ALiBi."""
    is_rotary = hidden == ROTARY_BAICHUAN_HIDDEN or ROTARY_BAICHUAN in str(config.get("architectures"))
    return config.get("model_type") == "baichuan" and not is_rotary


def _sliding_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Return which layers have the sliding window, if there is one, as transformers reads the settings.

    Those have it that `layer_types` names. Without that list, all layers of Mistral have it, and those of Qwen from
    `max_window_layers` on.

    Raises:
        CheckpointError: `layer_types` that are unknown, or not as many as layers.
    """
    kinds, family = items(config, "layer_types"), config.get("model_type")
    known = ("full_attention", "sliding_attention") if family in SLIDING_FAMILIES else ("full_attention",)
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise CheckpointError(f"config.json: layer_types {unknown[:1]!r:.100} are not supported")
    if family == "mistral" and not kinds:
        return [True] * layers
    if not kinds:
        first = config.get("max_window_layers")
        if first is not None and (type(first) is not int or first < 0):
            raise CheckpointError(f"config.json: max_window_layers = {first!r:.100} must be a whole number of layers")
        return [layer >= (MAX_WINDOW_LAYERS if first is None else first) for layer in range(layers)]
    if "sliding_attention" in kinds and len(kinds) != layers:
        raise CheckpointError(f"config.json: {len(kinds)} layer_types for {layers} layers")
    return [kind == "sliding_attention" for kind in kinds]
