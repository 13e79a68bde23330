"""Heads whose matrices are stored in 8-bit floats with scales, as Model-Optimizer and compressed-tensors export them.

They are dequantised when the folder is read: a head is small beside its target, and its products are those of others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, section
from specdec.kernels.types.quantized_tensor import QuantizedRows, scales_of_rows

FP8 = torch.float8_e4m3fn
SCALES = ("weight_scale", "weight_scale_inv")
# About activations, which are not quantised here.
_ACTIVATIONS = ("input_scale", "output_scale")
_KEY = "quantization_config"
# Model-Optimizer's names: one scale for a weight, one for each output, one for each block.
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


def is_fp8(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that all quantised weights are 8-bit floats."""
    given = section(settings, _KEY)
    match given.get("quant_method"):
        case "fp8":
            return given.get("fmt") in (None, "e4m3")
        case "modelopt":
            return given.get("quant_algo") in _MODELOPT
        case "compressed-tensors":
            return all((one.get("type"), one.get("num_bits")) == ("float", 8) for one in _weights(given))
    return False


def _weights(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what compressed-tensors' groups say about weights."""
    groups = section(given, "config_groups")
    return [section(section(groups, name), "weights") for name in groups]


def plain_weights(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with 8-bit floats as the float32 numbers that they stand for; others as they are.

    Raises:
        CheckpointError: scales whose shape does not fit their weight, or blocks that are none.
    """
    found, block = dict(tensors), _block(section(settings, _KEY))
    for name, weight in tensors.items():
        module = name.removesuffix("weight")
        scale = next((tensors[module + each] for each in SCALES if module + each in tensors), None)
        if weight.dtype != FP8 or module == name or scale is None:
            continue
        for each in (*SCALES, *_ACTIVATIONS):
            found.pop(module + each, None)
        try:
            outputs, inputs = weight.shape
            scales, group = scales_of_rows(scale.float(), outputs, inputs, block)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
        found[name] = QuantizedRows("fp8", inputs, weight, group, scales).dequantized()
    return found


def _block(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and inputs that share a scale; where config.json does not say, those of DeepSeek.

    Raises:
        CheckpointError: config.json says anything else.
    """
    groups = [one.get("block_structure") for one in _weights(given)]
    block = next(filter(None, (given.get("weight_block_size"), *groups)), (128, 128))
    match block:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    raise CheckpointError(f"config.json: blocks of scales are {block!r:.60}; they must be [rows, inputs]")
