"""Faults planted in the acceptance rules: the exact laws must see every one of them."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path as File
from types import ModuleType
from typing import Any

import pytest

from specdec.kernels.types.tree import DraftTree
from specdec.verify import rejection
from tests.verify.exact import Model, Rule, Shape, assert_target_law, chain_shape, fixed_law, sampled_law

FORKS: list[Shape] = [((), (), ()), (((), ()), ((),))]
CHAINS: list[Shape] = [chain_shape(1), chain_shape(2), chain_shape(3)]
FIXED = DraftTree(tokens=(2, 0, 1, 1, 0), parents=(-1, -1, -1, 0, 0))
MODELS = [Model(3, seed) for seed in range(6)]


def check_one_hot(rule: Rule) -> None:
    for model in MODELS:
        assert_target_law(fixed_law(rule, model, FIXED), model)


def check_sampled(rule: Rule, weigh: Any = list) -> None:
    for model in MODELS:
        for shape in FORKS:
            assert_target_law(sampled_law(rule, model, shape, weigh), model)


def check_chains(rule: Rule, weigh: Any = list) -> None:
    for model in MODELS:
        for shape in CHAINS:
            assert_target_law(sampled_law(rule, model, shape, weigh), model)


def mutant(module: ModuleType, text: str, fault: str) -> Any:
    """The module with `fault` in the place of `text`."""
    source = File(str(module.__file__)).read_text()
    assert text in source
    changed = ModuleType(f"{module.__name__}_mutant")
    exec(compile(source.replace(text, fault), changed.__name__, "exec"), changed.__dict__)
    return changed


ONE_HOT_STEP = "p = normalised(without(p, token), p)"
RESIDUAL_STEP = "p = normalised(positive_part(p - q), p)"
NARROWER_Q = "q = normalised(without(q, token), q)"

ONE_HOT_FAULTS = {
    "p not renormalised": (ONE_HOT_STEP, "p = without(p, token)"),
    "p keeps the rejected token": (ONE_HOT_STEP, "pass"),
    "one coin for all siblings": ("chance.accept(depth, rank, p[token])", "chance.accept(depth, 0, p[token])"),
    "one coin for all depths": ("chance.accept(depth, rank, p[token])", "chance.accept(0, rank, p[token])"),
    "first token in place of the child's": ("p[token])", "p[0])"),
    "never accepts": ("chance.accept(depth, rank, p[token])", "not chance.accept(depth, rank, 1)"),
}
SAMPLED_FAULTS = {
    "residual not renormalised": (RESIDUAL_STEP, "p = positive_part(p - q)"),
    "residual not taken": (RESIDUAL_STEP, "pass"),
    "residual of the rejected token only": (RESIDUAL_STEP, ONE_HOT_STEP),
    "residual of absolute values": ("return weights * (weights > 0)", "return abs(weights)"),
    "q keeps the rejected token": (NARROWER_Q, "pass"),
    "q not renormalised": (NARROWER_Q, "q = without(q, token)"),
    "q narrowed before the residual": (RESIDUAL_STEP, f"r = q; {NARROWER_Q}; {RESIDUAL_STEP}; q = r"),
    "one coin for all siblings": ("(depth, rank, p[token] / q", "(depth, 0, p[token] / q"),
    "one coin for all depths": ("(depth, rank, p[token] / q", "(0, rank, p[token] / q"),
    "ratio upside down": ("p[token] / q[token]", "q[token] / max(p[token], q[token] / 9)"),
    "sibling order": (
        "enumerate(tree.children_of.get(node, ()))",
        "enumerate(reversed(tree.children_of.get(node, ())))",
    ),
    "q of the parent's node": ("tree.draft_probs[1 + node]", "tree.draft_probs[max(0, node)]"),
    "p of the root": ("p = target(node)", "p = target(ROOT)"),
}


@pytest.mark.long
def test_sound_rules_pass() -> None:
    same = mutant(rejection, ONE_HOT_STEP, ONE_HOT_STEP).walk_rejection
    check_one_hot(same)
    check_sampled(same)
    check_chains(same)


@pytest.mark.parametrize(("text", "fault"), ONE_HOT_FAULTS.values(), ids=list(ONE_HOT_FAULTS))
def test_faults_with_one_hot_children_are_seen(text: str, fault: str) -> None:
    with pytest.raises(AssertionError):
        check_one_hot(mutant(rejection, text, fault).walk_rejection)


@pytest.mark.parametrize(("text", "fault"), SAMPLED_FAULTS.values(), ids=list(SAMPLED_FAULTS))
def test_faults_with_sampled_children_are_seen(text: str, fault: str) -> None:
    with pytest.raises(AssertionError):
        check_sampled(mutant(rejection, text, fault).walk_rejection)


def squared(rest: list[Fraction]) -> list[Fraction]:
    return [weight**2 for weight in rest]


@pytest.mark.parametrize("check", [check_sampled, check_chains])
def test_q_of_another_temperature_is_seen(check: Callable[[Rule, Any], None]) -> None:
    """Children drawn from q squared, while the tree says q."""
    with pytest.raises(AssertionError):
        check(rejection.walk_rejection, squared)
