"""EAGLE-1/2 heads in the official layout: loading, strictly, and saving."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.draft_heads.checkpoint_files import CheckpointError, load_strictly, naming, read_config, read_tensors
from specdec.draft_heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.draft_heads.llama_layer import fuse_layer, split_layer
from specdec.kernels.kernel_set import TORCH, KernelSet
from specdec.kernels.linear import ready


def load_eagle_head(
    folder: Path,
    target_embedding: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet = TORCH,
) -> EagleHead:
    """Load a head and check that it fits its target.

    Args:
        folder: config.json with `pytorch_model.bin` or safetensors.
        target_embedding: the target's `[vocab_size, hidden_size]` embedding, used if the file has none.

    Raises:
        CheckpointError: no head, one of another size than the target (both named), or tensors that are
            missing, unexpected or of another shape.
    """
    settings = read_config(folder)
    tensors = read_tensors(folder)
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{folder}: not an EAGLE head: it has no tensor 'fc.weight'")
    with naming(folder):
        llama = LlamaConfig.from_json({**settings, "num_hidden_layers": settings.get("num_hidden_layers", 1)})
    vocab_size, hidden_size = target_embedding.shape
    if llama.hidden_size != hidden_size:
        raise CheckpointError(
            f"{folder}: the head's hidden_size {llama.hidden_size} does not fit the target's {hidden_size}"
        )
    if llama.vocab_size != vocab_size:
        raise CheckpointError(
            f"{folder}: the head's vocab_size {llama.vocab_size} does not fit the target's {vocab_size}"
        )
    # What the tensors say counts; a config that asks for a bias the file lacks is refused as incomplete.
    qkv_bias = bool(settings.get("qkv_bias", False)) or "layers.0.self_attn.q_proj.bias" in tensors
    fc_bias = bool(settings.get("bias", False)) or "fc.bias" in tensors
    llama = replace(llama, attention_bias=qkv_bias, output_bias="layers.0.self_attn.o_proj.bias" in tensors)
    with naming(folder):
        for layer in range(llama.num_layers):
            fuse_layer(tensors, f"layers.{layer}.")
    tensors.setdefault("embed_tokens.weight", target_embedding)
    with torch.device("meta"):
        head = EagleHead(EagleConfig(llama, fc_bias))
    head = head.to(dtype).to_empty(device=device)
    load_strictly(head, tensors, folder)
    head.requires_grad_(False).eval()
    ready(head, kernels)
    return head


def save_eagle_head(head: EagleHead, folder: Path, settings: dict[str, Any]) -> None:
    """Write the head as `config.json` and `model.safetensors`, bfloat16, in the official layout.

    Args:
        settings: extra keys for config.json, such as the training recipe.
    """
    llama, rope = head.config.llama, head.config.llama.rope
    config = {
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
        "bias": head.config.fc_bias,
        "qkv_bias": llama.attention_bias,
        **settings,
    }
    if rope.rope_type != "default":
        raise ValueError(f"a head with rope type {rope.rope_type!r} cannot be saved; train it with the default one")
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.named_parameters()}
    for layer in range(llama.num_layers):
        split_layer(tensors, f"layers.{layer}.", llama)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
