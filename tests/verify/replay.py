"""Walks in fractions, replayed in floating point."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import Acceptance
from tests.verify.exact import Chooser, ExactChance, Model, Rule, outcomes, target_of


class RecordingChance:
    """Another chance, whose answers are kept in order."""

    def __init__(self, chance: ExactChance) -> None:
        self.chance = chance
        self.answers: list[Answer] = []

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        accepted = self.chance.accept(depth, rank, probability)
        self.answers.append(Answer((depth, rank), [min(probability, Fraction(1))], accepted))
        return accepted

    def draw(self, depth: int, weights: Any) -> int:
        drawn = self.chance.draw(depth, weights)
        self.answers.append(Answer((depth, None), list(weights / weights.sum()), drawn))
        return drawn


class Answer(NamedTuple):
    """A question to the chance, the probabilities given, and the answer."""

    question: tuple[int, int | None]
    probabilities: list[Any]
    answer: int


class ReplayedChance:
    """Gives the same answers to a walk in floating point, which must ask the same questions."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)

    def accept(self, depth: int, rank: int, probability: Any) -> bool:
        return bool(self._next((depth, rank), [min(float(probability), 1.0)]))

    def draw(self, depth: int, weights: Tensor) -> int:
        assert weights.dtype == torch.float64
        return self._next((depth, None), (weights / weights.sum()).tolist())

    def _next(self, question: tuple[int, int | None], probabilities: list[float]) -> int:
        asked, expected, answer = self.answers.pop(0)
        assert asked == question
        assert probabilities == pytest.approx([float(value) for value in expected], abs=1e-12)
        return answer


def floats(vectors: Any) -> Tensor:
    """float64 tensor of exact numbers."""
    return torch.from_numpy(vectors.astype(np.float64))


def assert_floats_follow_fractions(rule: Rule, model: Model, tree: DraftTree) -> None:
    """On every branch, the walk over float64 tensors asks for the same probabilities and ends the same way."""

    def run(chooser: Chooser) -> tuple[Acceptance, RecordingChance]:
        chance = RecordingChance(ExactChance(chooser))
        return rule(tree, target_of(model, tree), chance), chance

    exact = target_of(model, tree)
    probs = None if tree.draft_probs is None else floats(tree.draft_probs)
    tensors = DraftTree(tree.tokens, tree.parents, probs)
    for (acceptance, chance), _ in outcomes(run):
        replayed = ReplayedChance(chance.answers)
        assert rule(tensors, lambda node: floats(exact(node)), replayed) == acceptance
        assert not replayed.answers
