"""Tiny random models as GGUF files, as llama.cpp's converter writes them."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.quantized_rows import gguf_blocks

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Rows are multiples of the blocks of Q8_0.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def random_model(architecture: str, **overrides: Any) -> PreTrainedModel:
    """Return a float64 model with random norms and biases."""
    torch.manual_seed(0)
    config = CONFIGS[architecture](**{"vocab_size": len(TOKENS), **SIZES, **overrides})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    name: str | None = None,
    facts: dict[str, Any] | None = None,
    tensors_a_file: int = 0,
    sampling: dict[str, Any] | None = None,
) -> Path:
    """Write a model with a byte-level tokenizer; rows of its output matrix beyond `TOKENS` are padding.

    Args:
        kind: of the matrices, all or by name; vectors are F32.
        name: of the architecture, None for the model's own.
        facts: further numbers and strings by their keys behind the architecture's.
        tensors_a_file: splits the model into files of so many, NAME-00001-of-…; 0 for one file.
        sampling: default sampling parameters by their keys behind `general.sampling`.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(file, name or architecture, split_max_tensors=tensors_a_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or SIZES["head_dim"]
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in (facts or {}).items():
        adders[type(value)](f"{name or architecture}.{key}", value)
    for key, value in (sampling or {}).items():
        (adders | {int: writer.add_int32})[type(value)](f"general.sampling.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    padding = [f"[PAD{token}]" for token in range(len(TOKENS), config.vocab_size)]
    types = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in TOKENS]
    writer.add_token_list(TOKENS + padding)
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(own.split(".")[-2])
        numbers = tensor.float()
        if architecture == "llama" and heads:
            numbers = numbers.view(heads, 2, -1, *numbers.shape[1:]).transpose(1, 2).reshape(numbers.shape)
        stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
        own_kind = kind if isinstance(kind, Kind) else kind(own)
        add(writer, stored, numbers.numpy(), own_kind if tensor.ndim == 2 else Kind.F32)
    if config.rope_parameters["rope_type"] == "llama3":
        add(writer, "rope_freqs.weight", llama3_factors(model), Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: gguf.GGUFWriter, name: str | None, numbers: np.ndarray[Any, Any], kind: Kind) -> None:
    assert name is not None
    if kind in (Kind.Q4_K, Kind.Q6_K):
        # The package cannot write these: random blocks of numbers of the same size.
        blocks = gguf_blocks(kind.name, *numbers.shape, size=float(numbers.std()), seed=zlib.crc32(name.encode()))
        writer.add_tensor(name, blocks, raw_dtype=kind)
    elif kind == Kind.Q8_1:
        # The package cannot write it, nor read it: blocks of 32 numbers in 40 bytes.
        blocks = np.zeros((numbers.shape[0], numbers.shape[1] // 32 * 40), np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def llama3_factors(model: PreTrainedModel) -> np.ndarray[Any, Any]:
    """Return what the model divides the plain frequencies by."""
    size, theta = SIZES["head_dim"], model.config.rope_parameters["rope_theta"]
    plain = 1.0 / (theta ** (torch.arange(0, size, 2).float() / size))
    return np.asarray((plain / model.model.rotary_emb.inv_freq).float())
