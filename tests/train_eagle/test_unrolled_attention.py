"""The unrolled attention against one that builds every mask, values and gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import Attention, LlamaLayer
from specdec.draft_heads.llama.rope import RopeConfig, Rotary, rotary_at
from specdec.train_eagle.passes import unrolled_attention
from specdec.train_eagle.passes.unrolled_attention import UnrolledAttention, plain_attention, plain_attention_backward

CPU = torch.device("cpu")


class Case(NamedTuple):
    """Conversations, the rows that go on, and sizes."""

    lengths: list[int]
    anchors: Tensor | None
    heads: int
    kv_heads: int
    dim: int
    steps: int
    scale: float
    seed: int
    window: int = 0

    def attention(self, anchors: Tensor | None) -> UnrolledAttention:
        return UnrolledAttention(self.lengths, anchors, self.window)

    @property
    def rows(self) -> list[Tensor]:
        """The rows of each call."""
        everything = torch.arange(sum(self.lengths))
        return [everything, *[everything if self.anchors is None else self.anchors] * (self.steps - 1)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    kept = draw(st.none() | st.sets(st.integers(0, sum(lengths) - 1)))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (8, 2)]))
    steps = draw(st.integers(1, 5))
    return Case(
        lengths=lengths,
        anchors=None if kept is None else torch.tensor(sorted(kept), dtype=torch.int64),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16])),
        steps=steps,
        window=draw(st.just(0) | st.integers(steps, 12)),
        scale=draw(st.sampled_from([1.0, 20.0])),
        seed=draw(st.integers(0, 2**16)),
    )


class NaiveAttention:
    """Softmax over a mask of all keys of all calls."""

    def __init__(self, lengths: list[int], anchors: Tensor | None, window: int = 0) -> None:
        self.window = window
        self.conversation = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.everything = torch.arange(sum(lengths))
        self.anchors = self.everything if anchors is None else anchors
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        cos, sin = rotary
        kv_heads = (qkv.shape[1] - num_heads) // 2
        query, key, value = qkv.split([num_heads, kv_heads, kv_heads], 1)
        query, key = (x * cos + x.roll(x.shape[-1] // 2, -1) * sin for x in (query, key))
        rows = self.anchors if self.keys else self.everything
        self.keys.append(key.repeat_interleave(num_heads // kv_heads, 1))
        self.values.append(value.repeat_interleave(num_heads // kv_heads, 1))
        alike = self.conversation[rows].unsqueeze(1) == self.conversation
        masks = [alike & (self.everything <= rows.unsqueeze(1))]
        if self.window:
            # A row of call j stands j tokens behind its own place.
            masks[0] &= self.everything > rows.unsqueeze(1) + len(self.keys) - 1 - self.window
        masks += [torch.eye(len(rows), dtype=torch.bool)] * (len(self.keys) - 1)
        scores = torch.einsum("rhd,khd->hrk", query, torch.cat(self.keys)) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~torch.cat(masks, 1), float("-inf")).softmax(-1)
        return torch.einsum("hrk,khd->rhd", weights, torch.cat(self.values))


def inputs(case: Case, dtype: torch.dtype = torch.float64, device: torch.device = CPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    size = case.heads + 2 * case.kv_heads, case.dim
    drawn = [torch.randn(len(rows), *size, generator=generator, dtype=torch.float64) for rows in case.rows]
    return [(x * case.scale).to(device, dtype).requires_grad_() for x in drawn]


def run(case: Case, attention: Attention, qkvs: list[Tensor], angles: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of all calls, and the gradients of a fixed function of them."""
    device = qkvs[0].device
    table = RopeConfig().table(case.dim, 64, angles).to(device)
    positions = torch.cat([torch.arange(length) for length in case.lengths])
    generator = torch.Generator().manual_seed(case.seed + 1)
    outputs, total = [], torch.zeros((), dtype=torch.float64, device=device)
    for step, (rows, qkv) in enumerate(zip(case.rows, qkvs, strict=True)):
        # A copy, as `Attention` may write to its argument.
        output = attention(qkv.clone(), rotary_at(table, (positions[rows] + step).to(device)), case.heads)
        weight = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(device, output.dtype)
        total = total + (output * weight).double().sum()
        outputs.append(output)
    return outputs, list(torch.autograd.grad(total, qkvs))


@pytest.mark.long
@given(cases())
def test_equals_explicit_masks(case: Case) -> None:
    qkvs = inputs(case)
    with pytest.MonkeyPatch.context() as patch:
        # Parts that are shorter than conversations.
        patch.setattr(unrolled_attention, "WINDOW_ROWS", 4)
        found = run(case, case.attention(case.anchors), qkvs, torch.float64)
    wanted = run(case, NaiveAttention(case.lengths, case.anchors, case.window), qkvs, torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11 * case.scale)


EXAMPLE = Case([7, 1, 30, 12], torch.tensor([0, 3, 7, 20, 21, 37, 40]), 4, 2, 16, 4, 1.0, 0)


def check_rounding(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Errors are of the size of the type's rounding."""
    qkvs = inputs(case, dtype, device)
    anchors = None if case.anchors is None else case.anchors.to(device)
    outputs, grads = run(case, case.attention(anchors), qkvs, torch.float32)
    exact = [qkv.detach().cpu().double().requires_grad_() for qkv in qkvs]
    naive = NaiveAttention(case.lengths, case.anchors, case.window)
    right_outputs, right_grads = run(case, naive, exact, torch.float64)
    for found, right in zip(outputs + grads, right_outputs + right_grads, strict=True):
        assert found.dtype == dtype
        error = (found.detach().cpu().double() - right).abs().max() / right.abs().max()
        assert error < 2 * max(torch.finfo(dtype).eps, 5e-6)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("anchors", [EXAMPLE.anchors, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding(dtype: torch.dtype, anchors: Tensor | None, window: int) -> None:
    check_rounding(EXAMPLE._replace(anchors=anchors, window=window), dtype, CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("lengths", [EXAMPLE.lengths, [1] * 50])
@pytest.mark.parametrize("anchors", [EXAMPLE.anchors, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_on_a_gpu(dtype: torch.dtype, anchors: Tensor | None, lengths: list[int], window: int) -> None:
    check_rounding(EXAMPLE._replace(anchors=anchors, lengths=lengths, window=window), dtype, torch.device("cuda"))


def test_conversations_do_not_leak() -> None:
    case = EXAMPLE._replace(anchors=None)
    qkvs = inputs(case)
    table = RopeConfig().table(case.dim, 64, torch.float64)
    attention = UnrolledAttention(case.lengths)
    last = [attention(qkv * 1, rotary_at(table, torch.arange(len(qkv))), case.heads) for qkv in qkvs][-1]
    grads = torch.autograd.grad(last[8:38].sum(), qkvs)
    for grad in grads:
        assert not grad[:8].any()
        assert not grad[38:].any()
        assert grad[8:38].any()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor):
                self.size = max(self.size, x.numel())
        return made


@pytest.mark.long
def test_memory_is_linear_in_rows() -> None:
    case = Case([16] * 64, None, 2, 1, 8, 5, 1.0, 0)
    qkvs = inputs(case)
    with LargestTensor() as largest:
        run(case, UnrolledAttention(case.lengths), qkvs, torch.float64)
    assert largest.size <= qkvs[0].numel()
    assert largest.size < 1024 * 1024 // 16


def test_serves_a_layer_under_autocast() -> None:
    rope = RopeConfig()
    layer = LlamaLayer(LlamaConfig(50, 32, 48, 1, 4, 2, 8, 64, 1e-5, rope, qk_norm=True))
    attention = UnrolledAttention([5, 3], torch.tensor([1, 6]))
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    table = rope.table(8, 64, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        first = layer.form(None)(hidden, rotary_at(table, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])), attention)
        second = layer.form(None)(first[[1, 6]], rotary_at(table, torch.tensor([2, 2])), attention)
    second.float().sum().backward()
    assert {stored.dtype for stored in attention.stored} == {torch.bfloat16}
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


@given(st.integers(1, 9), st.integers(0, 2**16))
def test_plain_attention_is_the_kernel(rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad, out = torch.randn(5, 2, 3, rows, 8, generator=generator, dtype=torch.float64)
    found, wanted = plain_attention(q, k, v), unrolled_attention._cpu_attention(q, k, v)
    torch.testing.assert_close(tuple(found), tuple(wanted))
    # Output and log-sum-exp as if there were more keys.
    lse = found.log_sum_exp + torch.rand(found.log_sum_exp.shape, generator=generator)
    grads = plain_attention_backward(grad, q, k, v, out, lse)
    torch.testing.assert_close(grads, tuple(unrolled_attention._cpu_attention_backward(grad, q, k, v, out, lse)))


def by_conversation(
    starts: Tensor, heads: int, kernel: Callable[..., tuple[Tensor, ...]], *packed: Tensor
) -> list[tuple[Tensor, ...]]:
    """`kernel` for each conversation of `[rows, heads, ...]`, with keys of all query heads."""
    full = [x.repeat_interleave(heads // x.shape[1], 1) for x in packed]
    spans = zip(starts.tolist(), starts.tolist()[1:], strict=False)
    return [kernel(*(x[start:end].transpose(0, 1).unsqueeze(0) for x in full)) for start, end in spans]


def within(kernel: Callable[..., tuple[Tensor, ...]], window: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """`kernel` under FlashAttention's window: a row sees `window_size_left` keys before its own."""
    left = window.get("window_size_left")
    if left is None:
        return kernel
    assert window["window_size_right"] == 0

    def masked(*given: Tensor) -> tuple[Tensor, ...]:
        rows = given[0].shape[2]
        places = torch.arange(rows)
        behind = places.unsqueeze(1) - places
        seen = (behind >= 0) & (behind <= left)
        return kernel(*given, torch.zeros(rows, rows, dtype=torch.float64).masked_fill(~seen, float("-inf")))

    return masked


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, **window: int
) -> tuple[Tensor, ...]:
    """`_flash_attention_forward` as documented: packed rows, and `[heads, rows]` log-sum-exps."""
    assert cum_seq_q.dtype == torch.int32
    assert cum_seq_k is cum_seq_q
    assert max_q == max_k >= cum_seq_q.diff().max()
    parts = by_conversation(cum_seq_q, q.shape[1], within(plain_attention, window), q, k, v)
    output = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    return output, torch.cat([part[1][0] for part in parts], 1)


def packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, *_: Any, **window: Any
) -> tuple[Tensor, ...]:
    """`_flash_attention_backward`; the kernel reads the memory of the log-sum-exps, whatever their strides."""
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))

    def kernel(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return within(plain_attention_backward, window)(grad, q, k, v, out, lse.squeeze(-1))

    parts = by_conversation(starts, q.shape[1], kernel, grad, q, k, v, out, lse.t().unsqueeze(-1))
    dq, dk, dv = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))
    return dq, dk.unflatten(1, (k.shape[1], -1)).sum(2), dv.unflatten(1, (k.shape[1], -1)).sum(2)


@given(cases())
def test_packed_kernel_is_called_as_documented(case: Case) -> None:
    qkvs = inputs(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unrolled_attention, "_packs", lambda _: True)
        patch.setattr(unrolled_attention, "_CUDA", packed_forward)
        patch.setattr(unrolled_attention, "_CUDA_BACKWARD", packed_backward)
        found = run(case, case.attention(case.anchors), qkvs, torch.float64)
    wanted = run(case, NaiveAttention(case.lengths, case.anchors, case.window), qkvs, torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11 * case.scale)


@pytest.mark.parametrize("seen", [None, 3])
def test_packed_kernel_takes_the_arguments(seen: int | None) -> None:
    """Torch's own shapes and types of the CUDA kernel's results, without a GPU."""
    causal = UnrolledAttention([3, 8, 1, 5], torch.tensor([2, 4, 13])).later
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(unrolled_attention, "_packs", lambda _: True)
        query, stored = (torch.empty(17, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 4))
        output, lse = causal.forward(query, stored, seen)
        assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((17, 4), torch.float32)
        grads = causal.backward(output, query, output, stored, lse, seen)
        assert [grad.shape for grad in grads] == [query.shape, stored.shape]
