"""Weights of quantised checkpoint folders as they are stored: FP8, AWQ, GPTQ, and packed integers."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.quantized_tensor import NumberKind, QuantizedRows, QuantizedTensor, scales_of_rows
from specdec.models.quantization_config import ALL_INPUTS, QuantizationConfig

WORD = 32
# Outputs of AWQ's eight numbers of a word, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# What is said about activations, which are not quantised here.
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "input_global_scale")


def quantized_tensors(
    tensors: Mapping[str, Tensor], config: QuantizationConfig, dtype: torch.dtype, has_bias: Callable[[str], bool]
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with its quantised weights under the names of plain ones.

    Args:
        has_bias: whether the model's layer of a name has a bias.
        dtype: of the arithmetic.

    Raises:
        CheckpointError: a weight without its scales, or whose tensors do not fit together.
    """
    found = dict(tensors)
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind not in _QUANTIZED[config.method]:
            continue
        own = {key: found.pop(f"{module}.{key}") for key in _PARTS if f"{module}.{key}" in found}
        weight = own.get("weight")
        if kind == "weight" and weight is not None and weight.dtype not in (torch.float8_e4m3fn, torch.int8):
            found |= {f"{module}.{key}": tensor for key, tensor in own.items()}
            continue
        try:
            rows = _packed(own, config) if kind in ("qweight", "weight_packed") else _plain(own, config)
        except ValueError as error:
            raise CheckpointError(f"{module}: {error}") from None
        found[f"{module}.weight"] = QuantizedTensor(rows, dtype)
        bias = found.get(f"{module}.bias")
        if config.method == "gptq" and bias is not None and not has_bias(module) and not bias.any():
            # Some of GPTQ's writers give layers a bias of zeros.
            del found[f"{module}.bias"]
    return found


_QUANTIZED: dict[str, tuple[str, ...]] = {
    "fp8": ("weight",),
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "compressed-tensors": ("weight", "weight_packed"),
}
_PARTS = (
    "weight",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_packed",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    *ACTIVATIONS,
)


def _part(own: Mapping[str, Tensor], *names: str) -> Tensor:
    """Return the first of a weight's tensors that is there."""
    found = next((own[name] for name in names if name in own), None)
    if found is None:
        raise CheckpointError(f"it has no {' or '.join(names)} beside {', '.join(own)}")
    return found


def _plain(own: Mapping[str, Tensor], config: QuantizationConfig) -> QuantizedRows:
    """Read numbers with one element each, `[outputs, inputs]`, and their scales."""
    weight, scale = own["weight"], _part(own, "weight_scale", "weight_scale_inv")
    if weight.ndim != 2 or not scale.dtype.is_floating_point:
        raise CheckpointError(f"its weight {list(weight.shape)} has a scale of {scale.dtype}")
    outputs, inputs = weight.shape
    scales, group = scales_of_rows(scale, outputs, inputs, config.block)
    zeros = own.get("weight_zero_point")
    if zeros is not None and zeros.any():
        zeros, _ = scales_of_rows(zeros.to(torch.int8), outputs, inputs, config.block)
    else:
        zeros = None
    kind: NumberKind = "fp8" if weight.dtype == torch.float8_e4m3fn else "int8"
    return QuantizedRows(kind, inputs, weight, group, scales, zeros)


def _packed(own: Mapping[str, Tensor], config: QuantizationConfig) -> QuantizedRows:
    """Read numbers that share words of 32 bits."""
    if config.method == "compressed-tensors":
        return _packed_by_rows(own)
    words, scales, zeros = own["qweight"], _part(own, "scales"), _part(own, "qzeros")
    per_word = WORD // config.bits
    if config.method == "awq":
        numbers = _unpacked(words, config.bits, 1)
        order = torch.tensor(AWQ_ORDER).argsort()
        numbers, zero = (_ordered(each, order) for each in (numbers, _unpacked(zeros, config.bits, 1)))
    else:
        numbers, zero = _unpacked(words, config.bits, 0), _unpacked(zeros, config.bits, 1)
    inputs, outputs = numbers.shape
    group = inputs if config.group_size == ALL_INPUTS else config.group_size
    groups = ceil_div(inputs, group)
    if scales.shape != (groups, outputs) or zero.shape != (groups, ceil_div(outputs, per_word) * per_word):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in own.items())
        raise CheckpointError(f"its tensors do not fit groups of {group}: {shapes}")
    places = own.get("g_idx")
    if places is not None and not torch.equal(places.long(), torch.arange(inputs) // group):
        raise CheckpointError(
            "its inputs are grouped in another order than their own (desc_act), which is not supported"
        )
    zero = zero[:, :outputs].int()
    # GPTQModel has written the second format by the name of the first.
    is_second = config.symmetric and bool((zero == 1 << config.bits - 1).all())
    zero += config.zeros_less_one and not is_second
    return _integers(numbers.T, zero.T, group, scales.T.contiguous(), config.bits)


def _ordered(numbers: Tensor, order: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, len(order))[:, :, order].flatten(1)


def _packed_by_rows(own: Mapping[str, Tensor]) -> QuantizedRows:
    """Read compressed-tensors' words, each of which holds consecutive inputs of a row."""
    words, scale, shape = own["weight_packed"], _part(own, "weight_scale"), _part(own, "weight_shape")
    if "weight_g_idx" in own:
        raise CheckpointError(
            "its inputs are grouped in another order than their own (actorder), which is not supported"
        )
    outputs, inputs = shape.tolist()
    bits = next((bits for bits in (4, 8) if words.shape == (outputs, ceil_div(inputs * bits, WORD))), None)
    if bits is None:
        raise CheckpointError(f"words {list(words.shape)} do not hold a weight of shape {[outputs, inputs]}")
    scales, group = scales_of_rows(scale, outputs, inputs, None)
    middle = 1 << bits - 1
    zeros = torch.full(scales.shape, middle)
    if "weight_zero_point" in own:
        zeros = _unpacked(own["weight_zero_point"], bits, 0)[:outputs]
    if zeros.shape != scales.shape:
        raise CheckpointError(f"zeros of shape {list(zeros.shape)} do not fit scales of shape {list(scales.shape)}")
    return _integers(_unpacked(words, bits, 1)[:, :inputs], zeros, group, scales.contiguous(), bits)


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers of int32 words `[…]`, from the lowest bits on, along a dimension; uint8."""
    if words.dtype != torch.int32 or words.ndim != 2:
        raise CheckpointError(
            f"packed numbers are {words.dtype} of shape {list(words.shape)}; they must be int32 matrices"
        )
    mask = (1 << bits) - 1
    parts = [(words >> shift & mask).to(torch.uint8) for shift in range(0, WORD, bits)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _integers(numbers: Tensor, zeros: Tensor, group: int, scales: Tensor, bits: int) -> QuantizedRows:
    """Return the weight `scale * (number - zero)`.

    Args:
        numbers: unsigned, uint8 `[outputs, inputs]`.
        zeros: unsigned, `[outputs, groups]`.
    """
    inputs = numbers.shape[1]
    if bits == 4:
        even = torch.nn.functional.pad(numbers, (0, inputs % 2))
        return QuantizedRows("uint4", inputs, even[:, ::2] | even[:, 1::2] << 4, group, scales, zeros.to(torch.int8))
    signed = (numbers ^ 128).view(torch.int8)
    middles = zeros.int() - 128
    if not middles.any():
        return QuantizedRows("int8", inputs, signed, group, scales)
    # 256 is no zero of 8 bits, but it is a minimum.
    return QuantizedRows("int8", inputs, signed, group, scales.float(), -scales.float() * middles, "minima")
