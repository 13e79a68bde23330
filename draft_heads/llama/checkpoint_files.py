"""Reading of Hugging Face checkpoint folders: config.json, and checks of the tensors against it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.draft_heads.llama.unreadable_files import missing_path
from specdec.kernels.types.quantized_tensor import QuantizedTensor

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(ValueError):
    """Error of a folder that cannot be loaded; its message is one line that names what is wrong."""


@contextmanager
def error_context(folder: Path) -> Iterator[None]:
    """Put the folder in front of a `CheckpointError` about a part of it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json.

    Raises:
        CheckpointError: there is no such folder, no config.json in it, or it is not a JSON object.
    """
    if not folder.is_dir():
        raise CheckpointError(missing_path(folder))
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder}: not a checkpoint: it holds no config.json{_instead(folder)}")
    return read_object(file)


def _instead(folder: Path) -> str:
    """Return what a folder without config.json holds that can be given; empty if there is nothing."""
    found = sorted([*folder.glob("*.gguf"), *(file.parent for file in folder.glob("*/config.json"))])
    return f"; give {listed([str(path) for path in found])}" if found else ""


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file holds anything else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values


def items(settings: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list of a config.json, empty if it is absent.

    Raises:
        CheckpointError: the value is no list.
    """
    value = settings.get(key) or []
    if not isinstance(value, list):
        raise CheckpointError(f"config.json: {key} = {value!r:.100} must be a list")
    return value


def section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested part of a config.json, empty if it is absent.

    Raises:
        CheckpointError: the part is no object.
    """
    value = settings.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} = {value!r} must be an object")
    return value


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a switch of a config.json.

    Raises:
        CheckpointError: the value is neither true, false nor null.
    """
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} = {value!r:.100} must be true or false")
    return default if value is None else value


def check_weight_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Check that all tensors are plain floating-point numbers.

    Raises:
        CheckpointError: one is an integer or an 8-bit number, whose scale is elsewhere.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name} is stored as {dtype}; weights must be float64, float32, bfloat16 or float16: "
                "use a checkpoint that is not quantised"
            )


def check_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Check that weights are finite once they are numbers of `dtype`. Each is read once.

    Raises:
        CheckpointError: one holds NaN, an infinity, or a number beyond the range of `dtype`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES or not tensor.numel():
            continue
        # Both are NaN if any number is.
        for extreme in torch.aminmax(tensor):
            if not extreme.to(dtype).isfinite():
                kind = str(dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{name} holds {extreme.item():g}; weights must be finite numbers of {kind}: "
                    "train it anew, or take an earlier checkpoint"
                )


def fuse(tensors: dict[str, Tensor], fused: str, parts: list[str]) -> None:
    """Replace the tensors named by `parts` by their concatenation `fused`, where any of them is present.

    Raises:
        CheckpointError: some parts are present and others are missing, or their shapes do not fit together.
    """
    missing = [name for name in parts if name not in tensors]
    if len(missing) == len(parts):
        return
    if missing:
        raise CheckpointError(f"missing tensor {missing[0]!r}, though others of {', '.join(parts)} are there")
    values = [tensors.pop(name) for name in parts]
    # Of query, key and value only the query may have another number of rows; gate and up are alike.
    if values[-2].shape != values[-1].shape or values[0].shape[1:] != values[-1].shape[1:]:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in zip(parts, values, strict=True))
        raise CheckpointError(f"shapes do not fit together: {shapes}")
    tensors[fused] = torch.cat(values)


def check_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> None:
    """Check that exactly the tensors of these names are there, each in its shape.

    Raises:
        CheckpointError: names what is missing, unexpected, or of another shape.
    """
    missing, unexpected = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    misshapen = []
    for name, shape in expected.items():
        if name in tensors and (found := list(tensors[name].shape)) != list(shape):
            hint = ": it is transposed" if found == list(shape)[::-1] else ""
            misshapen.append(f"{name} has shape {found}, config.json says {list(shape)}{hint}")
    problems = [f"missing tensors: {listed(missing)}"] if missing else []
    problems += [f"unexpected tensors: {listed(unexpected)}"] if unexpected else []
    problems += [listed(misshapen)] if misshapen else []
    if problems:
        raise CheckpointError("; ".join(problems))


def place(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Give a module copies of its weights that are on the meta device, and memory to its buffers there.

    Quantised weights stay as they are. torch's own `to_empty` imports its compiler for this, which takes a second.
    """
    for name in [name for name, weight in module.named_parameters() if weight.is_meta]:
        weight = tensors[name]
        if isinstance(weight, QuantizedTensor):
            own = weight.to(device)
        else:
            own = weight.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
        lend(module, {name: own})
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_meta:
                kept = dtype if buffer.is_floating_point() else buffer.dtype
                setattr(part, name, torch.empty(buffer.shape, dtype=kept, device=device))


def lend(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make tensors parameters of a module, by their names there, without a copy."""
    for name, tensor in tensors.items():
        part, _, own = name.rpartition(".")
        setattr(module.get_submodule(part), own, nn.Parameter(tensor.detach(), requires_grad=False))


def listed(names: list[str]) -> str:
    """Return the first five names, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
