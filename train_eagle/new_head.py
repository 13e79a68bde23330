"""Fresh heads for a target."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.models.llama import LlamaModel
from specdec.train_eagle.conversations import Sample


def new_eagle_head(model: LlamaModel) -> EagleHead:
    """An EAGLE-1/2 head of the target's sizes; its embedding is the target's, frozen."""
    # No fc.bias: vLLM cannot load a head that has one.
    head = EagleHead(EagleConfig(_layer_config(model), fc_bias=False))
    _start(head, model)
    return head


def new_eagle3_head(model: LlamaModel, draft_tokens: Tensor) -> Eagle3Head:
    """An EAGLE-3 head of the target's sizes; its embedding is the target's, frozen, its output begins as the target's.

    Args:
        draft_tokens: int64, ascending, what it shall propose.
    """
    llama = _layer_config(model)
    taps = default_taps(model.config.num_layers)
    head = Eagle3Head(Eagle3Config(llama, taps, model.config.hidden_size, len(draft_tokens)))
    _start(head, model)
    head.draft_tokens.copy_(draft_tokens)
    head.lm_head.weight.data.copy_(model.lm_head_weight[draft_tokens.to(model.lm_head_weight.device)])
    head.norm.weight.data.copy_(model.norm.weight)
    return head


def frequent_tokens(samples: Iterable[Sample], count: int, vocab_size: int) -> Tensor:
    """int64 `[count]`, ascending: what the assistant says most often; lower ids first where that is as often.

    Raises:
        ValueError: there are not so many tokens.
    """
    if count > vocab_size:
        raise ValueError(f"draft_vocab_size is {count}; the target has {vocab_size} tokens")
    said = Counter(token for sample in samples for token, own in zip(sample.token_ids, sample.mask, strict=True) if own)
    ranked = sorted(range(vocab_size), key=lambda token: (-said[token], token))
    return torch.tensor(sorted(ranked[: count or vocab_size]))


def _layer_config(model: LlamaModel) -> LlamaConfig:
    """One layer of the target's sizes with default rotary settings, as the official heads have."""
    target = model.config
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=target.rope.theta),
    )


def _start(head: EagleHead | Eagle3Head, model: LlamaModel) -> None:
    for parameter in head.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    head.embed_tokens.weight.data.copy_(model.embed_tokens.weight)
    head.embed_tokens.weight.requires_grad_(False)
