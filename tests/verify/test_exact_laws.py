"""Every acceptance rule emits exactly what the target would: whole laws, enumerated in fractions."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, overload

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.verify.host_walks import follow
from specdec.verify.rejection import walk_rejection
from tests.profiles import num_cases
from tests.strategies import seeds
from tests.verify.exact import (
    Chooser,
    ExactChance,
    Intervals,
    Law,
    Model,
    Path,
    assert_target_law,
    chain_shape,
    drawn_tree,
    emitted_by,
    fixed_law,
    law_of,
    outcomes,
    position_key,
    sampled_law,
    step_key,
    steps_law,
    target_of,
)
from tests.verify.models import CHAIN_LENGTH, SAMPLED_NODES, fixed_trees, models, tree_shapes

pytestmark = pytest.mark.slow


class EmittedTokens(Sequence[int]):
    """Draws from p after the root and each node, each drawn when it is first asked for."""

    def __init__(self, model: Model, tree: DraftTree, chooser: Chooser) -> None:
        self.tree = tree
        self.target = target_of(model, tree)
        self.chooser = chooser
        self.drawn: dict[int, int] = {}

    def __len__(self) -> int:
        return 1 + len(self.tree)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        if index not in self.drawn:
            self.drawn[index] = self.chooser.choose(list(self.target(index - 1)))
        return self.drawn[index]


@given(models, st.data())
def test_coupled_law_is_the_targets(model: Model, data: st.DataObject) -> None:
    tree = data.draw(fixed_trees(model.vocab_size))

    def run(chooser: Chooser) -> Path:
        return emitted_by(tree, follow(tree, EmittedTokens(model, tree, chooser)))

    assert_target_law(law_of(run), model)


@given(models, st.data())
def test_law_of_trees_chosen_without_chance_is_the_targets(model: Model, data: st.DataObject) -> None:
    tree = data.draw(fixed_trees(model.vocab_size))
    assert_target_law(fixed_law(walk_rejection, model, tree), model)


@given(models, st.data())
def test_without_replacement_rejection_law_is_the_targets(model: Model, data: st.DataObject) -> None:
    shape = data.draw(tree_shapes(SAMPLED_NODES[model.vocab_size], min(3, model.vocab_size)))
    assert_target_law(sampled_law(walk_rejection, model, shape), model)


@given(models, st.data())
def test_chain_rejection_law_is_the_targets(model: Model, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, CHAIN_LENGTH[model.vocab_size]))
    assert_target_law(sampled_law(walk_rejection, model, chain_shape(length)), model)


small_models = st.builds(Model, st.just(2), seeds)


@given(small_models)
def test_law_of_two_steps_is_the_targets(model: Model) -> None:
    assert_target_law(steps_law(walk_rejection, model, chain_shape(3), 2), model)


@settings(max_examples=num_cases(12))
@given(small_models)
def test_law_of_steps_with_drawn_trees_and_chains_of_the_text_is_the_targets(model: Model) -> None:
    """Which kind a step has hangs on the text so far."""

    def run(chooser: Chooser) -> Path:
        coins: Intervals = {}
        noise: Intervals = {}
        emitted: Path = ()
        for _ in range(3):
            start = len(emitted)
            if sum(emitted) % 2:
                tree = DraftTree((emitted[-1], 1 - emitted[-1], 0), (ROOT, ROOT, 0))
            else:
                tree = drawn_tree(model, chain_shape(2), ExactChance(chooser, noise, start, step_key).invert, emitted)
            chance = ExactChance(chooser, coins, start, step_key)
            emitted += emitted_by(tree, walk_rejection(tree, target_of(model, tree, emitted), chance))
        return emitted

    assert_target_law(law_of(run), model)


@given(small_models)
def test_law_of_rejection_steps_may_keep_coins_and_noise_by_position(model: Model) -> None:
    """The tokens after a rejected one are never looked at."""
    assert_target_law(steps_law(walk_rejection, model, chain_shape(2), 2, position_key, position_key), model)
    assert_target_law(steps_law(walk_rejection, model, (((), ()), ()), 2, position_key, position_key), model)


def rearranged(tree: DraftTree, nodes: Sequence[int]) -> DraftTree:
    """The tree of `nodes`, in this order, parents first."""
    places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
    parents = tuple(places[tree.parents[node]] for node in nodes)
    assert tree.draft_probs is not None
    probs = tree.draft_probs[[0, *(1 + node for node in nodes)]]
    return DraftTree(tuple(tree.tokens[node] for node in nodes), parents, probs)


def chance_of(tree: DraftTree, node: int) -> Fraction:
    """The draft's chance of the node's token, q."""
    assert tree.draft_probs is not None
    chance: Any = tree.draft_probs[1 + tree.parents[node]][tree.tokens[node]]
    return Fraction(chance)


def only_the_likeliest_expanded(tree: DraftTree) -> DraftTree:
    """Only the likeliest child of the root has children: which it is does not hang on these."""
    tops = tree.children_of.get(ROOT, ())
    best = max(tops, key=lambda node: chance_of(tree, node))
    return rearranged(tree, [*tops, *tree.children_of.get(best, ())])


def unlikely_dropped(tree: DraftTree) -> DraftTree:
    return rearranged(tree, [n for n in tree.children_of[ROOT] if chance_of(tree, n) >= Fraction(1, 3)])


def likeliest_first(tree: DraftTree) -> DraftTree:
    return rearranged(tree, sorted(tree.children_of[ROOT], key=lambda node: -chance_of(tree, node)))


def rearranged_law(model: Model, rearrange: Callable[[DraftTree], DraftTree]) -> Law:
    def run(chooser: Chooser) -> Path:
        drawn = drawn_tree(model, (((), ()), ((), ())), lambda depth, rank, rest: chooser.choose(rest))  # noqa: ARG005
        tree = rearrange(drawn)
        return emitted_by(tree, walk_rejection(tree, target_of(model, tree), ExactChance(chooser)))

    return law_of(run)


@given(st.builds(Model, st.integers(2, 3), seeds))
def test_which_nodes_are_expanded_may_hang_on_what_was_drawn_above(model: Model) -> None:
    assert_target_law(rearranged_law(model, only_the_likeliest_expanded), model)


@pytest.mark.parametrize("rearrange", [unlikely_dropped, likeliest_first])
def test_sampled_children_may_not_be_chosen_or_ordered_by_value(rearrange: Callable[[DraftTree], DraftTree]) -> None:
    """A budget over the whole batch would do that; for one-hot children it does no harm."""
    with pytest.raises(AssertionError):
        assert_target_law(rearranged_law(Model(3, 3), rearrange), Model(3, 3))


def test_enumeration_knows_what_a_coin_showed() -> None:
    def run(chooser: Chooser) -> tuple[bool, bool, bool]:
        chance = ExactChance(chooser)
        half = chance.accept(0, 0, Fraction(1, 2))
        return half, chance.accept(0, 0, Fraction(1, 4)), chance.accept(0, 1, Fraction(1, 4))

    assert dict(outcomes(run)) == {
        (True, True, True): Fraction(1, 16),
        (True, True, False): Fraction(3, 16),
        (True, False, True): Fraction(1, 16),
        (True, False, False): Fraction(3, 16),
        (False, False, True): Fraction(1, 8),
        (False, False, False): Fraction(3, 8),
    }
