"""Heads whose matrices are stored in 8-bit floats with scales, as Model-Optimizer and compressed-tensors export them.

They are dequantised when the folder is read: a head is small beside its target, and its products are those of others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.formats.head_settings import section
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.kernels.types.integers import ceil_div

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
            weights = [section(group, "weights") for group in section(given, "config_groups").values()]
            return all((one.get("type"), one.get("num_bits")) == ("float", 8) for one in weights)
    return False


def plain_weights(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with 8-bit floats as the float32 numbers that they stand for; others as they are.

    Raises:
        CheckpointError: scales whose shape does not fit their weight.
    """
    found = dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix("weight")
        scale = next((tensors[module + each] for each in SCALES if module + each in tensors), None)
        if weight.dtype != FP8 or module == name or scale is None:
            continue
        for each in (*SCALES, *_ACTIVATIONS):
            found.pop(module + each, None)
        try:
            found[name] = weight.float() * _spread(scale.float(), weight, section(settings, _KEY))
        except ValueError:
            raise CheckpointError(
                f"{name} of shape {list(weight.shape)} has scales of shape {list(scale.shape)}, which do not fit it"
            ) from None
    return found


def _spread(scale: Tensor, weight: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Return scales that can be multiplied with a matrix `[outputs, inputs]`.

    Raises:
        ValueError: scales of another shape.
    """
    outputs, inputs = weight.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape in ((outputs,), (outputs, 1)):
        return scale.reshape(outputs, 1)
    rows, columns = _block(given)
    blocks = (ceil_div(outputs, rows), ceil_div(inputs, columns))
    # Model-Optimizer's have dimensions of one between.
    if [count for count in scale.shape if count > 1] != [count for count in blocks if count > 1]:
        raise ValueError
    spread = scale.reshape(blocks).repeat_interleave(rows, 0)[:outputs]
    return spread.repeat_interleave(columns, 1)[:, :inputs]


def _block(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and inputs that share a scale; where config.json does not say, those of DeepSeek.

    Raises:
        ValueError: config.json says anything else.
    """
    groups = [section(group, "weights").get("block_structure") for group in section(given, "config_groups").values()]
    block = next(filter(None, (given.get("weight_block_size"), *groups)), (128, 128))
    match block:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    raise ValueError
