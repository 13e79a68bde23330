"""The optimizers of a head's weights, and the schedule of their learning rates."""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from specdec.train_eagle.training.train_config import OptimizerKind


def optimizers_of(
    kind: OptimizerKind, head: nn.Module, vocabularies: Collection[int], lr: float, vocab_lr_factor: float = 1.0
) -> list[Optimizer]:
    """Return what trains a head's weights.

    Muon (Jordan et al. 2024) takes steps of orthogonal matrices, scaled so that they are as long as AdamW's (Liu et al.
    2025, 2502.16982): one learning rate is for both. It is for matrices that map states to states; norms, and matrices
    with a row or column for each token, are AdamW's.

    Args:
        vocabularies: numbers of tokens that a matrix may have a row or column for each of.
        vocab_lr_factor: learning rate of such matrices over that of the others.
    """
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    tables, own, rest = list[Tensor](), list[Tensor](), list[Tensor]()
    for weight in weights:
        if weight.ndim == 2 and set(weight.shape) & set(vocabularies):
            tables.append(weight)
        else:
            (own if weight.ndim == 2 and kind == "muon" else rest).append(weight)
    groups = [{"params": part, "lr": rate} for part, rate in ((rest, lr), (tables, lr * vocab_lr_factor)) if part]
    found: list[Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)] if groups else []
    if own:
        found.append(torch.optim.Muon(own, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found


def schedules_of(optimizers: Collection[Optimizer], warmup_steps: int, steps: int) -> list[LRScheduler]:
    """Return the schedule of each one's learning rate: a warm-up, and half a cosine down to 0."""
    return [get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps) for optimizer in optimizers]
