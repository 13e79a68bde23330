"""Reading a Hugging Face checkpoint folder: config.json and its tensors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class CheckpointError(ValueError):
    """A folder that cannot be loaded as it stands; the message is one line that names what is wrong."""


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Put the folder in front of a `CheckpointError` about a part of it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        CheckpointError: no such folder, no config.json in it, or one that is no JSON object.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder}: not a checkpoint: it holds no config.json")
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object on disk.

    Raises:
        CheckpointError: it is none.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, from `*.safetensors` or else from `pytorch_model*.bin`.

    Raises:
        CheckpointError: no weights, a shard of the index that is missing, or an unreadable file.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _shards(index)]
    if not files:
        files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(f"{folder}: no weights: neither *.safetensors nor pytorch_model*.bin")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder}: {file.name} is named in {index.name} but missing")
        try:
            if file.suffix == ".safetensors":
                part = load_file(file)
            else:
                part = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{file}: cannot be read: {reason}") from None
        tensors.update(part)
    return tensors


def fuse(tensors: dict[str, Tensor], fused: str, parts: list[str]) -> None:
    """Replace the tensors named by `parts` by their concatenation `fused`, where any of them is present.

    Raises:
        CheckpointError: some parts are present and others are not, or their shapes do not go together.
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
        raise CheckpointError(f"tensors of shapes that do not go together: {shapes}")
    tensors[fused] = torch.cat(values)


def load_strictly(module: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy `tensors` into `module`'s parameters; every one must be there, fit, and be used.

    Raises:
        CheckpointError: names what is missing, unexpected, or of another shape.
    """
    expected = dict(module.named_parameters())
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected))
    problems = [f"missing tensors: {_names(missing)}"] if missing else []
    problems += [f"unexpected tensors: {_names(unexpected)}"] if unexpected else []
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, config.json says {list(parameter.shape)}"
        for name, parameter in expected.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: not a JSON object with a 'weight_map'") from None


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
