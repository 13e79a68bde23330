"""Which optimizer trains which of a head's weights."""

import pytest
import torch
from torch import nn

from specdec.train_eagle.training.optimizers import optimizers_of, schedules_of


class Head(nn.Module):
    """Two matrices over states, a norm, a matrix of tokens, and one that is not trained.

    There are as many tokens as the second matrix has columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.down, self.norm = nn.Linear(12, 4, bias=False), nn.Linear(8, 4, bias=False), nn.LayerNorm(4)
        self.lm_head, self.frozen = nn.Linear(4, 8, bias=False), nn.Linear(4, 4, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.tables = [self.lm_head.weight]


def weights(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}


def test_muon_takes_the_matrices_over_states_and_adamw_the_rest() -> None:
    head = Head()
    adamw, muon = optimizers_of("muon", head, head.tables, 1e-3)
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    assert weights(muon) == {id(head.fc.weight), id(head.down.weight)}
    assert weights(adamw) == {id(head.norm.weight), id(head.norm.bias), id(head.lm_head.weight)}
    (alone,) = optimizers_of("adamw", head, head.tables, 1e-3)
    assert weights(alone) == weights(adamw) | weights(muon)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_matrices_of_tokens_have_a_rate_of_their_own(kind: str) -> None:
    head = Head()
    optimizers = optimizers_of(kind, head, head.tables, 1e-3, 5.0)  # type: ignore[arg-type]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = {id(weight): group["lr"] for group in groups for weight in group["params"]}
    assert rates.pop(id(head.lm_head.weight)) == 5e-3
    assert set(rates.values()) == {1e-3}
    # It goes up and down as the others' do.
    for _ in range(2):
        for one in schedules_of(optimizers, 4, 8):
            one.step()
    assert {group["lr"] / group["initial_lr"] for group in groups} == {0.5}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_is_as_long_as_its_learning_rate_says(kind: str) -> None:
    """Of either optimizer: 0.2 to 1 of the rate for each number, which the warm-up and the cosine scale.

    The first step of a warm-up had a rate of 0.
    """
    head = Head()
    optimizers = optimizers_of(kind, head, head.tables, 1e-2)  # type: ignore[arg-type]
    schedules = schedules_of(optimizers, 2, 4)
    lengths = []
    for _ in range(5):
        before = head.fc.weight.detach().clone()
        head.fc.weight.grad = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
        for one in (*optimizers, *schedules):
            one.step()
        lengths.append((head.fc.weight.detach() - before).square().mean().sqrt().item() / 1e-2)
    assert lengths[4] == 0
    assert 0.05 < lengths[0] < lengths[1] <= 1.01
    assert lengths[3] < lengths[2] <= 1.01
