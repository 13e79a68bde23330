"""Loss of a head's predictions, compared with the target at every step: a pass over its own states, or a slot."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec.kernels.reference.projection import pad_rows
from specdec.train_eagle.training.train_config import LossKind

# Logits that a CPU processes at a time, so that intermediate results stay in a core's cache.
CPU_BLOCK = 2**17
# Rate at which `lk-hybrid` goes over to acceptance.
ETA = 3.0
# Parts of `ce-l1` (DSpark, 2607.05147).
CE_SHARE, L1_SHARE = 0.1, 0.9


class UnrolledLoss(NamedTuple):
    """Means over the counted predictions. Values per step are detached, and 0 if no prediction counts.

    Attributes:
        total: the loss to minimise, a scalar with gradient.
        loss: `[steps]`, its parts.
        accuracy: `[steps]`, share of predictions in which target and head have the same likeliest token.
        acceptance: `[steps]`, chance that a token drawn from the head's distribution q is accepted, sum of min(p, q).
        count: int64 `[steps]`.
        weight: of the batch among others, a scalar: as many predictions as `total` is the mean of. Over several passes,
            which count unequally many, it is taken to be the mean of those of the first.
    """

    total: Tensor
    loss: Tensor
    accuracy: Tensor
    acceptance: Tensor
    count: Tensor  # type: ignore[assignment]  # tuple has a method of that name
    weight: Tensor

    @classmethod
    def pooled(cls, losses: "Sequence[UnrolledLoss]") -> Self:
        """Return the loss of several batches together, where each prediction counts the same."""
        total, *means, count, weights = (torch.stack(values) for values in zip(*losses, strict=True))
        shares = count / count.sum(0).clamp_min(1)
        loss, accuracy, acceptance = ((mean.float() * shares).sum(0) for mean in means)
        mean_total = (total.float() * weights).sum() / weights.sum().clamp_min(1)
        return cls(mean_total, loss, accuracy, acceptance, count.sum(0), weights.sum())


class Factors(NamedTuple):
    """A product that is part of the logits.

    Attributes:
        states: `[anchors, size]` per step.
        weight: `[draft_vocab_size, size]`.
    """

    states: Sequence[Tensor]
    weight: Tensor


def scored_predictions(
    logits: Sequence[Factors],
    anchors: Tensor,
    counted: Tensor,
    teacher_states: Tensor,
    teacher_weight: Tensor,
    kind: LossKind,
    step_weights: Sequence[float],
    chunk: int = 512,
    dpace_alpha: float | None = None,
) -> tuple[UnrolledLoss, Tensor]:
    """Return the weighted mean over steps, sum_j w_j mean_j / sum_j w_j, of those with counted predictions.

    With `dpace_alpha`, each prediction has a weight of its own instead, `dpace_weights`, and the loss is the sum of the
    weighted predictions over the number of anchors that have any.

    The loss between the target's distribution p and the head's q is one of:

    - `ce`: -sum p log q, as EAGLE does (Li et al. 2024, equation 2).
    - `kl`: KL(p || q), which has the same gradient.
    - `lk-hybrid`: l KL(p || q) + (1 - l) (1 - sum min(p, q)), where l = exp(-3 sum min(p, q)), without gradient:
      the better the head, the more it is trained for acceptance (LK losses, Samarin et al. 2026, arXiv 2602.23881;
      the weight l is computed per prediction, as in vLLM's `speculators`).
    - `ce-l1`: 0.1 ce + 0.9 sum |p - q|, twice the total variation, as DSpark does.

    Gradients are computed along with the loss, `chunk` anchors at a time, so that logits exist for only one chunk and
    step at a time (as in Liger Kernel, Hsu et al. 2024). Products use the dtype of the states, or autocast's; the rest
    is float32 at least.

    Args:
        logits: the products whose sum are the head's logits: states and its output matrix, and perhaps a low-rank bias.
        anchors: int64 `[anchors]`, ascending; in step j anchor a predicts the target's distribution at row a + j.
        counted: bool `[steps, anchors]`, which predictions count; their a + j are rows.
        teacher_states: `[rows, teacher_size]`, inputs of the target's lm_head.
        teacher_weight: `[draft_vocab_size, teacher_size]`, its rows for the tokens of the draft vocabulary.
        step_weights: w_j.
        dpace_alpha: see above; each anchor's counted predictions must then be its first ones.

    Returns:
        The loss, and the acceptance of each prediction, `[steps, anchors]`, 0 where it does not count.
    """
    (states, weight), *_ = logits
    dtype = states[0].dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    count = counted.sum(1)
    counts = count.tolist()
    weight_sum = sum(w for w, n in zip(step_weights, counts, strict=True) if n)
    scales = [w / weight_sum / n if n and weight_sum else 0.0 for w, n in zip(step_weights, counts, strict=True)]
    if dpace_alpha is not None:
        scales = [1.0 / max(1, int(counted.any(0).sum()))] * len(counts)
    teacher = teacher_states, teacher_weight.to(teacher_states.dtype)
    given_places = anchors.cpu(), counted.cpu()
    problem = _Problem(*given_places, *teacher, kind, scales, chunk, torch.is_grad_enabled(), dpace_alpha)
    given = [state.to(dtype) for product in logits for state in product.states]
    weights = [product.weight for product in logits]
    total, sums, accepted = _Loss.apply(problem, len(weights), *weights, *given)  # type: ignore[no-untyped-call]
    loss, accuracy, _ = sums / count.clamp_min(1)
    return UnrolledLoss(total, loss, accuracy, accepted.sum(1) / count.clamp_min(1), count, count[0]), accepted


def dpace_weights(acceptance: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """Return the weight of each slot of a block: the tokens expected to be accepted from there on (D-PACE, 2605.18810).

    w_j = sum over m >= j of prod over i <= m of (1 - alpha) q_i + alpha (equations 7 and 8): the expected length of the
    accepted path behind slot j, smoothed. q_i is the paper's probability of the one token of its label; here labels are
    distributions, and q_i is the chance that slot i's token is accepted.

    Args:
        acceptance: q, `[slots, anchors]`.
        counted: bool, of the same shape: slots that have labels, the first ones of each anchor.
        alpha: above 0 later slots have some weight although the first ones are never right.
    """
    paths = ((1 - alpha) * acceptance + alpha).cumprod(0) * counted
    return paths.flip(0).cumsum(0).flip(0)


class _Problem(NamedTuple):
    """Inputs of the loss besides the head's states and matrix; indices are on the CPU."""

    anchors: Tensor
    counted: Tensor
    teacher_states: Tensor
    teacher_weight: Tensor
    kind: LossKind
    scales: list[float]
    chunk: int
    learns: bool
    dpace_alpha: float | None

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
    """The loss, `[3, steps]` sums of loss, agreements and weighted loss, and acceptances; the forward pass computes
    gradients too.
    """

    @staticmethod
    def forward(ctx: Any, problem: _Problem, products: int, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, states = inputs[:products], inputs[products:]
        first, steps = weights[0], len(states) // products
        wide = torch.promote_types(torch.promote_types(states[0].dtype, problem.teacher_states.dtype), torch.float32)
        needed = [problem.learns and needs for needs in ctx.needs_input_grad[2:]]
        grad_weights = [
            torch.zeros_like(x, dtype=wide) if needs else None for x, needs in zip(weights, needed, strict=False)
        ]
        grads = [torch.zeros_like(x) if needs else None for x, needs in zip(states, needed[products:], strict=True)]
        sums, accepted = first.new_zeros(3, steps, dtype=wide), first.new_zeros(problem.counted.shape, dtype=wide)
        with torch.autocast(first.device.type, enabled=False):
            matrices = [weight.to(states[0].dtype) for weight in weights]
            for begin in range(0, len(problem.anchors), problem.chunk):
                rows, predicted = problem.predictions(begin)
                targets = _targets(problem.teacher_states[rows], problem.teacher_weight, wide)
                weights_of = None
                if problem.dpace_alpha is not None:
                    # A slot's weight depends on all later slots, so the logits are computed twice.
                    for step, chosen, places in predicted:
                        logits = _logits([state[chosen] for state in states[step::steps]], matrices)[1]
                        accepted[step, chosen] = _acceptance(logits[: len(chosen)], targets, places)
                    own = slice(begin, begin + problem.chunk)
                    counted = problem.counted[:, own].to(accepted.device)
                    weights_of = dpace_weights(accepted[:, own], counted, problem.dpace_alpha)
                for step, chosen, places in predicted:
                    parts, logits = _logits([state[chosen] for state in states[step::steps]], matrices)
                    weighted = None if weights_of is None else weights_of[step, chosen - begin]
                    sums[:, step] += _score(
                        logits[: len(chosen)], targets, places, problem, accepted[step], chosen, weighted
                    )
                    for part, matrix, grad, grad_weight in zip(
                        parts, matrices, grads[step::steps], grad_weights, strict=True
                    ):
                        if grad is not None:
                            grad.index_copy_(0, chosen, (logits @ matrix)[: len(chosen)])
                        if grad_weight is not None:
                            grad_weight.add_(logits.t() @ part, alpha=problem.scales[step])
        ctx.scales = [*(1.0 for _ in weights), *problem.scales * products]
        ctx.mark_non_differentiable(sums, accepted)
        given = [None if x is None else x.to(weight.dtype) for x, weight in zip(grad_weights, weights, strict=True)]
        ctx.save_for_backward(*given, *grads)
        return (sums[2] * sums.new_tensor(problem.scales)).sum(), sums, accepted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if x is None else x * (grad_total * scale)
            for x, scale in zip(ctx.saved_tensors, ctx.scales, strict=True)
        ]
        return None, None, *scaled


def _logits(states: Sequence[Tensor], matrices: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the states with rows of padding, which are zero and so contribute no gradients, and their logits."""
    parts = [pad_rows(state) for state in states]
    logits = parts[0] @ matrices[0].t()
    for part, matrix in zip(parts[1:], matrices[1:], strict=True):
        logits.addmm_(part, matrix.t())
    return parts, logits


def _blocks(logits: Tensor, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows that are processed at a time, and their targets' places."""
    rows = max(1, CPU_BLOCK // logits.shape[1] if logits.device.type == "cpu" else len(logits))
    return zip(torch.split(logits, rows), torch.split(places, rows), strict=True)


def _acceptance(logits: Tensor, targets: _Targets, places: Tensor) -> Tensor:
    """Return sum min(p, q) of each row."""
    found = []
    for part, place in _blocks(logits, places):
        p = targets.probs.index_select(0, place)
        found.append(torch.minimum(p, torch.softmax(part, -1, dtype=p.dtype)).sum(-1))
    return torch.cat(found)


def _score(
    logits: Tensor,
    targets: _Targets,
    places: Tensor,
    problem: _Problem,
    accepted: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
) -> Tensor:
    """Return sums of loss, agreements and weighted loss; overwrite `logits` with the gradient of the last.

    Args:
        weights: `[rows]`; None if all are 1.
        logits: `[rows, draft_vocab_size]`.
        places: int64 `[rows]`, indices of their targets.
        accepted: `[anchors]`, gets the rows' acceptance at `chosen`, int64 `[rows]`.
    """
    losses, sums, overlaps = [], [], []
    for part, place in _blocks(logits, places):
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
        if problem.kind in ("kl", "lk-hybrid"):
            loss -= targets.entropy[place]
        if problem.kind in ("lk-hybrid", "ce-l1"):
            # d(1 - sum min(p, q)) / dq is half the sign of q - p, up to a constant that the softmax removes.
            sign = gradient.sign()
            slope = q * (sign - (q * sign).sum(-1, keepdim=True)) / 2
            if problem.kind == "lk-hybrid":
                share = torch.exp(-ETA * acceptance)
                loss = share * loss + (1 - share) * (1 - acceptance)
                gradient = torch.lerp(slope, gradient, share.unsqueeze(1))
            else:
                # sum |p - q| is twice 1 - sum min(p, q).
                loss = CE_SHARE * loss + 2 * L1_SHARE * (1 - acceptance)
                gradient = gradient.mul_(CE_SHARE).add_(slope, alpha=2 * L1_SHARE)
        part.copy_(gradient)
        overlaps.append(acceptance)
        losses.append(loss)
        sums.append(agrees.sum().to(loss.dtype))
    accepted[chosen] = torch.cat(overlaps)
    loss = torch.cat(losses)
    if weights is not None:
        logits.mul_(weights.unsqueeze(1))
    return torch.stack([loss.sum(), torch.stack(sums).sum(), (loss if weights is None else loss * weights).sum()])
