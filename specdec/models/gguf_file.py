"""Models in GGUF files, as llama.cpp writes them: settings and tensors as a checkpoint folder would hold them."""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, first_line
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.draft_heads.llama.unreadable_files import damage, missing_path
from specdec.kernels.quantized_tensor import QuantizedTensor
from specdec.models.gguf_blocks import READERS

if TYPE_CHECKING:
    # Loaded with the first such file; the package is optional.
    from gguf import ReaderTensor

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
ROPE_SETTINGS = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
SPECIAL = {"bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
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
# What a Llama 3.1 divides its rope frequencies by. llama.cpp writes these numbers, and not how they came about.
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == ".gguf"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its values, and its tensors, which stay on the disk.

    Attributes:
        path: the file.
        said: its single values by their keys; the tokenizer's lists are left out.
        tensors: its tensors by their names.
    """

    path: Path
    said: dict[str, Any]
    tensors: dict[str, "ReaderTensor"]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read what a file says; a second call for the same file takes no time.

        Raises:
            CheckpointError: no such file, one that cannot be read, or the package `gguf` is missing.
        """
        if not path.is_file():
            raise CheckpointError(missing_path(path, "file"))
        if find_spec("gguf") is None:
            raise CheckpointError(f"{path}: reading a GGUF file needs a package; run: pip install 'specdec[gguf]'")
        facts = path.stat()
        return _opened(path, facts.st_mtime_ns, facts.st_size)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a config.json would hold.

        Raises:
            CheckpointError: an architecture or a setting that this engine would not honour.
        """
        architecture = str(self.said.get("general.architecture"))
        if self.said.get(f"{architecture}.expert_count"):
            # llama.cpp has one architecture for both.
            return {"model_type": "mixtral" if architecture == "llama" else architecture}
        if architecture not in ARCHITECTURES:
            # Baichuan is read from folders alone.
            return {"model_type": "baichuan in a GGUF file" if architecture == "baichuan" else architecture}
        own = {key.removeprefix(f"{architecture}."): value for key, value in self.said.items()}
        found = {name: own[key] for key, name in SETTINGS.items() if own.get(key) is not None}
        special = {name: self.said.get(f"tokenizer.ggml.{key}") for key, name in SPECIAL.items()}
        embedding = self.tensors.get("token_embd.weight")
        found |= {
            "model_type": architecture,
            "architectures": [f"{architecture.capitalize()}ForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": 0 if embedding is None else int(embedding.shape[1]),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self.tensors,
            "eos_token_id": self.end_tokens(),
            **{name: token for name, token in special.items() if token is not None},
        }
        self._check_rotated(own, found)
        scaling = self._rope_scaling(own)
        return found | ({"rope_scaling": scaling} if scaling else {})

    def end_tokens(self) -> list[int]:
        """Return the tokens that end a text or a turn."""
        ends = (self.said.get(f"tokenizer.ggml.{name}") for name in ENDS)
        return sorted({int(end) for end in ends if end is not None})

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors by the names of a checkpoint folder without their `model.`, matrices as they are stored.

        Args:
            dtype: of the arithmetic, and of plain tensors. Formats that are not computed as they are stored are
                dequantised.

        Raises:
            CheckpointError: a quantisation that the package `gguf` cannot read, by its name.
        """
        permuted = ARCHITECTURES.get(str(self.said.get("general.architecture")), False)
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
        found = {}
        for name, tensor in self.tensors.items():
            if name == ROPE_FACTORS:
                continue
            weight = self._weight(name, tensor, dtype)
            part = name.rpartition(".")[0].rpartition(".")[2]
            if permuted and part in heads:
                count = self.said.get(f"llama.attention.{heads[part]}", self.said["llama.attention.head_count"])
                if weight.shape[0] % (2 * count):
                    raise CheckpointError(
                        f"{self.path}: {name} has {weight.shape[0]} rows, which {count} heads cannot share"
                    )
                weight = weight[torch.arange(len(weight)).view(count, -1, 2).transpose(1, 2).flatten()]
            found[_checkpoint_name(name)] = weight
        return found

    def _weight(self, name: str, tensor: "ReaderTensor", dtype: torch.dtype) -> Tensor:
        """Return a tensor in its own shape and order.

        Raises:
            CheckpointError: see `weights`.
        """
        from gguf import dequantize

        kind = tensor.tensor_type.name
        if kind in READERS and len(tensor.shape) == 2:
            return QuantizedTensor(READERS[kind](torch.from_numpy(tensor.data.copy())), dtype)
        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).to(dtype)
        except (NotImplementedError, ValueError):
            raise CheckpointError(
                f"{self.path}: {name} is quantised as {kind}, which cannot be read; take the model in another "
                "quantisation, such as Q8_0 or Q4_K_M"
            ) from None

    def _check_rotated(self, own: dict[str, Any], found: dict[str, Any]) -> None:
        """Refuse rotary embeddings of a part of each head."""
        heads = found.get("num_attention_heads") or 1
        size = found.get("head_dim") or found.get("hidden_size", 0) // heads
        rotated = own.get("rope.dimension_count", size)
        if rotated != size:
            raise CheckpointError(f"{self.path}: rope.dimension_count {rotated} of {size} is not supported")

    def _rope_scaling(self, own: dict[str, Any]) -> dict[str, Any] | None:
        """Return the scaling of rotary positions as config.json has it; None for none.

        Raises:
            CheckpointError: a scaling that cannot be told from the file.
        """
        prefix = "rope.scaling."
        said = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
        kind = said.pop("type", "none")
        said.pop("finetuned", None)
        if ROPE_FACTORS in self.tensors:
            return self._llama3_scaling(own)
        if kind == "none":
            return None
        unknown = [key for key in said if key not in ROPE_SETTINGS]
        if kind not in ("linear", "yarn") or unknown:
            what = f"{kind!r} with {unknown[0]}" if unknown else repr(kind)
            raise CheckpointError(f"{self.path}: rope.scaling {what} is not supported")
        return {"rope_type": kind, **{ROPE_SETTINGS[key]: value for key, value in said.items()}}

    def _llama3_scaling(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the scaling of a Llama 3.1 or later whose factors are those in the file."""
        kept = torch.from_numpy(self.tensors[ROPE_FACTORS].data.copy()).float().flatten()
        theta = float(own.get("rope.freq_base", 10000.0))
        scaling = {**LLAMA3, "factor": float(kept.max())}
        plain, scaled = (
            RopeConfig.from_json({"rope_theta": theta, "rope_scaling": each}).frequencies(2 * len(kept))[0]
            for each in (None, scaling)
        )
        if not torch.allclose(plain / scaled, kept, rtol=1e-3):
            raise CheckpointError(f"{self.path}: {ROPE_FACTORS} holds other factors than a Llama 3; take its folder")
        return scaling


@lru_cache(maxsize=1)
def _opened(path: Path, changed: int, size: int) -> GgufFile:  # noqa: ARG001
    """Read a file. Its lists of tokens make that take seconds, so the last one is kept."""
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
        fields = {key: field for key, field in reader.fields.items() if field.types[:1] != [GGUFValueType.ARRAY]}
        said = {key: field.contents() for key, field in fields.items()}
    except Exception as error:  # numpy, struct and enum raise many
        raise CheckpointError(f"{path}: {damage(path, first_line(error))}") from None
    return GgufFile(path, said, {tensor.name: tensor for tensor in reader.tensors})


def _checkpoint_name(name: str) -> str:
    """Return a tensor's name in a checkpoint folder, or its own if it has no other."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in PARTS:
        return f"layers.{block[1]}.{PARTS[block[2]]}.{block[3]}"
    return name
