"""What a head is trained to: the target's next feature, and through its lm_head the target's next token."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class HeadLoss(NamedTuple):
    """Means over the trained rows.

    Attributes:
        total: what is minimised.
        feature: smooth L1 between features.
        token: cross-entropy between the target's and the head's next-token distributions, nats.
        agreement: share of rows in which both have the same most likely token.
    """

    total: Tensor
    feature: Tensor
    token: Tensor
    agreement: Tensor


def eagle_loss(
    predicted: Tensor, wanted: Tensor, lm_head: Tensor, feature_weight: float = 1.0, token_weight: float = 0.1
) -> HeadLoss:
    """EAGLE-1's loss (Li et al. 2024, equation 2): w_f SmoothL1(f', f) + w_t CE(softmax(W f), softmax(W f')).

    Args:
        predicted: `[rows, hidden_size]` the head's features f'.
        wanted: `[rows, hidden_size]` the target's features f of the same tokens.
        lm_head: `[vocab_size, hidden_size]` the target's output weights W.
    """
    feature = F.smooth_l1_loss(predicted.float(), wanted.float())
    with torch.no_grad():
        target_logits = F.linear(wanted, lm_head).float()
        target_probs = target_logits.softmax(-1)
    logits = F.linear(predicted, lm_head.to(predicted.dtype)).float()
    token = F.cross_entropy(logits, target_probs)
    agreement = (logits.detach().argmax(-1) == target_logits.argmax(-1)).float().mean()
    return HeadLoss(feature_weight * feature + token_weight * token, feature.detach(), token.detach(), agreement)
