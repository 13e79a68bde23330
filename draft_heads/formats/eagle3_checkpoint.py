"""EAGLE-3 heads to and from folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.formats.eagle3_format import from_official, to_official
from specdec.draft_heads.formats.eagle_checkpoint import layer_settings, save_head_files, share
from specdec.draft_heads.formats.head_description import HeadDescription, Source
from specdec.draft_heads.formats.tap_ids import KEY
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.llama.checkpoint_files import fill
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.linear import ready

# What plain EAGLE-3 does not have, under the names of config.json.
VARIANTS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def build_eagle3_head(
    description: HeadDescription,
    taps: tuple[int, ...],
    target: TargetParts,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
) -> Eagle3Head:
    """The head that was described, from tensors with numbers, ready to serve.

    Args:
        taps: layers of the target whose inputs it is to read.
    """
    assert isinstance(description.config, Eagle3Config)
    config = replace(description.config, taps=taps)
    named = dict(description.tensors.by_name)
    if description.embedding == Source.TARGET:
        named["embed_tokens.weight"] = target.embedding
    match description.output:
        case Source.TARGET:
            named["lm_head.weight"] = target.output.weight
        case Source.EMBEDDING:
            named["lm_head.weight"] = named["embed_tokens.weight"]
    with torch.device("meta"):
        head = Eagle3Head(config)
    head = head.to(dtype).to_empty(device=device)
    fill(head, from_official(named, config))
    if description.embedding == Source.TARGET:
        share(head.embed_tokens, target.embedding)
    if description.output == Source.TARGET:
        share(head.lm_head, target.output.weight)
    tokens = description.tokens
    head.draft_tokens.copy_(torch.arange(config.draft_vocab_size) if tokens is None else tokens)
    head.requires_grad_(False).eval()
    ready(head, kernels)
    return head


def save_eagle3_head(
    head: Eagle3Head, folder: Path, settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the head as `config.json` and `model.safetensors` in the official layout.

    As there, the embedding is left out where it is the target's size, and so is the map of a vocabulary that is whole.
    What official heads do not have is called as vLLM and SGLang call it. The layers read are given in both countings,
    which is how `TapIds` knows them for certain; vLLM reads the first, SGLang the second.

    Args:
        settings: extra keys for config.json, such as the training recipe.
        dtype: of the weights.

    Raises:
        ValueError: the head has what no config.json of this layout can say.
    """
    own, llama = head.config, head.config.llama
    config = {
        **layer_settings(llama),
        "draft_vocab_size": own.draft_vocab_size,
        "attention_bias": llama.attention_bias,
        KEY: list(own.taps),
        "eagle_config": {KEY: [tap - 1 for tap in own.taps], "use_aux_hidden_state": True},
        **{key: True for key in VARIANTS if getattr(own, key)},
    }
    has_own_size = llama.hidden_size != own.target_hidden_size
    if has_own_size:
        config["target_hidden_size"] = own.target_hidden_size
    tensors = to_official(dict(head.named_parameters()), own)
    if not has_own_size:
        del tensors["embed_tokens.weight"]
    if own.draft_vocab_size != llama.vocab_size:
        tensors |= vocabulary_maps(head.draft_tokens.cpu(), llama.vocab_size)
    save_head_files(folder, {**config, **settings}, tensors, dtype)


def vocabulary_maps(draft_tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`t2d` and `d2t` of the tokens that can be proposed (int64, ascending)."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[draft_tokens] = True
    return {"t2d": known, "d2t": draft_tokens - torch.arange(len(draft_tokens))}
