"""The loss of a head on a batch: of all kinds, and of those that are unrolled over their own states as in drafting."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specdec.draft_heads.heads.draft_head import FeatureHead, HeadForm
from specdec.draft_heads.llama.rope import Rotary, rotary_at
from specdec.train_eagle.passes.features import FeatureBatch
from specdec.train_eagle.passes.unrolled_attention import UnrolledAttention
from specdec.train_eagle.training.train_config import LossKind, SlotWeights
from specdec.train_eagle.training.unrolled_loss import Factors, UnrolledLoss, scored_predictions


class LossSettings(NamedTuple):
    """Settings of the loss, see `TrainConfig`; a kind of head reads some of them."""

    loss: LossKind
    unroll: int = 1
    step_decay: float = 0.8
    token_weight: float = 1.0
    feature_weight: float = 0.0
    noise: float = 0.0
    gradient_checkpointing: bool = False
    anchors: int | None = None
    confidence_weight: float = 0.0
    slot_weights: SlotWeights = "decay"
    dpace_alpha: float = 0.5


class HeadTrainer(nn.Module):
    """Base of modules that turn a `FeatureBatch` into an `UnrolledLoss`.

    Attributes:
        teacher: `[tokens, hidden_size]`, rows of the target's output matrix for the tokens that the head can propose.
        proposable: bool `[vocab_size]`, which these are.
        rope: the head's rotary table.

    Args:
        lm_head: `[vocab_size, hidden_size]`, the target's output matrix.
        output: the head's own output matrix, `[tokens, hidden_size]`; None if it uses the target's.
        tokens: int64, the target's ids of the rows of `output`; None for all in order.
    """

    def __init__(
        self,
        head: FeatureHead,
        lm_head: Tensor,
        settings: LossSettings,
        output: nn.Linear | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.head, self.settings, self.output = head, settings, output
        llama, device = head.llama, lm_head.device
        known = torch.arange(llama.vocab_size, device=device) if tokens is None else tokens.to(device)
        proposable = torch.zeros(llama.vocab_size, dtype=torch.bool, device=device)
        proposable[known] = True
        self.teacher: Tensor
        self.proposable: Tensor
        self.rope: Tensor
        self.register_buffer("teacher", lm_head[known].detach(), persistent=False)
        self.register_buffer("proposable", proposable, persistent=False)
        self.register_buffer("rope", llama.rope.table(llama.head_dim, llama.max_position, torch.float32), False)

    @property
    def tables(self) -> list[Tensor]:
        """Return the trained matrices with a row or column for each token: by default the head's own output matrix."""
        return [] if self.output is None else [self.output.weight]

    def some_of_each(self, places: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return up to `anchors` places of each conversation: drawn in training, evenly spread outside.

        Args:
            places: int64, ascending, rows of a batch.
            lengths: number of rows of each conversation.
        """
        bounds = torch.tensor(lengths, device=places.device).cumsum(0)
        counts = torch.searchsorted(places, bounds).diff(prepend=bounds.new_zeros(1)).tolist()
        return torch.cat([self._some(part) for part in torch.split(places, counts)])

    def _some(self, places: Tensor) -> Tensor:
        count, most = len(places), self.settings.anchors
        if most is None or count <= most:
            return places
        if self.training:
            return places[torch.randperm(count, device=places.device)[:most].sort().values]
        return places[torch.arange(most, device=places.device) * count // most]


class UnrolledTrainer(HeadTrainer):
    """Training-time test (Li et al. 2025, section 3.2).

    The head's row r of a conversation takes (x_{r+1}, feature r) and predicts x_{r+2}. In pass j row r takes its own
    state of the previous pass and x_{r+1+j}, and sees the rows that it would see if it had drafted those j tokens.
    After the first pass only rows go on whose next token is the assistant's, and of a conversation at most `anchors`.
    """

    def forward(self, batch: FeatureBatch) -> UnrolledLoss:
        """Return the losses of all passes."""
        settings, head = self.settings, self.head.form(None)
        rows = _Rows(batch)
        anchors = rows.said.nonzero().flatten()
        # Those that go on, and their places among all.
        later = self.some_of_each(anchors, rows.lengths)
        places = torch.searchsorted(anchors, later)
        features = batch.read_by(head)[rows.before]
        if self.training and settings.noise:
            features = features + torch.empty_like(features).uniform_(-settings.noise, settings.noise)
        attentions = [UnrolledAttention(rows.lengths, later, window) for window in head.windows]
        first = self._pass(head, rows.tokens, features, rows.positions, attentions, 0).index_select(0, anchors)
        states, counted, hidden = [first], [self._counts(rows, anchors, 0)], first.index_select(0, places)
        for step in range(1, settings.unroll):
            ahead = (later + step).clamp_max(len(rows.tokens) - 1)
            positions = (rows.positions[later] + step).clamp_max(len(self.rope) - 1)
            hidden = self._pass(head, rows.tokens[ahead], hidden, positions, attentions, step)
            # Rows that do not go on have no state, and do not count.
            states.append(torch.zeros_like(first).index_copy(0, places, hidden))
            counts = counted[0].new_zeros(len(anchors)).index_copy(0, places, self._counts(rows, later, step))
            counted.append(counts)
        wanted = batch.features[rows.here]
        weights = [settings.step_decay**step for step in range(settings.unroll)]
        output = self.teacher if self.output is None else self.output.weight
        logits = [Factors([head.read(state) for state in states], output)]
        teacher = wanted, self.teacher
        loss, _ = scored_predictions(logits, anchors, torch.stack(counted), *teacher, settings.loss, weights)
        total = settings.token_weight * loss.total
        if settings.feature_weight:
            total = total + settings.feature_weight * _distance(states, wanted, anchors, counted, weights)
        return loss._replace(total=total)

    def _pass(
        self,
        head: HeadForm,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        attentions: Sequence[UnrolledAttention],
        step: int,
    ) -> Tensor:
        """Run the head over its rows: `[rows, feature_size]`."""
        at_step = [_AtStep(attention, step) for attention in attentions]
        rotary = rotary_at(self.rope, positions)
        if not (self.settings.gradient_checkpointing and torch.is_grad_enabled()):
            return head(tokens, features, rotary, at_step)
        hidden: Tensor = checkpoint(head, tokens, features, rotary, at_step, use_reentrant=False)
        return hidden

    def _counts(self, rows: "_Rows", anchors: Tensor, step: int) -> Tensor:
        """Return whose predictions count, bool `[anchors]`: those of assistant tokens that the head can propose."""
        ahead = anchors + step
        inside = ahead < rows.ends[anchors]
        ahead = ahead.clamp_max(len(rows.tokens) - 1)
        return inside & rows.said[ahead] & self.proposable[rows.next_tokens[ahead]]


class _AtStep:
    """One pass's call of an attention, which checkpointing may repeat for the gradient."""

    def __init__(self, attention: UnrolledAttention, step: int) -> None:
        self.attention, self.step = attention, step

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        # By then the gradients of later passes are done.
        del self.attention.stored[self.step :]
        return self.attention(qkv, rotary, num_heads)


class _Rows:
    """The head's rows of a batch, one fewer than tokens in each conversation.

    Attributes:
        lengths: number of rows of each conversation.
        here, before: int64 `[rows]`, indices of each row's token in the batch, and of the one whose feature it takes.
        tokens: int64 `[rows]`.
        next_tokens: int64 `[rows]`, meaningless in a conversation's last row.
        said: bool `[rows]`, whether the assistant says the next token.
        positions: int64 `[rows]`, rotary positions.
        ends: int64 `[rows]`, the row after the conversation's last.
    """

    def __init__(self, batch: FeatureBatch) -> None:
        device = batch.tokens.device
        lengths = torch.tensor(batch.lengths, device=device)
        self.lengths = [length - 1 for length in batch.lengths]
        numbers = torch.arange(len(lengths), device=device).repeat_interleave(lengths - 1)
        rows = torch.arange(len(numbers), device=device)
        self.here = rows + numbers + 1
        self.before = rows + numbers
        row_ends = (lengths - 1).cumsum(0)
        self.ends = row_ends[numbers]
        self.positions = rows - (row_ends - (lengths - 1))[numbers]
        self.tokens = batch.tokens[self.here]
        following = (self.here + 1).clamp_max(len(batch.tokens) - 1)
        self.next_tokens = batch.tokens[following]
        self.said = batch.mask[following] & (rows + 1 < self.ends)


def _distance(
    states: Sequence[Tensor], wanted: Tensor, anchors: Tensor, counted: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """Return the smooth L1 distance of the head's features from the target's (Li et al. 2024, equation 2)."""
    wide = torch.promote_types(states[0].dtype, torch.float32)
    total, weight_sum = states[0].new_zeros((), dtype=wide), 0.0
    for step, (state, counts, weight) in enumerate(zip(states, counted, weights, strict=True)):
        chosen = counts.nonzero().flatten()
        if len(chosen):
            total = total + weight * F.smooth_l1_loss(state[chosen].to(wide), wanted[anchors[chosen] + step].to(wide))
            weight_sum += weight
    return total / weight_sum if weight_sum else total
