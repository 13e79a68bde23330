"""Weights of a checkpoint folder: which of its files hold them, and which of their tensors belong to a model."""

import re
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, read_object
from specdec.draft_heads.llama.unreadable_files import damage
from specdec.kernels.types.settings import one_line

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# Other weights that lie beside a model's: Mistral's own layout of them, adapters.
FOREIGN = ("consolidated*", "adapter_*")
# Where there is no index: the first of these names that a folder has, and after these any other file of safetensors.
_SAFETENSORS = (WEIGHTS, "model-*-of-*.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model*.bin")
# What old versions of transformers saved although it follows from config.json.
_BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)|(self_)?(attn|attention)\.masked_bias"
    r"|position_ids)"
)
_CAUSAL_MASK = re.compile(r"(.*\.)?(self_)?(attn|attention)\.bias")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of the folder, from safetensors or else from `pytorch_model*.bin`.

    Buffers that follow from config.json, which old checkpoints hold, are left out. Files are mapped into memory: a
    tensor's numbers are read from the disk when they are first used.

    Raises:
        CheckpointError: there are no weights, a shard that the index names is missing, or a file cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    files, index = _weight_files(folder), folder / INDEX
    named = read_object(index)["weight_map"] if index.is_file() else {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder}: {file.name} is named in {INDEX} but missing")
        found = load_tensors(file)
        # A tensor that two files hold is that of the file which the index names for it.
        tensors |= {name: found[name] for name in found if name not in tensors or folder / named.get(name, "") == file}
    return {name: tensor for name, tensor in tensors.items() if not is_buffer(name, tensor)}


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Load a file of tensors, safetensors or a pickle, mapped into memory.

    Raises:
        CheckpointError: it cannot be read, with the reason.
    """
    try:
        return load_file(file) if file.suffix == ".safetensors" else _load_pickled(file)
    except Exception as error:
        raise CheckpointError(f"{file}: {damage(file, one_line(error))}") from None


def is_buffer(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is no weight: rotary tables, positions or a causal mask."""
    if _CAUSAL_MASK.fullmatch(name):
        # A bias of the layer's own would have one dimension.
        return tensor.dim() == 4 and tensor.shape[:2] == (1, 1) and tensor.shape[2] == tensor.shape[3]
    return _BUFFERS.fullmatch(name) is not None


def has_weights(folder: Path) -> bool:
    """Return whether all files with the folder's tensors are there.

    Raises:
        CheckpointError: the index is not valid.
    """
    files = _found_files(folder)
    return bool(files) and all(file.is_file() for file in files)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the folder's tensors.

    Raises:
        CheckpointError: there are none, or the index is not valid.
    """
    files = _found_files(folder)
    if not files:
        foreign = sorted(file.name for file in folder.glob("*.safetensors"))
        beside = f", and {foreign[0]} is not in Hugging Face's layout" if foreign else ""
        raise CheckpointError(f"{folder}: no weights: neither {WEIGHTS} nor pytorch_model*.bin{beside}")
    return files


def _found_files(folder: Path) -> list[Path]:
    """Return the files with the folder's tensors: those of the index, or else those of the usual names."""
    if (folder / INDEX).is_file():
        named = [folder / name for name in shard_names(folder / INDEX)]
        # Tools that write one file leave the index of the shards that were there before.
        is_stale = (folder / WEIGHTS).is_file() and not any(file.is_file() for file in named)
        return [folder / WEIGHTS] if is_stale else named
    others = [file for file in folder.glob("*.safetensors") if not any(fnmatch(file.name, name) for name in FOREIGN)]
    found = [list(folder.glob(name)) for name in _SAFETENSORS] + [others]
    found += [list(folder.glob(name)) for name in _PICKLES]
    return sorted(next((files for files in found if files), []))


def shard_names(index: Path) -> list[str]:
    """Return the files that an index names, all of them inside its folder.

    Raises:
        CheckpointError: the index is not valid, or names a file elsewhere.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: not a JSON object with a 'weight_map'")
    for name in weight_map.values():
        if not isinstance(name, str) or len(name) > 255 or Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index}: 'weight_map' names {name!r:.100}; it must be a file in the index's folder")
    return sorted(set(weight_map.values()))


def _load_pickled(file: Path) -> dict[str, Tensor]:
    # Torch before 1.6 wrote files that cannot be mapped.
    values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError("not a dictionary of tensors")
    return values
