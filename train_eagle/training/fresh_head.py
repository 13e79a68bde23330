"""The head that a training run begins with."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.models.llama import LlamaWeights
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.training.start_head import begin_with
from specdec.train_eagle.training.train_config import TrainConfig
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS


def new_head(
    config: TrainConfig, model: LlamaWeights, samples: Sequence[Sample], settings: Mapping[str, Any]
) -> FeatureHead:
    """Make the head that the settings ask for, as a function of the seed.

    Args:
        settings: all settings by name, none of the kind's left open.

    Raises:
        ValueError: the head to start from is missing or does not fit, or there are too few tokens to propose.
    """
    torch.manual_seed(config.seed)
    count = config.draft_vocab_size
    tokens = frequent_tokens(samples, count, model.config.vocab_size) if count else None
    head: FeatureHead = TRAINING_KINDS[config.head].new(model, tokens, settings)
    if config.start is not None:
        begin_with(head, config.start, config.model)
    return head


def frequent_tokens(samples: Iterable[Sample], count: int, vocab_size: int) -> Tensor:
    """Return the tokens that the assistant says most often, int64 `[count]`, ascending; ties go to lower ids.

    Raises:
        ValueError: there are not so many tokens.
    """
    if count > vocab_size:
        raise ValueError(f"draft_vocab_size is {count}; the target has {vocab_size} tokens")
    said = Counter(token for sample in samples for token, own in zip(sample.token_ids, sample.mask, strict=True) if own)
    ranked = sorted(range(vocab_size), key=lambda token: (-said[token], token))
    return torch.tensor(sorted(ranked[:count]))
