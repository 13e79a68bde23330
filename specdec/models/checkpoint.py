"""A model on disk in either form, a checkpoint folder or a GGUF file: its settings, weights and end tokens."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config
from specdec.draft_heads.llama.kv_scheme import is_attention_scale, is_kv_scale
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.weight_files import read_tensors
from specdec.gguf.file import GgufFile, is_gguf
from specdec.models.quantization_config import QuantizationConfig, with_plain_weights
from specdec.models.quantized_weights import quantized_tensors

# Queries, keys and values of a layer in one matrix.
PACKED = ".W_pack.weight"


def read_settings(path: Path) -> dict[str, Any]:
    """Return a model's config.json, or the same from its GGUF file.

    Raises:
        CheckpointError: no such checkpoint, or one that cannot be read.
    """
    return GgufFile.open(path).settings() if is_gguf(path) else read_config(path)


def read_weights(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's tensors by their names in a checkpoint folder, without their `model.`.

    Args:
        dtype: of quantised weights, and of plain tensors that a GGUF file holds; those of a folder stay as they are.

    Raises:
        CheckpointError: no weights, or some that cannot be read.
    """
    if is_gguf(path):
        return GgufFile.open(path).weights(dtype)
    found = read_tensors(path)
    tensors = {name.removeprefix("model."): found[name] for name in found if not is_attention_scale(name)}
    with error_context(path):
        settings = read_config(path)
        quantization = QuantizationConfig.from_json(settings)
        if quantization is None:
            return _unpacked(tensors)
        config = LlamaConfig.from_json(with_plain_weights(settings))
        scales = {name: tensor for name, tensor in tensors.items() if is_kv_scale(name)}
        weights = {name: tensor for name, tensor in tensors.items() if name not in scales}
        return _unpacked(quantized_tensors(weights, quantization, dtype, config.has_bias)) | scales


def _unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with Baichuan's `W_pack` as the three matrices that it holds, without a copy.

    So tensor-parallel plans name these, and each rank takes its heads of every one.

    Raises:
        CheckpointError: a matrix whose rows are no three equal parts.
    """
    for name in [name for name in tensors if name.endswith(PACKED)]:
        packed, prefix = tensors.pop(name), name.removesuffix(PACKED)
        size, rest = divmod(packed.shape[0], 3)
        if rest:
            raise CheckpointError(f"{name} has {packed.shape[0]} rows; they must be those of queries, keys and values")
        for place, part in enumerate("qkv"):
            tensors[f"{prefix}.{part}_proj.weight"] = packed.narrow(0, place * size, size)
    return tensors


def has_tokenizer(path: Path) -> bool:
    """Return whether a model has a tokenizer; a GGUF file always has one."""
    return is_gguf(path) or (path / "tokenizer.json").is_file()


def check_tokenizer(path: Path) -> None:
    """Check that a model has a tokenizer.

    Raises:
        CheckpointError: it has none.
    """
    if not has_tokenizer(path):
        raise CheckpointError(f"{path}: no tokenizer.json; give prompts as token ids, or add the tokenizer")
