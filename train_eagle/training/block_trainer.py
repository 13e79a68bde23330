"""The loss of a block head (DFlash 2602.06036, DSpark 2607.05147) on a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.heads.block_head import BlockHead
from specdec.draft_heads.heads.edge_scorers import block_edges
from specdec.train_eagle.passes.block_pass import slot_states, tokens_before
from specdec.train_eagle.passes.features import FeatureBatch
from specdec.train_eagle.training.head_trainer import HeadTrainer
from specdec.train_eagle.training.unrolled_loss import Factors, UnrolledLoss, scored_predictions


class BlockTrainer(HeadTrainer):
    """Blocks behind tokens of the assistant, the anchors, each drafted in one pass from the conversation before it.

    Slot k of anchor a predicts token a + k + 1. The Markov head reads the conversation's own token before. A slot
    counts if its token and those of the slots before it are the assistant's and can be proposed. The loss is the mean
    over all predictions that count, weighted by `step_decay` to the power of k, or with the weights of `dpace_weights`;
    a step of `UnrolledLoss` is a slot. The confidence's loss has the former weights always.
    Of a conversation with more than `anchors` anchors, that many are drawn; outside training they are spread evenly.
    """

    head: BlockHead

    @property
    def tables(self) -> list[Tensor]:
        markov = self.head.markov_head
        return super().tables + ([] if markov is None else [markov.markov_w1.weight, markov.markov_w2.weight])

    def forward(self, batch: FeatureBatch) -> UnrolledLoss:
        """Return the losses of all slots."""
        head, settings = self.head.form(None), self.settings
        slots = head.config.num_slots
        anchors = self._anchors(batch)
        counted = self._counts(batch, anchors, slots)
        checkpoints = settings.gradient_checkpointing and torch.is_grad_enabled()
        hidden = slot_states(head, batch, anchors, self.rope, checkpoints=checkpoints)
        before = tokens_before(batch, anchors, slots)
        logits = [Factors(hidden.unbind(1), self.teacher if self.output is None else self.output.weight)]
        if head.markov_head is not None:
            logits.append(Factors(block_edges(head.markov_head, before, hidden).unbind(1), head.markov_head.successors))
        weights = [settings.step_decay**slot for slot in range(slots)]
        # Means of slots, weighted by what they count, make the mean over predictions.
        shares = [weight * count for weight, count in zip(weights, counted.sum(1).tolist(), strict=True)]
        teacher = batch.features, self.teacher
        alpha = settings.dpace_alpha if settings.slot_weights == "dpace" else None
        loss, accepted = scored_predictions(
            logits, anchors, counted, *teacher, settings.loss, shares, dpace_alpha=alpha
        )
        if alpha is None:
            loss = loss._replace(weight=loss.total.new_tensor(sum(shares)))
        if head.confidence_head is None:
            return loss
        found = head.confidence(before.flatten(), hidden.flatten(0, 1)).view(len(anchors), slots).t()
        distance = _mean_entropy(found, accepted, counted, weights)
        return loss._replace(total=loss.total + settings.confidence_weight * distance)

    def _anchors(self, batch: FeatureBatch) -> Tensor:
        """Return the places of the anchors, int64, ascending: tokens of the assistant before another one of them."""
        ends = _ends(batch)
        places = torch.arange(len(batch.tokens) - 1, device=ends.device)
        said = batch.mask[:-1] & batch.mask[1:] & (places + 1 < ends[:-1])
        found = said.nonzero().flatten()
        if not len(found):
            # One block that does not count, so that every weight has a gradient in every process.
            return places[:1]
        return self.some_of_each(found, batch.lengths)

    def _counts(self, batch: FeatureBatch, anchors: Tensor, slots: int) -> Tensor:
        """Return which predictions count, bool `[slots, anchors]`."""
        places = anchors + torch.arange(1, slots + 1, device=anchors.device)[:, None]
        inside = places < _ends(batch)[anchors]
        places = places.clamp_max(len(batch.tokens) - 1)
        counts = inside & batch.mask[anchors] & batch.mask[places] & self.proposable[batch.tokens[places]]
        return counts.cumprod(0).bool()


def _ends(batch: FeatureBatch) -> Tensor:
    """Return the place behind each token's conversation, int64 `[tokens]`."""
    lengths = torch.tensor(batch.lengths, device=batch.tokens.device)
    return lengths.cumsum(0).repeat_interleave(lengths)


def _mean_entropy(logits: Tensor, wanted: Tensor, counted: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of the binary cross entropy of probabilities, all `[slots, anchors]`."""
    found = F.binary_cross_entropy_with_logits(logits.to(wanted.dtype), wanted, reduction="none")
    shares = wanted.new_tensor(weights)[:, None] * counted
    return (found * shares).sum() / shares.sum().clamp_min(torch.finfo(shares.dtype).tiny)
