"""EAGLE-1/2 heads to and from folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec.draft_heads.formats.eagle_format import from_official, to_official
from specdec.draft_heads.formats.head_description import HeadDescription, Source
from specdec.draft_heads.formats.recogniser import recognise
from specdec.draft_heads.heads.draft_head import TargetSizes
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, fill, read_config, read_tensors
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.linear import ready

# Of a description's tensors, those that are no part of the head itself.
BESIDE_THE_HEAD = ("lm_head.weight", "token_map")


def load_eagle_head(
    folder: Path,
    target_embedding: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
) -> EagleHead:
    """Load an EAGLE-1/2 head alone, without what scores its states.

    Args:
        target_embedding: the target's `[vocab_size, hidden_size]` embedding, used if the file has none.

    Raises:
        CheckpointError: no such head, or none of this target.
    """
    settings, tensors = read_config(folder), read_tensors(folder)
    with error_context(folder):
        description = recognise(settings, tensors)
        if not isinstance(description.config, EagleConfig):
            raise CheckpointError(f"an {description.kind} head where one of EAGLE-1/2 is wanted")
        vocab_size, hidden_size = target_embedding.shape
        description.check(TargetSizes(vocab_size, hidden_size, 0))
        return build_eagle_head(description, target_embedding, dtype, device, kernels)


def build_eagle_head(
    description: HeadDescription,
    target_embedding: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
) -> EagleHead:
    """The head that was described, from tensors with numbers, ready to serve."""
    config = description.config
    assert isinstance(config, EagleConfig)
    named = {name: t for name, t in description.tensors.by_name.items() if name not in BESIDE_THE_HEAD}
    if description.embedding == Source.TARGET:
        named["embed_tokens.weight"] = target_embedding
    with torch.device("meta"):
        head = EagleHead(config)
    head = head.to(dtype).to_empty(device=device)
    fill(head, from_official(named, config))
    if description.embedding == Source.TARGET:
        share(head.embed_tokens, target_embedding)
    head.requires_grad_(False).eval()
    ready(head, kernels)
    return head


def share(part: nn.Embedding | nn.Linear, matrix: Tensor) -> None:
    """Have a part of a head use the target's very matrix instead of a copy, where it is of the same kind."""
    part.weight = nn.Parameter(matrix.detach().to(part.weight.device, part.weight.dtype), requires_grad=False)


def save_eagle_head(
    head: EagleHead, folder: Path, settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the head as `config.json` and `model.safetensors` in the official layout.

    Args:
        settings: extra keys for config.json, such as the training recipe.
        dtype: of the weights.

    Raises:
        ValueError: the head has what the official layout cannot say.
    """
    llama = head.config.llama
    config = {**layer_settings(llama), "bias": head.config.fc_bias, "qkv_bias": llama.attention_bias, **settings}
    save_head_files(folder, config, to_official(dict(head.named_parameters()), head.config), dtype)


def layer_settings(llama: LlamaConfig) -> dict[str, Any]:
    """What an official config.json says about decoder layers.

    Raises:
        ValueError: it cannot say it.
    """
    rope = llama.rope
    if rope.rope_type != "default":
        raise ValueError(f"a head with rope type {rope.rope_type!r} cannot be saved; train it with the default one")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "num_hidden_layers": llama.num_layers,
        "vocab_size": llama.vocab_size,
        "rms_norm_eps": llama.rms_norm_eps,
        "max_position_embeddings": llama.max_position,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
    }


def save_head_files(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write both files, weights in `dtype` and token ids as they are."""
    saved = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    saved = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in saved.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in saved.items()}, folder / "model.safetensors", {"format": "pt"})
