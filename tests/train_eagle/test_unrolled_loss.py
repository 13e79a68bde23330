"""The chunked loss with gradients of its own against plain formulas under autograd."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.train_eagle.training import unrolled_loss as module
from specdec.train_eagle.training.unrolled_loss import (
    Factors,
    LossKind,
    UnrolledLoss,
    dpace_weights,
    scored_predictions,
)

KINDS: tuple[LossKind, ...] = ("ce", "kl", "lk-hybrid", "ce-l1")


class Case(NamedTuple):
    """Arguments of `scored_predictions` for logits that are one product."""

    states: list[Tensor]
    weight: Tensor
    anchors: Tensor
    counted: Tensor
    teacher_states: Tensor
    teacher_weight: Tensor
    kind: LossKind
    step_weights: list[float]
    chunk: int

    def loss(self) -> UnrolledLoss:
        states, weight, *rest = self
        return scored_predictions([Factors(states, weight)], *rest)[0]


def make_case(
    rows: int,
    anchors: Tensor,
    counted: Tensor,
    vocab: int,
    kind: LossKind,
    chunk: int,
    seed: int,
    scale: float = 1.0,
    step_weights: list[float] | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    steps = len(counted)
    return Case(
        states=[draw(len(anchors), 6).requires_grad_() for _ in range(steps)],
        weight=draw(vocab, 6).requires_grad_(),
        anchors=anchors,
        counted=counted & (anchors + torch.arange(steps).unsqueeze(1) < rows),
        teacher_states=draw(rows, 4),
        teacher_weight=draw(vocab, 4),
        kind=kind,
        step_weights=step_weights or [0.8**step for step in range(steps)],
        chunk=chunk,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 12))
    anchors = torch.tensor(sorted(draw(st.sets(st.integers(0, rows - 1)))), dtype=torch.int64)
    masks = st.lists(st.booleans(), min_size=len(anchors), max_size=len(anchors))
    counted = torch.tensor(draw(st.lists(masks, min_size=1, max_size=4)), dtype=torch.bool)
    return make_case(
        rows,
        anchors,
        counted.view(len(counted), len(anchors)),
        vocab=draw(st.integers(1, 9)),
        kind=draw(st.sampled_from(KINDS)),
        chunk=draw(st.sampled_from([1, 2, 5, 100])),
        seed=draw(st.integers(0, 2**16)),
        scale=draw(st.sampled_from([0.3, 1.0, 3.0])),
        step_weights=[draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in counted],
    )


def naive(case: Case) -> UnrolledLoss:
    """One row after another."""
    zero = torch.zeros((), dtype=torch.float64)
    means, rates, acceptances = [], [], []
    for step, state in enumerate(case.states):
        losses, agreements, overlaps = [], [], []
        for anchor in case.counted[step].nonzero().flatten().tolist():
            p = (case.teacher_weight @ case.teacher_states[case.anchors[anchor] + step]).softmax(0)
            q = (case.weight @ state[anchor]).softmax(0)
            overlap = torch.minimum(p, q).sum()
            cross, kl = -(p * q.log()).sum(), (p * (p / q).log()).sum()
            share = torch.exp(-3 * overlap.detach())
            hybrid = share * kl + (1 - share) * (1 - overlap)
            both = 0.1 * cross + 0.9 * (p - q).abs().sum()
            losses.append({"ce": cross, "kl": kl, "lk-hybrid": hybrid, "ce-l1": both}[case.kind])
            agreements.append((p.argmax() == q.argmax()).double())
            overlaps.append(overlap.detach())
        for into, values in ((means, losses), (rates, agreements), (acceptances, overlaps)):
            into.append(torch.stack(values).mean() if values else zero)
    count = case.counted.sum(1)
    pairs = [(w, mean) for w, mean, n in zip(case.step_weights, means, count.tolist(), strict=True) if n]
    total = sum((w * mean for w, mean in pairs), zero) / (sum(w for w, _ in pairs) or 1.0)
    # Whatever is counted, a gradient for everything.
    total = total + 0 * sum((x.sum() for x in (*case.states, case.weight)), zero)
    loss, accuracy, acceptance = (torch.stack(values).detach() for values in (means, rates, acceptances))
    return UnrolledLoss(total, loss, accuracy, acceptance, count, count[0])


@given(cases())
def test_equals_plain_formulas(case: Case) -> None:
    found, wanted = case.loss(), naive(case)
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-9, atol=1e-12)
    inputs = [*case.states, case.weight]
    grads = [torch.autograd.grad(3 * loss.total, inputs) for loss in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    assert not any(x.requires_grad for x in found[1:])


@given(cases(), st.integers(1, 20))
def test_blocks_of_a_cpu_do_not_show(case: Case, block: int) -> None:
    whole = case.loss()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_BLOCK", block)
        torch.testing.assert_close(tuple(case.loss()), tuple(whole))


EVERY = torch.ones(3, 40, dtype=torch.bool)
EVERY[1, ::3] = False


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_gradcheck(kind: LossKind) -> None:
    case = make_case(9, torch.tensor([0, 1, 4, 6]), EVERY[:, :4], 5, kind, 3, seed=0)

    def total(weight: Tensor, *states: Tensor) -> Tensor:
        return case._replace(states=list(states), weight=weight).loss().total

    assert torch.autograd.gradcheck(total, (case.weight, *case.states))


def test_nothing_counted() -> None:
    case = make_case(9, torch.arange(4), EVERY[:, :4] & False, 5, "ce", 3, seed=0)
    loss = case.loss()
    loss.total.backward()
    assert loss.total == 0
    assert not loss.count.any()
    assert not loss.loss.any()
    assert all(x.grad is not None and not x.grad.any() for x in (*case.states, case.weight))


class Products(TorchDispatchMode):
    """Counts matrix products and collects their types; elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.largest = 0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.count += 1
            self.dtypes |= {x.dtype for x in args}
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return made


def test_only_wanted_gradients_are_computed() -> None:
    case = make_case(50, torch.arange(40), EVERY, 30, "ce", 16, seed=0)
    frozen = case._replace(weight=case.weight.detach())
    with Products() as all_of:
        case.loss().total.backward()
    with Products() as without_weight:
        frozen.loss().total.backward()
    with Products() as none, torch.no_grad():
        assert not case.loss().total.requires_grad
    # Chunks of 16, 16 and 8 anchors, three steps; in each a product for the logits, the states and the matrix.
    assert (all_of.count, without_weight.count, none.count) == (3 + 27, 3 + 18, 3 + 9)
    for both in zip(*(torch.autograd.grad(x.loss().total, x.states) for x in (case, frozen)), strict=True):
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_one_chunk_and_step(kind: LossKind) -> None:
    anchors, steps, vocab, chunk = 400, 3, 100, 10
    case = make_case(500, torch.arange(anchors), torch.ones(steps, anchors, dtype=torch.bool), vocab, kind, chunk, 0)
    with Products() as made:
        case.loss().total.backward()
    # The target's rows of a chunk: as many as its anchors, and those that later steps look ahead to.
    assert made.largest <= max((chunk + steps - 1) * vocab, anchors * 6)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_of_the_heads_products(kind: LossKind) -> None:
    exact = make_case(50, torch.arange(40), EVERY, 30, kind, 16, seed=0)
    single = exact._replace(
        states=[x.detach().float().requires_grad_() for x in exact.states],
        weight=exact.weight.detach().float().requires_grad_(),
        teacher_states=exact.teacher_states.float(),
        teacher_weight=exact.teacher_weight.float(),
    )
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        found = single.loss()
    # What the target says is computed in its own type.
    assert products.dtypes == {torch.bfloat16, torch.float32}
    right = exact.loss()
    torch.testing.assert_close(found.total.double(), right.total, rtol=0.02, atol=0)
    torch.testing.assert_close(found.acceptance.double(), right.acceptance, rtol=0.02, atol=0)
    grads, right_grads = (
        torch.autograd.grad(x.total, [*c.states, c.weight]) for x, c in ((found, single), (right, exact))
    )
    for got, wanted in zip(grads, right_grads, strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - wanted).norm() < 0.05 * wanted.norm()


def test_bfloat16_is_of_products_alone() -> None:
    """Softmax and sums, those over chunks too, are float32."""
    anchors = 600
    case = make_case(anchors, torch.arange(anchors), torch.ones(1, anchors, dtype=torch.bool), 30, "ce", 1, seed=0)
    state, weight, teacher_state, teacher_weight = (
        x.detach().bfloat16().requires_grad_()
        for x in (case.states[0], case.weight, case.teacher_states, case.teacher_weight)
    )
    case = case._replace(states=[state], weight=weight.detach().float().requires_grad_())
    case = case._replace(teacher_states=teacher_state.detach(), teacher_weight=teacher_weight.detach())
    found = case.loss()
    logits, wanted = (state @ weight.t()).float(), (teacher_state @ teacher_weight.t()).float()
    right = torch.nn.functional.cross_entropy(logits, wanted.softmax(-1))
    torch.testing.assert_close(found.total, right, rtol=1e-5, atol=0)
    (grad,), (right_grad,) = torch.autograd.grad(found.total, case.weight), torch.autograd.grad(right, weight)
    assert (grad - right_grad).norm() < 0.01 * right_grad.norm()


def test_weights_of_slots_by_what_is_lost_behind_them() -> None:
    """Two blocks of three slots; the second one has labels for two."""
    acceptance = torch.tensor([[0.8, 0.1], [0.5, 0.6], [0.25, 0.0]])
    counted = torch.tensor([[True, True], [True, True], [True, False]])
    found = dpace_weights(acceptance, counted, 0.5)
    # (0.9, 0.75, 0.625) and (0.55, 0.8).
    expected = [[0.9 * (1 + 0.75 * (1 + 0.625)), 0.55 * 1.8], [0.9 * 0.75 * 1.625, 0.55 * 0.8], [0.9 * 0.75 * 0.625, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))
    # With alpha 1, the slots from here on.
    assert dpace_weights(acceptance, counted, 1.0).tolist() == [[3, 2], [2, 1], [1, 0]]


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_paced_predictions_do_not_depend_on_the_chunks(chunk: int) -> None:
    """Values, gradients and acceptances; an anchor in the middle has no predictions."""
    counted = torch.tensor([[True, True, False, True, True], [True, False, False, True, True]])
    case = make_case(9, torch.arange(5), counted, vocab=7, kind="ce", chunk=chunk, seed=3)

    def paced(size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        logits, teacher = [Factors(case.states, case.weight)], (case.teacher_states, case.teacher_weight)
        loss, accepted = scored_predictions(
            logits, case.anchors, case.counted, *teacher, case.kind, case.step_weights, size, dpace_alpha=0.4
        )
        return loss.total, accepted, list(torch.autograd.grad(loss.total, [*case.states, case.weight]))

    torch.testing.assert_close(paced(chunk), paced(100))
