"""The optimizers of a head's weights, and the schedule of their learning rates."""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

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
    """Return the schedule of each one's learning rate: `warmup_steps` equal parts up, and half a cosine down to 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return (1 + math.cos(math.pi * min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps)))) / 2

    return [LambdaLR(optimizer, factor) for optimizer in optimizers]
