"""Tiny checkpoints in the formats of quantised models, written by loops of their own, and the weights that they say."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
# The second ends within the weights' rows.
BLOCK, ODD_BLOCK = (16, 16), (24, 16)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Stored(NamedTuple):
    """A quantised weight: its tensors by their names behind the module's, and what they stand for, float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


class Format(NamedTuple):
    """A format: how a weight is stored, and the `quantization_config` of such a checkpoint."""

    store: Callable[[Tensor], Stored]
    config: dict[str, Any]


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unsigned numbers `[outputs, inputs]`, zeros and float16 scales `[outputs, groups]`, and the weight."""
    outputs, inputs = weight.shape
    parts, largest = weight.float().view(outputs, -1, group), (1 << bits) - 1
    if symmetric:
        zeros = torch.full((outputs, inputs // group), 1 << bits - 1)
        scales = (parts.abs().amax(-1) / (1 << bits - 1)).half()
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scales = ((high - low) / largest).half()
        zeros = (-low / scales.float()).round().clamp(1, largest).long()
    numbers = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, largest).long()
    values = (numbers - zeros[..., None]) * scales.float()[..., None]
    return numbers.view(outputs, inputs), zeros, scales, values.view(outputs, inputs)


def words(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers `[rows, many]` packed in int32 `[rows, fewer]`, from the lowest bits on."""
    count = 32 // bits
    packed = torch.zeros(len(numbers), -(-numbers.shape[1] // count), dtype=torch.int64)
    for place in range(numbers.shape[1]):
        packed[:, place // count] |= numbers[:, place] << bits * (place % count)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def awq(weight: Tensor) -> Stored:
    numbers, zeros, scales, values = rounded(weight, 4, GROUP, False)

    def ordered(each: Tensor) -> Tensor:
        columns = [8 * (place // 8) + AWQ_ORDER[place % 8] for place in range(each.shape[1])]
        return words(each[:, columns], 4)

    tensors = {"qweight": ordered(numbers.T), "qzeros": ordered(zeros.T), "scales": scales.T.contiguous()}
    return Stored(tensors, values)


def gptq(bits: int, group: int | None, less_one: bool, symmetric: bool = False) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        own = group or weight.shape[1]
        numbers, zeros, scales, values = rounded(weight, bits, own, symmetric)
        return Stored(
            {
                "qweight": words(numbers, bits).T.contiguous(),
                "qzeros": words(zeros.T - int(less_one), bits),
                "scales": scales.T.contiguous(),
                "g_idx": (torch.arange(weight.shape[1]) // own).to(torch.int32),
            },
            values,
        )

    return store


def packed_by_rows(bits: int, group: int | None, symmetric: bool) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        own = group or weight.shape[1]
        numbers, zeros, scales, values = rounded(weight, bits, own, symmetric)
        tensors = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return Stored(tensors, values)

    return store


def whole_bytes(weight: Tensor) -> Stored:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight.float() / scales.float()).round().clamp(-127, 127)
    return Stored({"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float())


def floats(block: tuple[int, int] | None, dtype: torch.dtype, name: str) -> Callable[[Tensor], Stored]:
    """Return a writer of 8-bit floats with a scale for each block of rows and inputs; None for one scale."""

    def store(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        rows, columns = block or (outputs, inputs)
        columns = min(columns, inputs)
        scales = torch.zeros(-(-outputs // rows), -(-inputs // columns), dtype=dtype)
        numbers, values = weight.float().to(torch.float8_e4m3fn), torch.zeros(outputs, inputs)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                own = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[own].abs().max() / 448
                quantized = (weight[own].float() / scales[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
                numbers[own] = quantized
                values[own] = quantized.float() * scales[i, j].float()
        own_scales = scales.reshape(()) if block is None else scales
        return Stored({"weight": numbers, name: own_scales}, values)

    return store


def with_input_scale(store: Callable[[Tensor], Stored]) -> Callable[[Tensor], Stored]:
    def stored(weight: Tensor) -> Stored:
        tensors, values = store(weight)
        return Stored({**tensors, "input_scale": torch.tensor(0.5)}, values)

    return stored


def compressed(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def of(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "dynamic": False, "symmetric": True, **more}


GPTQ = {"quant_method": "gptq", "sym": False, "desc_act": False, "group_size": GROUP, "bits": 4}
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
CHANNEL = (1, 1 << 30)
DYNAMIC = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
FORMATS = {
    "fp8": Format(
        with_input_scale(floats(None, torch.float32, "weight_scale")),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8-blocks": Format(
        floats(BLOCK, torch.float32, "weight_scale_inv"), {**FP8_BLOCKS, "weight_block_size": list(BLOCK)}
    ),
    "fp8-odd-blocks": Format(
        floats(ODD_BLOCK, torch.float32, "weight_scale_inv"), {**FP8_BLOCKS, "weight_block_size": list(ODD_BLOCK)}
    ),
    "fp8-channels": Format(
        floats(CHANNEL, torch.bfloat16, "weight_scale"),
        compressed("float-quantized", of("float", 8, "channel"), DYNAMIC),
    ),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": Format(gptq(4, GROUP, True), GPTQ),
    "gptq-symmetric": Format(gptq(4, None, True, True), {**GPTQ, "sym": True, "group_size": -1}),
    # The second format by the name of the first.
    "gptq-symmetric-v2": Format(gptq(4, GROUP, False, True), {**GPTQ, "sym": True, "checkpoint_format": "gptq"}),
    "gptq-v2": Format(gptq(4, GROUP, False), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-8": Format(gptq(8, GROUP, True), {**GPTQ, "bits": 8}),
    "packed-4": Format(
        packed_by_rows(4, GROUP, True), compressed("pack-quantized", of("int", 4, "group", group_size=GROUP))
    ),
    "packed-4-zeros": Format(
        packed_by_rows(4, GROUP, False),
        compressed("pack-quantized", of("int", 4, "group", group_size=GROUP) | {"symmetric": False}),
    ),
    "packed-8": Format(packed_by_rows(8, None, True), compressed("pack-quantized", of("int", 8, "channel"))),
    "int8": Format(whole_bytes, compressed("int-quantized", of("int", 8, "channel"))),
}


def quantize_folder(source: Path, target: Path, name: str) -> dict[str, Tensor]:
    """Write a checkpoint with the matrices of its layers in a format, and return all weights that it says, float64."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    store, quantization = FORMATS[name]
    stored, said = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(source / "model.safetensors").items():
        if ".layers." not in key or tensor.ndim != 2:
            stored[key] = said[key] = tensor
            continue
        own, weight = store(tensor)
        stored |= {f"{key.removesuffix('weight')}{part}": each.contiguous() for part, each in own.items()}
        said[key] = weight.double()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    return said
