"""Attention of EAGLE-3's unrolled training: over concatenated conversations, then over the same rows step by step."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.reference.rotary_store import rotate_
from specdec.kernels.reference.tree_attention import Attended, attend_generic

_ATEN = torch.ops.aten
# Rows of a conversation that attend together where a window cuts off what is before them.
WINDOW_ROWS = 256
_CUDA = partial(_ATEN._flash_attention_forward.default, dropout_p=0.0, is_causal=True, return_debug_mask=False)
_CUDA_BACKWARD = partial(_ATEN._flash_attention_backward.default, dropout_p=0.0, is_causal=True)


class UnrolledAttention:
    """Attention of one layer in EAGLE-3's training-time test (Li et al. 2025, section 3.2), one object per batch.

    Call 0 takes all rows; each sees its conversation up to itself. Call j > 0 takes the anchors, j tokens later; each
    sees what it saw in call 0, and the keys of its own row from calls 1 to j. Rotary positions are the rows' plus j.
    In a layer with a window of W tokens a row of call j sees only the last W - j keys of call 0, as in drafting. A
    fused kernel computes the causal part, dot products the later keys (one per row and call), and log-sum-exps join
    the two.

    Args:
        lengths: number of rows of each conversation in call 0.
        anchors: int64 `[anchors]`, ascending, the rows that go on after call 0; all by default.
        window: tokens that a row sees, itself included, more than there are calls after the first; 0 for all.

    Attributes:
        stored: rotated keys and values of each call, `[rows, 2 * kv_heads, head_dim]`. Deleting the last entries
            undoes their calls.
    """

    def __init__(self, lengths: Sequence[int], anchors: Tensor | None = None, window: int = 0) -> None:
        starts = list(accumulate(lengths, initial=0))
        spans = [(start, end) for start, end in pairwise(starts) if start < end]
        self.anchors, self.window = anchors, window
        self.first = _Causal(starts, spans)
        self.later = self.first if anchors is None else _Causal(starts, _until_last(spans, anchors.tolist()))
        self.stored: list[Tensor] = []

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        """Attend as `Attention` describes, without changing `qkv`."""
        causal, anchors = (self.later, self.anchors) if self.stored else (self.first, None)
        query, stored = _Rotate.apply(qkv, *rotary, num_heads)  # type: ignore[no-untyped-call]
        self.stored.append(stored)
        rows = causal.starts[-1] if anchors is None else len(anchors)
        assert len(query) == rows, f"{len(query)} rows where {rows} are due"
        seen = None
        if self.window:
            seen = self.window - len(self.stored) + 1
            assert seen > 0, f"{len(self.stored)} calls with a window of {self.window}"
        mixed: Tensor = _Unrolled.apply(causal, anchors, seen, query, *self.stored)  # type: ignore[no-untyped-call]
        return mixed


def _until_last(spans: list[tuple[int, int]], anchors: list[int]) -> list[tuple[int, int]]:
    """Return each span up to its last anchor, since no anchor sees what follows; drop spans without anchors."""
    counts = [(start, bisect_left(anchors, end)) for start, end in spans]
    return [(start, anchors[count - 1] + 1) for start, count in counts if count and anchors[count - 1] >= start]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Rotate(torch.autograd.Function):
    """`rotate_` of queries and keys; in float32 at least, as bfloat16 rows with float32 angles are slow on a CPU."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Return queries `[rows, heads, head_dim]`, and keys and values `[rows, 2 * kv_heads, head_dim]`."""
        kv_heads = (qkv.shape[1] - num_heads) // 2
        query, key, value = qkv.split_with_sizes((num_heads, kv_heads, kv_heads), 1)
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos, sin), torch.cat([_rotated(key, cos, sin), value], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_stored: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        back = sin.roll(sin.shape[-1] // 2, -1)
        key, value = grad_stored.chunk(2, 1)
        grad = torch.cat([_rotated(grad_query, cos, back), _rotated(key, cos, back), value], 1)
        return grad, None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_(x.to(_wide(x), copy=True), cos, sin).to(x.dtype)


class _Unrolled(torch.autograd.Function):
    """Attention to the keys and values of call 0, and to those of the row itself from later calls."""

    @staticmethod
    def forward(
        ctx: Any, causal: "_Causal", anchors: Tensor | None, seen: int | None, query: Tensor, past: Tensor, *own: Tensor
    ) -> Tensor:
        """Attend with `query` `[rows, heads, head_dim]` to `past` and `own`, `[rows, 2 * kv_heads, head_dim]` each.

        Args:
            seen: keys of `past` that a row sees, None for all.
        """
        output, lse = causal.forward(_spread(query, anchors, len(past)), past, seen)
        weights: list[Tensor] = []
        if own:
            picked = (output, lse) if anchors is None else (output[anchors], lse[anchors])
            output, joined, weights = _join(*picked, query, own)
            # Other rows keep the causal log-sum-exp: with another row's, exp(score - lse) could overflow.
            lse = joined if anchors is None else lse.index_copy(0, anchors, joined)
        ctx.causal, ctx.anchors, ctx.seen = causal, anchors, seen
        ctx.save_for_backward(query, past, output, lse, *own, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, past, output, lse, *rest = ctx.saved_tensors
        own, weights = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        # From the joined output and log-sum-exp the kernel gets the weights exp(score - lse) and the gradients of
        # its scores without the other keys (as in ring attention, Liu et al. 2023).
        spread = [_spread(x, ctx.anchors, len(past)) for x in (grad, query, output)]
        grad_query, grad_past = ctx.causal.backward(*spread, past, lse, ctx.seen)
        if ctx.anchors is not None:
            grad_query = grad_query[ctx.anchors]
        grad_own: list[Tensor] = []
        if own:
            more, grad_own = _join_backward(grad, query, output, own, weights)
            grad_query = grad_query + more
        return None, None, None, grad_query.to(query.dtype), grad_past.to(past.dtype), *grad_own


def _spread(x: Tensor, anchors: Tensor | None, rows: int) -> Tensor:
    """Return `[rows, ...]` with `x` at rows `anchors` and zeros elsewhere."""
    return x if anchors is None else x.new_zeros(rows, *x.shape[1:]).index_copy_(0, anchors, x)


def _join(output: Tensor, lse: Tensor, query: Tensor, own: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Join the attention over other keys with that over the rows' own.

    Args:
        output: `[rows, heads, head_dim]`, over the other keys.
        lse: `[rows, heads]`, the log-sum-exp of their scores.
        query: `[rows, heads, head_dim]`.
        own: `[rows, 2 * kv_heads, head_dim]` each.

    Returns:
        Output and log-sum-exp over all, and the weight of each of `own`, `[rows, kv_heads, group, 1]`.
    """
    kv_heads = own[0].shape[1] // 2
    others, others_lse, queries = (_by_group(x, kv_heads) for x in (output, lse.unsqueeze(-1), query))
    pairs = [_by_group(stored, 2 * kv_heads).chunk(2, 1) for stored in own]
    scores = [queries @ key.transpose(2, 3) * query.shape[-1] ** -0.5 for key, _ in pairs]
    joined = torch.logsumexp(torch.stack([others_lse, *scores]), 0)
    weights = [(score - joined).exp_() for score in scores]
    mixed = others * (others_lse - joined).exp_()
    for weight, (_, value) in zip(weights, pairs, strict=True):
        mixed.addcmul_(weight, value)
    return mixed.flatten(1, 2).to(query.dtype), joined.flatten(1), weights


def _join_backward(
    grad: Tensor, query: Tensor, output: Tensor, own: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the contribution of `own` to the gradient of `query`, and the gradients of `own`."""
    kv_heads = own[0].shape[1] // 2
    grads, queries, outputs = (_by_group(x, kv_heads) for x in (grad, query, output))
    mean = (grads * outputs).sum(-1, keepdim=True)
    grad_queries, grad_own = torch.zeros_like(queries), []
    for weight, stored in zip(weights, own, strict=True):
        key, value = _by_group(stored, 2 * kv_heads).chunk(2, 1)
        grad_scores = (grads @ value.transpose(2, 3) - mean) * weight * query.shape[-1] ** -0.5
        grad_queries.addcmul_(grad_scores, key)
        parts = (grad_scores * queries).sum(2), (weight * grads).sum(2)
        grad_own.append(torch.cat(parts, 1).to(stored.dtype))
    return grad_queries.flatten(1, 2), grad_own


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """View `[rows, heads, dim]` as `[rows, kv_heads, group, dim]`, in float32 at least."""
    return x.view(x.shape[0], kv_heads, x.shape[1] // kv_heads, x.shape[2]).to(_wide(x))


class _Causal:
    """Causal attention within each conversation with its log-sum-exp, and the gradients for a given one.

    Args:
        starts: first row of each conversation, and the number of rows.
        spans: the rows that are computed, `[start, end)`, each from the beginning of a conversation. Results of other
            rows are undefined, and their gradient must be zero.
    """

    def __init__(self, starts: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
        self.starts, self.spans = starts, spans

    def forward(self, query: Tensor, stored: Tensor, seen: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the output, of the shape of `query`, and the log-sum-exps, `[rows, heads]`, in float32 at least.

        Args:
            seen: last keys that a row sees, its own included; None for all.
        """
        if _packs(query):
            output, lse, *_ = _CUDA(query, *stored.chunk(2, 1), *self._bounds(query.device), **_cuda_window(seen))
            return output, lse.t()
        output, lse = torch.empty_like(query), query.new_empty(*query.shape[:2], 1, dtype=_wide(query))
        group = query.shape[1] * 2 // stored.shape[1]
        attend = _cpu_attention if query.device.type == "cpu" else plain_attention
        for rows, keys in self._parts(seen):
            q, out, out_lse = (_heads(x[rows], group) for x in (query, output, lse))
            mixed, mixed_lse = attend(q, *_keys_values(stored[keys], group), _mask(rows, keys, seen, query))
            out.copy_(mixed)
            out_lse.copy_(mixed_lse.unsqueeze(-1))
        return output, lse.squeeze(-1)

    def backward(
        self, grad: Tensor, query: Tensor, output: Tensor, stored: Tensor, lse: Tensor, seen: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `query` and `stored` for the gradient of the joined output; see `forward`."""
        if _packs(query):
            # State of the dropout, which is off.
            random = {"rng_state": torch.zeros(2, dtype=torch.uint64, device=query.device), "unused": grad.new_empty(0)}
            rest = (*stored.chunk(2, 1), output, lse.t().contiguous(), *self._bounds(query.device))
            grad_query, *grads = _CUDA_BACKWARD(grad, query, *rest, **random, **_cuda_window(seen))
            return grad_query, torch.cat(grads, 1)
        grad_query, grad_stored = torch.empty_like(query, dtype=_wide(query)), torch.zeros_like(stored)
        group = query.shape[1] * 2 // stored.shape[1]
        attend = _cpu_attention_backward if query.device.type == "cpu" else plain_attention_backward
        for rows, keys in self._parts(seen):
            # On a CPU this is twice as fast in float32 as in bfloat16.
            q, out, out_grad = (_heads(x[rows].to(_wide(x)), group) for x in (query, output, grad))
            k, v = _keys_values(stored[keys].to(_wide(stored)), group)
            out_lse = _heads(lse[rows].unsqueeze(-1), group).squeeze(-1)
            q_grad, *kv_grads = attend(out_grad, q, k, v, out, out_lse, _mask(rows, keys, seen, q))
            _heads(grad_query[rows], group).copy_(q_grad)
            # Keys are seen by several parts where there is a window.
            grad_stored[keys] += torch.cat([x.sum(0) for x in kv_grads]).transpose(0, 1)
        return grad_query, grad_stored

    def _parts(self, seen: int | None) -> list[tuple[slice, slice]]:
        """Return the rows that attend together, and the keys that they see."""
        if seen is None:
            return [(slice(start, end), slice(start, end)) for start, end in self.spans]
        return [
            (slice(first, last), slice(max(start, first + 1 - seen), last))
            for start, end in self.spans
            for first in range(start, end, WINDOW_ROWS)
            for last in [min(end, first + WINDOW_ROWS)]
        ]

    def _bounds(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Return the first rows of conversations, for queries and for keys, and the longest length of each."""
        starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        # For a longest length of 1 the kernel would use another path, with heads in another order.
        longest = max([2, *(end - start for start, end in pairwise(self.starts))])
        return starts, starts, longest, longest


def _packs(query: Tensor) -> bool:
    """Return whether the device can attend in all conversations at once: FlashAttention 2, on Ampere and later."""
    fits = query.is_cuda and query.element_size() == 2 and query.shape[2] % 8 == 0 and query.shape[2] <= 256
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _heads(x: Tensor, group: int) -> Tensor:
    """View `[rows, heads, dim]` as `[group, kv_heads, rows, dim]`."""
    return x.view(x.shape[0], x.shape[1] // group, group, x.shape[2]).permute(2, 1, 0, 3)


def _keys_values(stored: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """View `[rows, 2 * kv_heads, head_dim]` as keys and values, `[group, kv_heads, rows, head_dim]` each."""
    key, value = stored.transpose(0, 1).expand(group, -1, -1, -1).chunk(2, 1)
    return key, value


def _mask(rows: slice, keys: slice, seen: int | None, x: Tensor) -> Tensor | None:
    """Return what is added to the scores of rows and keys that end together, in their dtype; None without a window.

    Args:
        seen: last keys that a row sees.
        x: whose scores they are.
    """
    if seen is None:
        return None
    # How far each key lies behind its row.
    ahead = torch.arange(keys.start, keys.stop, device=x.device) - torch.arange(
        rows.start, rows.stop, device=x.device
    ).unsqueeze(1)
    hidden = (ahead > 0) | (ahead <= -seen)
    return torch.zeros(hidden.shape, dtype=_wide(x), device=x.device).masked_fill_(hidden, float("-inf"))


def _cuda_window(seen: int | None) -> dict[str, int]:
    """Return FlashAttention's arguments for the last keys that a row sees, its own included."""
    return {} if seen is None else {"window_size_left": seen - 1, "window_size_right": 0}


def _causal_mask(rows: int, x: Tensor) -> Tensor:
    """Return a mask `[rows, rows]`, -inf for keys after the query, in the dtype of the scores of `x`."""
    return torch.full((rows, rows), float("-inf"), dtype=_wide(x), device=x.device).triu_(1)


def _cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Sequence[Tensor]:
    """Attend causally, or under a mask; all are `[group, kv_heads, rows, head_dim]`."""
    given = {"is_causal": True} if mask is None else {"attn_mask": mask.to(q.dtype)}
    found: Sequence[Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, **given)
    return found


def _cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None = None
) -> Sequence[Tensor]:
    """Return the gradients of queries, keys and values."""
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    found: Sequence[Tensor] = backward(grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask)
    return found


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Attended:
    """Compute `_cpu_attention` in plain torch, for devices without such a kernel."""
    return attend_generic(q, k, v, _causal_mask(q.shape[2], q) if mask is None else mask, q.shape[3] ** -0.5)


def plain_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_cpu_attention_backward` in plain torch."""
    scale = q.shape[3] ** -0.5
    mask = _causal_mask(q.shape[2], q) if mask is None else mask
    weights = (q @ k.transpose(2, 3) * scale + mask - lse.unsqueeze(-1)).exp_()
    slopes = weights * (grad @ v.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale
    return slopes @ k, slopes.transpose(2, 3) @ q, weights.transpose(2, 3) @ grad
