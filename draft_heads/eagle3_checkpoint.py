"""EAGLE-3 heads in the official layout: loading, strictly, and saving."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.draft_heads.checkpoint_files import CheckpointError, load_strictly, naming
from specdec.draft_heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.draft_heads.llama_layer import fuse_layer, split_layer
from specdec.kernels.kernel_set import TORCH, KernelSet
from specdec.kernels.linear import ready

FIRST_NORMS = ("hidden_norm", "input_layernorm")


def load_eagle3_head(
    folder: Path,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    target_embedding: Tensor,
    num_target_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet = TORCH,
) -> Eagle3Head:
    """A head of the official layout.

    Args:
        folder: where it comes from, for messages.
        settings: its config.json.
        tensors: by official names; emptied.
        target_embedding: the target's `[vocab_size, hidden_size]`, used if there is none among `tensors`.

    Raises:
        CheckpointError: it does not fit its target, or tensors are missing, unexpected or of another shape.
    """
    vocab_size, target_hidden = target_embedding.shape
    with naming(folder):
        llama = LlamaConfig.from_json({**settings, "num_hidden_layers": settings.get("num_hidden_layers") or 1})
        if llama.vocab_size != vocab_size:
            raise CheckpointError(f"the head's vocab_size {llama.vocab_size} does not fit the target's {vocab_size}")
        wanted_hidden = settings.get("target_hidden_size") or llama.hidden_size
        if wanted_hidden != target_hidden:
            raise CheckpointError(f"the head reads states of size {wanted_hidden}, the target's are {target_hidden}")
        taps = _taps(settings, num_target_layers)
        draft_vocab = int(settings.get("draft_vocab_size") or vocab_size)
        draft_tokens = _draft_tokens(tensors, draft_vocab, vocab_size)
        llama = replace(llama, attention_bias=llama.attention_bias or "midlayer.self_attn.q_proj.bias" in tensors)
        config = Eagle3Config(
            llama=llama,
            taps=taps,
            target_hidden_size=target_hidden,
            draft_vocab_size=draft_vocab,
            fc_bias="fc.bias" in tensors,
        )
        fuse_layer(tensors, "midlayer.")
    renamed = {name.replace("midlayer.", "first."): tensor for name, tensor in tensors.items()}
    if llama.hidden_size == target_hidden:
        renamed.setdefault("embed_tokens.weight", target_embedding)
    with torch.device("meta"):
        head = Eagle3Head(config)
    head = head.to(dtype).to_empty(device=device)
    load_strictly(head, renamed, folder)
    head.draft_tokens.copy_(draft_tokens)
    head.requires_grad_(False).eval()
    ready(head, kernels)
    return head


def save_eagle3_head(head: Eagle3Head, folder: Path, settings: dict[str, Any]) -> None:
    """Write the head as `config.json` and `model.safetensors`, bfloat16, in the official layout.

    As there, the embedding is left out where it is the target's size, and so is the map of a vocabulary that is whole.

    Args:
        settings: extra keys for config.json, such as the training recipe.

    Raises:
        ValueError: the head has what the official layout cannot say.
    """
    llama, rope = head.config.llama, head.config.llama.rope
    if rope.rope_type != "default":
        raise ValueError(f"a head with rope type {rope.rope_type!r} cannot be saved; train it with the default one")
    plain = replace(Eagle3Config(llama, head.taps, head.config.target_hidden_size, head.config.draft_vocab_size))
    if head.config != plain or llama.num_layers != 1:
        raise ValueError("only plain EAGLE-3 heads of one layer have an official layout")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": llama.vocab_size,
        "draft_vocab_size": head.config.draft_vocab_size,
        "rms_norm_eps": llama.rms_norm_eps,
        "max_position_embeddings": llama.max_position,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "attention_bias": llama.attention_bias,
        **settings,
    }
    own_size = llama.hidden_size != head.config.target_hidden_size
    if own_size:
        config["target_hidden_size"] = head.config.target_hidden_size
    tensors = {
        name.replace("first.", "midlayer."): tensor.detach().to("cpu", torch.bfloat16)
        for name, tensor in head.named_parameters()
        if own_size or name != "embed_tokens.weight"
    }
    split_layer(tensors, "midlayer.", llama)
    if head.config.draft_vocab_size != llama.vocab_size:
        known = torch.zeros(llama.vocab_size, dtype=torch.bool)
        known[head.draft_tokens.cpu()] = True
        tensors["t2d"] = known
        tensors["d2t"] = head.draft_tokens.cpu() - torch.arange(len(head.draft_tokens))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def _taps(settings: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """Layers of the target that the head reads, by the numbers of `Eagle3Config`."""
    given = settings.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        try:
            return default_taps(num_target_layers)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    taps = tuple(given)
    if not taps or not all(isinstance(tap, int) and 0 <= tap <= num_target_layers for tap in taps):
        raise CheckpointError(
            f"eagle_aux_hidden_state_layer_ids = {given!r} must be layers of the target, 0 to {num_target_layers}"
        )
    return taps


def _draft_tokens(tensors: dict[str, Tensor], draft_vocab: int, vocab_size: int) -> Tensor:
    """int64 `[draft_vocab]`, from `d2t` (offsets) and `t2d` (a mask), which must agree; taken out of `tensors`.

    Raises:
        CheckpointError: one is missing, or they do not say the same.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and t2d is None and draft_vocab == vocab_size:
        return torch.arange(vocab_size)
    if d2t is None:
        raise CheckpointError(f"missing tensor 'd2t', which a draft vocabulary of {draft_vocab} tokens needs")
    if list(d2t.shape) != [draft_vocab]:
        raise CheckpointError(f"d2t has shape {list(d2t.shape)}, config.json says draft_vocab_size {draft_vocab}")
    tokens = d2t.long() + torch.arange(draft_vocab)
    if t2d is not None and not torch.equal(tokens, t2d.bool().nonzero().flatten()):
        raise CheckpointError("d2t and t2d name other tokens; d2t must hold target id minus draft id")
    if not (tokens.diff() > 0).all() or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise CheckpointError("d2t is no ascending map into the vocabulary; it must hold target id minus draft id")
    return tokens
