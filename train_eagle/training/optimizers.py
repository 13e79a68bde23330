"""The optimizers of a head's weights, and the schedule of their learning rates."""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from specdec.train_eagle.training.train_config import OptimizerKind


def optimizers_of(
    kind: OptimizerKind, head: nn.Module, tables: Collection[Tensor], lr: float, vocab_lr_factor: float = 1.0
) -> list[Optimizer]:
    """Return what trains a head's weights.

    Muon (Jordan et al. 2024) takes steps of orthogonal matrices, scaled so that they are as long as AdamW's (Liu et al.
    2025, 2502.16982): one learning rate is for both. It is for matrices that map states to states; norms, and matrices
    with a row or column for each token, are AdamW's.

    Args:
        tables: those of the head's matrices that have a row or column for each token.
        vocab_lr_factor: their learning rate over that of the others.
    """
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    # By identity: a matrix over states may have as many rows as there are tokens.
    named = set(map(id, tables))
    of_tokens, own, rest = list[Tensor](), list[Tensor](), list[Tensor]()
    for weight in weights:
        if id(weight) in named:
            of_tokens.append(weight)
        else:
            (own if weight.ndim == 2 and kind == "muon" else rest).append(weight)
    groups = [{"params": part, "lr": rate} for part, rate in ((rest, lr), (of_tokens, lr * vocab_lr_factor)) if part]
    found: list[Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)] if groups else []
    if own:
        found.append(torch.optim.Muon(own, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found


def schedules_of(optimizers: Collection[Optimizer], warmup_steps: int, steps: int) -> list[LRScheduler]:
    """Return the schedule of each one's learning rate: a warm-up, and half a cosine down to 0."""
    return [get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps) for optimizer in optimizers]
