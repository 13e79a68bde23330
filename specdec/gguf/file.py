"""Models in GGUF files, as llama.cpp writes them: settings and tensors as a checkpoint folder would hold them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context
from specdec.draft_heads.llama.unreadable_files import missing_path
from specdec.gguf.blocks import READERS
from specdec.gguf.container import GgufTensor, read_container
from specdec.gguf.rope import ROPE_FACTORS, check_rotated, rope_scaling
from specdec.gguf.vocabulary import GgufVocabulary
from specdec.kernels.types.extras import lacking
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.kernels.types.threads import in_threads

# llama.cpp stores the rows of a Llama's queries and keys in another order, and the others' as they are.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
# Settings by their names behind the architecture's.
SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
SPECIAL = {"bos": "bos_token_id", "padding": "pad_token_id"}
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
# Types of plain numbers.
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == ".gguf"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its values, and its tensors, which stay on the disk.

    Attributes:
        path: the file; of a model that is split, the first.
        values: its values by their keys.
        tensors: its tensors by their names, those of all parts.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read what a file says; a second call for the same file takes no time.

        Raises:
            CheckpointError: no such file, one that cannot be read, a missing part, or the package `gguf` is missing.
        """
        if not path.is_file():
            raise CheckpointError(missing_path(path, "file"))
        if problem := lacking(f"{path}: a GGUF file", "gguf", {"gguf": "gguf"}):
            raise CheckpointError(problem)
        facts = path.stat()
        return _opened(path, facts.st_mtime_ns, facts.st_size)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a config.json would hold.

        Raises:
            CheckpointError: an architecture or a setting that this engine would not honour.
        """
        architecture = str(self.values.get("general.architecture"))
        if self.values.get(f"{architecture}.expert_count"):
            # llama.cpp has one architecture for both.
            return {"model_type": "mixtral" if architecture == "llama" else architecture}
        if architecture not in ARCHITECTURES:
            # Baichuan is read from folders alone.
            return {"model_type": "baichuan in a GGUF file" if architecture == "baichuan" else architecture}
        own = self._own
        found = {name: own[key] for key, name in SETTINGS.items() if own.get(key) is not None}
        embedding = self.tensors.get("token_embd.weight")
        found |= {
            "model_type": architecture,
            "architectures": [f"{architecture.capitalize()}ForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": 0 if embedding is None else embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self.tensors,
            "eos_token_id": sorted(self.vocabulary.ends),
        }
        found |= {name: token for key, name in SPECIAL.items() if (token := self.vocabulary.id(key)) is not None}
        factors = self.tensors.get(ROPE_FACTORS)
        with error_context(self.path):
            heads = found.get("num_attention_heads") or 1
            check_rotated(own, found.get("head_dim") or found.get("hidden_size", 0) // heads)
            divisors = None if factors is None else self._plain(ROPE_FACTORS, factors, torch.float32).flatten()
            scaling = rope_scaling(own, divisors)
        return found | ({"rope_scaling": scaling} if scaling else {})

    @cached_property
    def _own(self) -> dict[str, Any]:
        """Values of the model by their keys behind the architecture's name.

        Raises:
            CheckpointError: a setting that differs between layers.
        """
        prefix = f"{self.values.get('general.architecture')}."
        own = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        own = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in own.items()}
        for key in SETTINGS:
            # One number for each layer, as converters of mixed models write for all models.
            match own.get(key):
                case [first, *others] if all(other == first for other in others):
                    own[key] = first
                case [*several]:
                    problem = f"{prefix}{key} is {several!r:.60}; layers of different sizes are not supported"
                    raise CheckpointError(f"{self.path}: {problem}")
        return own

    @cached_property
    def vocabulary(self) -> GgufVocabulary:
        """The tokens of the file, and how texts become them.

        Raises:
            CheckpointError: see `GgufVocabulary.read`.
        """
        with error_context(self.path):
            return GgufVocabulary.read(self.values)

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors by the names of a checkpoint folder without their `model.`, matrices as they are stored.

        Args:
            dtype: of the arithmetic, and of plain tensors. Formats that are not computed as they are stored are
                dequantised.

        Raises:
            CheckpointError: a quantisation that the package `gguf` cannot read, by its name.
        """
        names = [name for name in self.tensors if name != ROPE_FACTORS]
        weights = in_threads(lambda name: self._weight(name, dtype), names)
        return {_checkpoint_name(name): weight for name, weight in zip(names, weights, strict=True)}

    def _weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor as a checkpoint folder has it.

        Raises:
            CheckpointError: see `weights`.
        """
        tensor = self._ordered(name, self.tensors[name])
        if tensor.kind in READERS and len(tensor.shape) == 2:
            return QuantizedTensor(READERS[tensor.kind](tensor.row_bytes()), dtype)
        return self._plain(name, tensor, dtype)

    def _ordered(self, name: str, tensor: GgufTensor) -> GgufTensor:
        """Return a tensor with its rows in the order of a checkpoint folder.

        Raises:
            CheckpointError: queries or keys whose rows the heads cannot share.
        """
        part = name.rpartition(".")[0].rpartition(".")[2]
        key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part)
        if key is None or not ARCHITECTURES.get(str(self.values.get("general.architecture")), False):
            return tensor
        count, rows = self._own.get(f"attention.{key}", self._own["attention.head_count"]), tensor.shape[0]
        if rows % (2 * count):
            raise CheckpointError(f"{self.path}: {name} has {rows} rows, which {count} heads cannot share")
        order = torch.arange(rows).view(count, -1, 2).transpose(1, 2).flatten()
        return replace(tensor, data=tensor.data.view(rows, -1)[order].flatten())

    def _plain(self, name: str, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in plain numbers, which are its own.

        Raises:
            CheckpointError: see `weights`.
        """
        if tensor.kind in PLAIN:
            return tensor.data.view(PLAIN[tensor.kind]).view(tensor.shape).to(dtype, copy=True)
        from gguf import GGMLQuantizationType, dequantize

        try:
            numbers = dequantize(tensor.row_bytes().numpy(), GGMLQuantizationType[tensor.kind])
            return torch.from_numpy(numbers).view(tensor.shape).to(dtype, copy=True)
        except (NotImplementedError, ValueError):
            raise CheckpointError(
                f"{self.path}: {name} is quantised as {tensor.kind}, which cannot be read; take the model in another "
                "quantisation, such as Q8_0 or Q4_K_M"
            ) from None


@lru_cache(maxsize=1)
def _opened(path: Path, changed: int, size: int) -> GgufFile:  # noqa: ARG001
    """Read a file. The last one is kept: its settings, tokenizer and weights are asked for one after another."""
    values, tensors = read_container(path)
    for part in _later_parts(path, values):
        tensors |= read_container(part)[1]
    return GgufFile(path, values, tensors)


def _later_parts(path: Path, values: Mapping[str, Any]) -> list[Path]:
    """Return the other files of a model that is split: they lie beside the first, which alone has the keys.

    Raises:
        CheckpointError: the file is not the first, or another is missing.
    """
    count = values.get("split.count", 1)
    if type(count) is not int or count < 2:
        return []
    ending = f"-00001-of-{count:05}.gguf"
    if values.get("split.no") != 0 or not path.name.endswith(ending):
        raise CheckpointError(f"{path}: one of {count} parts; give the first, NAME{ending}, with the others beside it")
    stem = path.name.removesuffix(ending)
    parts = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{missing}: no such file; {path.name} is one of {count} parts, which must lie together")
    return parts


def _checkpoint_name(name: str) -> str:
    """Return a tensor's name in a checkpoint folder, or its own if it has no other."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in PARTS:
        return f"layers.{block[1]}.{PARTS[block[2]]}.{block[3]}"
    return name
