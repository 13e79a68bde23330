"""The loss of packed blocks against a plain loop over anchors and slots, and against conversations one by one."""

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.train_eagle.passes import block_pass
from specdec.train_eagle.passes.features import FeatureBatch
from specdec.train_eagle.training.block_trainer import BlockTrainer
from specdec.train_eagle.training.head_trainer import LossSettings
from specdec.train_eagle.training.unrolled_loss import UnrolledLoss
from tests.block_heads import Block, block, path_logits, slots, states
from tests.checkpoints import FEW, TARGET_HIDDEN, TARGET_OUT, VOCAB
from tests.draft_heads.built_blocks import built

HEADS: dict[str, Any] = {
    "dflash": lambda: block(1, anchor_first=False),
    "dflash, causal, few tokens": lambda: block(2, layers=1, anchor_first=False, causal=True, tokens=FEW),
    "dspark": lambda: block(3, rank=4, confidence=True),
    "dspark, gated, few tokens": lambda: block(4, rank=4, kind="gated", tokens=FEW, confidence=True),
    "dspark, rnn": lambda: block(5, layers=1, rank=4, kind="rnn", confidence=True),
}
LENGTHS = (9, 1, 14, 2)
# Parameters by the plain head's names, where the module has the same.
LEARNT = ("fc.weight", "norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def batch(head: Block, seed: int = 0) -> FeatureBatch:
    """Return conversations whose assistant has two turns."""
    draw, total = torch.Generator().manual_seed(seed), sum(LENGTHS)
    known = torch.tensor(head.tokens or list(range(VOCAB - 1)))
    tokens = known[torch.randint(len(known), (total,), generator=draw)]
    # One token that a head with few tokens cannot propose.
    tokens[6] = 1 if head.tokens is None else next(token for token in range(VOCAB) if token not in head.tokens)
    mask = torch.tensor([place % 12 not in (3, 4) for place in range(total)])
    features, *taps = torch.randn(1 + len(head.layer_ids), total, TARGET_HIDDEN, generator=draw).double()
    return FeatureBatch(LENGTHS, tokens, mask, features, torch.cat(taps, -1))


def options(head: Block, **changes: Any) -> LossSettings:
    kind = "ce-l1" if head.weights.get("markov_head.markov_w1.weight") is not None else "ce"
    return LossSettings(**{"loss": kind, "step_decay": 0.7, "confidence_weight": 0.5, **changes})


def trainer(head: Block, **changes: Any) -> BlockTrainer:
    module = built(head).requires_grad_()
    tokens = None if module.lm_head is None else module.draft_tokens
    return BlockTrainer(module, TARGET_OUT.double(), options(head, **changes), module.lm_head, tokens).double()


def looped(head: Block, given: FeatureBatch, used: LossSettings) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the loss of all anchors, one after another, and per slot the losses that count."""
    known = head.tokens or list(range(VOCAB))
    teacher, parts = TARGET_OUT.double()[known], torch.zeros(3, dtype=torch.float64)
    # Of D-PACE: the sum over anchors, and how many count.
    paced, anchors = torch.zeros((), dtype=torch.float64), 0
    by_slot: list[list[Tensor]] = [[] for _ in range(head.size if head.anchor_first else head.size - 1)]
    start = 0
    for length in given.lengths:
        tokens = given.tokens[start : start + length].tolist()
        said = given.mask[start : start + length].tolist()
        taps = [tap[start : start + length] for tap in given.taps.chunk(len(head.layer_ids), -1)]
        for anchor in range(length - 1):
            if not (said[anchor] and said[anchor + 1]):
                continue
            found = slots(head, states(head, tokens[: anchor + 1], [tap[:anchor] for tap in taps]))
            losses, chances = [], []
            for slot in range(len(found)):
                place = anchor + slot + 1
                if place >= length or not said[place] or tokens[place] not in known:
                    break
                q = path_logits(head, found, tokens[anchor], tokens[anchor + 1 : place]).softmax(0)
                p = (teacher @ given.features[start + place - 1]).softmax(0)
                loss = cross = -(p * q.log()).sum()
                if used.loss == "ce-l1":
                    loss = 0.1 * cross + 0.9 * (p - q).abs().sum()
                doubt = torch.zeros((), dtype=torch.float64)
                if "confidence_head.proj.weight" in head.weights:
                    before = head.weights["markov_head.markov_w1.weight"].double()[tokens[place - 1]]
                    weight, bias = (
                        head.weights[f"confidence_head.proj.{name}"].double() for name in ("weight", "bias")
                    )
                    logit = weight[0] @ torch.cat([found[slot], before]) + bias[0]
                    accepted = (1 - (p - q).abs().sum() / 2).detach()
                    doubt = F.binary_cross_entropy_with_logits(logit, accepted)
                by_slot[slot].append(loss.detach())
                losses.append(loss)
                chances.append(1 - float((p - q).detach().abs().sum()) / 2)
                share = used.step_decay**slot
                parts = parts + share * torch.stack([loss, doubt, torch.ones_like(loss)])
            anchors += bool(losses)
            smoothed = [(1 - used.dpace_alpha) * chance + used.dpace_alpha for chance in chances]
            for slot, loss in enumerate(losses):
                paced = paced + loss * sum(prod(smoothed[: last + 1]) for last in range(slot, len(losses)))
        start += length
    own = paced / anchors if used.slot_weights == "dpace" else parts[0] / parts[2]
    return own + used.confidence_weight * parts[1] / parts[2], by_slot


@pytest.mark.parametrize("changes", [{}, {"slot_weights": "dpace", "dpace_alpha": 0.3}], ids=["decay", "dpace"])
@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_that_of_a_loop_over_anchors(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, of groups of two blocks; RMS norms compute in float32."""
    monkeypatch.setattr(block_pass, "GROUP", 2)
    head = HEADS[name]()
    given, module = batch(head), trainer(head, **changes)
    found = module(given)
    learnt = [part for part in LEARNT if part in head.weights]
    head.weights |= {part: head.weights[part].double().requires_grad_() for part in learnt}
    wanted, by_slot = looped(head, given, module.settings)
    torch.testing.assert_close(found.total, wanted, rtol=1e-5, atol=1e-6)
    assert found.count.tolist() == [len(losses) for losses in by_slot]
    assert by_slot[-1], "no anchor has all slots"
    means = torch.stack([torch.stack(losses).mean() for losses in by_slot])
    torch.testing.assert_close(found.loss, means, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found.total, [module.head.get_parameter(part) for part in learnt])
    torch.testing.assert_close(
        grads, torch.autograd.grad(wanted, [head.weights[part] for part in learnt]), rtol=1e-3, atol=1e-5
    )


def sums(losses: Sequence[UnrolledLoss]) -> list[Tensor]:
    counts = torch.stack([loss.count for loss in losses])
    return [(torch.stack([getattr(one, part) for one in losses]) * counts).sum(0) for part in ("loss", "acceptance")]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_packed_conversations_are_each_as_if_alone(kind: str) -> None:
    """Also their loss is the mean of all predictions: the last slots of short answers do not count."""
    head = HEADS[kind]()
    given, module = batch(head), trainer(head)
    alone, start = [], 0
    for length in given.lengths:
        rows = slice(start, start + length)
        parts = (given.tokens[rows], given.mask[rows], given.features[rows], given.taps[rows])
        alone.append(module(FeatureBatch([length], *parts)))
        start += length
    packed = module(given)
    assert packed.count.tolist() == sum(one.count for one in alone).tolist()
    torch.testing.assert_close(sums([packed]), sums(alone), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(UnrolledLoss.pooled(alone).total, packed.total, rtol=1e-6, atol=1e-7, check_dtype=False)


def test_anchors_are_drawn_in_training_and_spread_outside() -> None:
    head = HEADS["dflash"]()
    given, module = batch(head), trainer(head, anchors=3)
    # Of nine anchors, three; of two tokens of the assistant, one.
    drawn = set()
    for seed in range(8):
        torch.manual_seed(seed)
        anchors = module._anchors(given).tolist()
        torch.manual_seed(seed)
        assert module._anchors(given).tolist() == anchors == sorted(anchors)
        assert [sum(low <= anchor < high for anchor in anchors) for low, high in ((0, 9), (9, 10), (10, 24))] == [
            3,
            0,
            3,
        ]
        assert all(given.mask[anchor] and given.mask[anchor + 1] for anchor in anchors)
        drawn.add(tuple(anchors))
    assert len(drawn) > 1
    module.eval()
    assert module._anchors(given).tolist() == module._anchors(given).tolist()
    everything = trainer(head)._anchors(given).tolist()
    assert set(module._anchors(given).tolist()) <= set(everything)


def test_a_batch_without_anchors_has_no_loss_and_gradients_of_zero() -> None:
    head = HEADS["dspark"]()
    given, module = batch(head), trainer(head)
    silent = FeatureBatch(given.lengths, given.tokens, torch.zeros_like(given.mask), given.features, given.taps)
    loss = module(silent)
    loss.total.backward()
    assert loss.total.item() == 0
    assert not module.head.fc.weight.grad.any()


@pytest.mark.parametrize("name", HEADS)
def test_matrices_of_tokens_are_its_own_output_matrix_and_the_markov_heads(name: str) -> None:
    """By name, since draft vocabularies may be as large as a state or an MLP."""
    module = trainer(HEADS[name]())
    named = {id(weight): part for part, weight in module.head.named_parameters()}
    own = ["lm_head.weight"] * ("few tokens" in name)
    markov = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"] * ("dspark" in name)
    assert [named[id(table)] for table in module.tables] == own + markov
