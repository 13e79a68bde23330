"""Exact laws of acceptance rules: every random choice is followed both ways, probabilities are fractions."""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import Acceptance
from tests.trees import path_to

T = TypeVar("T", bound=Hashable)
Path = tuple[int, ...]
# The shapes of the subtrees under a node, in their order: `()` is a leaf.
Shape = tuple["Shape", ...]
Law = dict[Path, Fraction]
Rule = Callable[["DraftTree", Callable[[int], Any], Any], Acceptance]
# (depth, rank, weights) to the child drawn there.
Draw = Callable[[int, int, Sequence[Fraction]], int]


class Chooser:
    """One run's choices: first those of `script`, then always the first that is possible.

    Attributes:
        probability: of the choices made so far.
        untried: the scripts that choose otherwise somewhere past the end of `script`.
    """

    def __init__(self, script: Path) -> None:
        self.script = script
        self.made: list[int] = []
        self.probability = Fraction(1)
        self.untried: list[Path] = []

    def choose(self, weights: Sequence[Fraction]) -> int:
        """An index with probability proportional to its weight."""
        total = sum(weights, Fraction(0))
        assert total > 0
        assert min(weights) >= 0
        if len(self.made) < len(self.script):
            choice = self.script[len(self.made)]
        else:
            possible = [i for i, weight in enumerate(weights) if weight > 0]
            choice = possible[0]
            self.untried += [(*self.made, other) for other in possible[1:]]
        self.made.append(choice)
        self.probability *= weights[choice] / total
        return choice


def outcomes(run: Callable[[Chooser], T]) -> Iterator[tuple[T, Fraction]]:
    """Every outcome of `run` with its probability, once for each way there."""
    scripts: list[Path] = [()]
    while scripts:
        chooser = Chooser(scripts.pop())
        yield run(chooser), chooser.probability
        scripts += chooser.untried


def law_of(run: Callable[[Chooser], T]) -> dict[T, Fraction]:
    law: dict[T, Fraction] = defaultdict(Fraction)
    for outcome, probability in outcomes(run):
        law[outcome] += probability
    assert sum(law.values()) == 1
    return law


Intervals = dict[Hashable, tuple[Fraction, Fraction]]
Key = Callable[[int, int, int], Hashable]


def step_key(start: int, depth: int, rank: int) -> Hashable:
    """Return `PhiloxChance`'s key: a coin of its own for every step, depth and rank."""
    return start, depth, rank


def position_key(start: int, depth: int, rank: int) -> Hashable:
    """One for every output position and rank, whichever step asks."""
    return start + depth, rank


class ExactChance:
    """Exact coins: each is a real number, known by the interval that earlier comparisons leave it.

    A second question to the same coin is answered accordingly, also if it comes from a later step.

    Args:
        coins: key to interval, shared by the steps of a run.
        start: position of the step, for `key`.
        key: (start, depth, rank) to what a coin is known by.
    """

    def __init__(
        self,
        chooser: Chooser,
        coins: Intervals | None = None,
        start: int = 0,
        key: Key = step_key,
    ) -> None:
        self.chooser = chooser
        self.coins = {} if coins is None else coins
        self.start = start
        self.key = key

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        key = self.key(self.start, depth, rank)
        low, high = self.coins.get(key, (Fraction(0), Fraction(1)))
        cut = min(max(Fraction(probability), low), high)
        accepted = self.chooser.choose([cut - low, high - cut]) == 0
        self.coins[key] = (low, cut) if accepted else (cut, high)
        return accepted

    def draw(self, depth: int, weights: Any) -> int:  # noqa: ARG002
        return self.chooser.choose(list(weights))

    def invert(self, depth: int, rank: int, weights: Sequence[Fraction]) -> int:
        """The index at which the cumulated `weights` exceed the coin."""
        total = sum(weights, Fraction(0))
        below = Fraction(0)
        for index, weight in enumerate(weights):
            below += weight / total
            if self.accept(depth, rank, below):
                return index
        raise AssertionError("a coin is below 1")


class Model:
    """p and q after every path: vectors of `Fraction` with zeros among them, functions of (seed, path)."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.p = cache(lambda path: self._vector("p", path))
        self.q = cache(lambda path: self._vector("q", path))

    def __repr__(self) -> str:
        return f"Model({self.vocab_size}, {self.seed})"

    def _vector(self, name: str, path: Path) -> Any:
        generator = random.Random(f"{self.seed} {name} {path}")
        choices = generator.choice([[0, 1, 2, 3, 5, 9], [1, 2, 3, 5, 9]])
        weights = [0]
        while not any(weights):
            weights = [generator.choice(choices) for _ in range(self.vocab_size)]
        return fractions(weights)

    def probability(self, path: Path, sequence: Path) -> Fraction:
        """Return the target's probability of `sequence` after `path`."""
        result = Fraction(1)
        for token in sequence:
            result *= self.p(path)[token]
            path = (*path, token)
        return result


def fractions(weights: Sequence[Fraction | int]) -> Any:
    """`weights` normalised, as a vector of exact numbers."""
    total = sum(weights, Fraction(0))
    return np.array([weight / total for weight in weights], dtype=object)


def drawn_tree(model: Model, shape: Shape, draw: Draw, path: Path = ()) -> DraftTree:
    """A tree of `shape` after `path` whose siblings are drawn from q without replacement, while q has any left."""
    tokens: list[int] = []
    parents: list[int] = []
    rows = [model.q(path)]

    def grow(node: int, path: Path, depth: int, shape: Shape) -> None:
        rest = list(model.q(path))
        below = []
        for rank, under in enumerate(shape):
            if not any(rest):
                break
            token = draw(depth, rank, rest)
            rest[token] = Fraction(0)
            tokens.append(token)
            parents.append(node)
            rows.append(model.q((*path, token)))
            below.append((len(tokens) - 1, (*path, token), depth + 1, under))
        for child in below:
            grow(*child)

    grow(ROOT, path, 0, shape)
    probs: Any = np.array(rows, dtype=object)
    return DraftTree(tuple(tokens), tuple(parents), probs)


def target_of(model: Model, tree: DraftTree, path: Path = ()) -> Callable[[int], Any]:
    """Node to the target's distribution after `path` and the node."""
    return lambda node: model.p((*path, *(tree.tokens[n] for n in path_to(tree, node))))


def emitted_by(tree: DraftTree, acceptance: Acceptance) -> Path:
    return (*(tree.tokens[node] for node in acceptance.path), acceptance.next_token)


def chain_shape(length: int) -> Shape:
    shape: Shape = ()
    for _ in range(length):
        shape = (shape,)
    return shape


def sampled_law(rule: Rule, model: Model, shape: Shape, weigh: Callable[[Any], Any] = list) -> Law:
    """Law of what a step emits whose children are drawn from q.

    Args:
        weigh: what is left of q to what a child is really drawn from.
    """

    def run(chooser: Chooser) -> Path:
        tree = drawn_tree(model, shape, lambda depth, rank, rest: chooser.choose(weigh(rest)))  # noqa: ARG005
        return emitted_by(tree, rule(tree, target_of(model, tree), ExactChance(chooser)))

    return law_of(run)


def fixed_law(rule: Rule, model: Model, tree: DraftTree) -> Law:
    """Law of what a step emits whose tree is given."""
    return law_of(lambda chooser: emitted_by(tree, rule(tree, target_of(model, tree), ExactChance(chooser))))


def steps_law(
    rule: Rule, model: Model, shape: Shape, steps: int, coin_key: Key = step_key, draft_key: Key = step_key
) -> Law:
    """Law of what several steps emit together, each with a tree of its own drawn from q.

    Args:
        coin_key: (start, depth, rank) to what a coin is known by; equal keys are one coin.
        draft_key: the same for what children are drawn by.
    """

    def run(chooser: Chooser) -> Path:
        coins: Intervals = {}
        noise: Intervals = {}
        emitted: Path = ()
        for _ in range(steps):
            drafter = ExactChance(chooser, noise, len(emitted), draft_key)
            tree = drawn_tree(model, shape, drafter.invert, emitted)
            chance = ExactChance(chooser, coins, len(emitted), coin_key)
            emitted += emitted_by(tree, rule(tree, target_of(model, tree, emitted), chance))
        return emitted

    return law_of(run)


class Mismatch(NamedTuple):
    sequence: Path
    found: Fraction
    expected: Fraction


def assert_target_law(law: Law, model: Model) -> None:
    """The first token is a draw from p; so is all that is emitted, continued with draws from the target."""
    first: dict[int, Fraction] = defaultdict(Fraction)
    for emitted, probability in law.items():
        first[emitted[0]] += probability
    assert [first[token] for token in range(model.vocab_size)] == list(model.p(()))

    longest = max(map(len, law))
    # The emitted are of different lengths: what begins with a shorter one is continued by the target.
    for sequence in product(range(model.vocab_size), repeat=longest):
        found = Fraction(0)
        for length in range(1, longest + 1):
            if part := law.get(sequence[:length]):
                found += part * model.probability(sequence[:length], sequence[length:])
        expected = model.probability((), sequence)
        assert found == expected, Mismatch(sequence, found, expected)
