"""Loss of a head that is unrolled over its own states, compared at every step with the target."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec.kernels.projection import pad_rows
from specdec.train_eagle.train_config import LossKind

# Logits that a CPU processes at a time, so that intermediate results stay in a core's cache.
CPU_BLOCK = 2**17


class UnrolledLoss(NamedTuple):
    """Means over the counted predictions. Values per step are detached, and 0 if no prediction counts.

    Attributes:
        total: the loss to minimise, a scalar with gradient.
        loss: `[steps]`, its parts.
        accuracy: `[steps]`, share of predictions in which target and head have the same likeliest token.
        acceptance: `[steps]`, chance that a token drawn from the head's distribution q is accepted, sum of min(p, q).
        count: int64 `[steps]`.
    """

    total: Tensor
    loss: Tensor
    accuracy: Tensor
    acceptance: Tensor
    count: Tensor  # type: ignore[assignment]  # tuple has a method of that name


def unrolled_loss(
    states: Sequence[Tensor],
    weight: Tensor,
    anchors: Tensor,
    counted: Tensor,
    teacher_states: Tensor,
    teacher_weight: Tensor,
    kind: LossKind,
    step_weights: Sequence[float],
    chunk: int = 512,
    eta: float = 3.0,
) -> UnrolledLoss:
    """Return the weighted mean over steps, sum_j w_j mean_j / sum_j w_j, of those with counted predictions.

    The loss between the target's distribution p and the head's q is one of:

    - `ce`: -sum p log q, as EAGLE does (Li et al. 2024, equation 2).
    - `kl`: KL(p || q), which has the same gradient.
    - `lk-hybrid`: l KL(p || q) + (1 - l) (1 - sum min(p, q)), where l = exp(-eta sum min(p, q)), without gradient:
      the better the head, the more it is trained for acceptance (LK losses, Samarin et al. 2026, arXiv 2602.23881;
      the weight l is computed per prediction, as in vLLM's `speculators`).

    Gradients are computed along with the loss, `chunk` anchors at a time, so that logits exist for only one chunk and
    step at a time (as in Liger Kernel, Hsu et al. 2024). Products use the dtype of `states`, or autocast's; the rest
    is float32 at least.

    Args:
        states: `[anchors, hidden_size]` per step, inputs of the head's output matrix.
        weight: `[draft_vocab_size, hidden_size]`, that matrix.
        anchors: int64 `[anchors]`, ascending; in step j anchor a predicts the target's distribution at row a + j.
        counted: bool `[steps, anchors]`, which predictions count; their a + j are rows.
        teacher_states: `[rows, teacher_size]`, inputs of the target's lm_head.
        teacher_weight: `[draft_vocab_size, teacher_size]`, its rows for the tokens of the draft vocabulary.
        step_weights: w_j.
    """
    dtype = states[0].dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    count = counted.sum(1)
    counts = count.tolist()
    weight_sum = sum(w for w, n in zip(step_weights, counts, strict=True) if n)
    scales = [w / weight_sum / n if n and weight_sum else 0.0 for w, n in zip(step_weights, counts, strict=True)]
    teacher = teacher_states, teacher_weight.to(teacher_states.dtype)
    problem = _Problem(anchors.cpu(), counted.cpu(), *teacher, kind, eta, scales, chunk, torch.is_grad_enabled())
    total, sums = _Loss.apply(problem, weight, *(state.to(dtype) for state in states))  # type: ignore[no-untyped-call]
    loss, accuracy, acceptance = sums / count.clamp_min(1)
    return UnrolledLoss(total, loss, accuracy, acceptance, count)


class _Problem(NamedTuple):
    """Inputs of the loss besides the head's states and matrix; indices are on the CPU."""

    anchors: Tensor
    counted: Tensor
    teacher_states: Tensor
    teacher_weight: Tensor
    kind: LossKind
    eta: float
    scales: list[float]
    chunk: int
    learns: bool

    def predictions(self, begin: int) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
        """Return the predictions of the chunk of anchors from `begin` on.

        Returns:
            The predicted rows, and per step its number, the anchors, and the places of their rows among these.
        """
        counted = self.counted[:, begin : begin + self.chunk]
        ahead = self.anchors[begin : begin + self.chunk] + torch.arange(len(counted)).unsqueeze(1)
        rows, places = torch.unique(ahead[counted], return_inverse=True)
        device = self.teacher_states.device
        parts = zip(counted, places.split(counted.sum(1).tolist()), strict=True)
        chosen = [((mask.nonzero().flatten() + begin).to(device), place.to(device)) for mask, place in parts]
        return rows.to(device), [(step, *pair) for step, pair in enumerate(chosen) if len(pair[0])]


class _Targets(NamedTuple):
    """The target's distributions at some rows: `[rows, draft_vocab_size]` probabilities; the rest `[rows]`."""

    probs: Tensor
    best: Tensor
    entropy: Tensor


def _targets(states: Tensor, weight: Tensor, dtype: torch.dtype) -> _Targets:
    log_probs = torch.log_softmax((pad_rows(states) @ weight.t())[: len(states)], -1, dtype=dtype)
    # On a CPU this is twenty times as fast as argmax.
    best = log_probs.max(-1).indices
    probs = log_probs.exp()
    return _Targets(probs, best, -log_probs.mul_(probs).sum(-1))


class _Loss(torch.autograd.Function):
    """The loss, and `[3, steps]` sums of loss, agreements and acceptance; the forward pass computes gradients too."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, weight: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(torch.promote_types(states[0].dtype, problem.teacher_states.dtype), torch.float32)
        needed = [problem.learns and needs for needs in ctx.needs_input_grad[1:]]
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed[0] else None
        grads = [torch.zeros_like(x) if needs else None for x, needs in zip(states, needed[1:], strict=True)]
        sums = weight.new_zeros(3, len(states), dtype=wide)
        with torch.autocast(weight.device.type, enabled=False):
            matrix = weight.to(states[0].dtype)
            for begin in range(0, len(problem.anchors), problem.chunk):
                rows, steps = problem.predictions(begin)
                targets = _targets(problem.teacher_states[rows], problem.teacher_weight, wide)
                for step, chosen, places in steps:
                    # Padding rows are zero and so contribute no gradients.
                    state = pad_rows(states[step][chosen])
                    logits = state @ matrix.t()
                    sums[:, step] += _score(logits[: len(chosen)], targets, places, problem)
                    if (grad := grads[step]) is not None:
                        grad.index_copy_(0, chosen, (logits @ matrix)[: len(chosen)])
                    if grad_weight is not None:
                        grad_weight.add_(logits.t() @ state, alpha=problem.scales[step])
        ctx.scales = problem.scales
        ctx.mark_non_differentiable(sums)
        ctx.save_for_backward(None if grad_weight is None else grad_weight.to(weight.dtype), *grads)
        return (sums[0] * sums.new_tensor(problem.scales)).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if x is None else x * (grad_total * scale)
            for x, scale in zip(ctx.saved_tensors, (1.0, *ctx.scales), strict=True)
        ]
        return None, *scaled


def _score(logits: Tensor, targets: _Targets, places: Tensor, problem: _Problem) -> Tensor:
    """Return sums of loss, agreements and acceptance; overwrite `logits` with the gradient of the loss.

    Args:
        logits: `[rows, draft_vocab_size]`.
        places: int64 `[rows]`, indices of their targets.
    """
    rows = max(1, CPU_BLOCK // logits.shape[1] if logits.device.type == "cpu" else len(logits))
    sums = []
    for part, place in zip(torch.split(logits, rows), torch.split(places, rows), strict=True):
        p = targets.probs.index_select(0, place)
        q = part.to(p.dtype, copy=True)
        q -= q.amax(-1, keepdim=True)
        agrees = q.gather(1, targets.best[place].unsqueeze(1)) == 0
        score = (p * q).sum(-1)
        norm = q.exp_().sum(-1, keepdim=True)
        q /= norm
        acceptance = torch.minimum(p, q).sum(-1)
        loss = norm.log().squeeze(1) - score
        gradient = q - p
        if problem.kind != "ce":
            loss -= targets.entropy[place]
        if problem.kind == "lk-hybrid":
            share = torch.exp(-problem.eta * acceptance)
            loss = share * loss + (1 - share) * (1 - acceptance)
            # d(1 - sum min(p, q)) / dq is half the sign of q - p, up to a constant that the softmax removes.
            sign = gradient.sign()
            slope = q * (sign - (q * sign).sum(-1, keepdim=True)) / 2
            gradient = torch.lerp(slope, gradient, share.unsqueeze(1))
        part.copy_(gradient)
        sums.append(torch.stack([loss.sum(), agrees.sum().to(loss.dtype), acceptance.sum()]))
    return torch.stack(sums).sum(0)
