"""Choices: continuations of a prompt that are scored instead of generated. Pure Python."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# The parent of a root's children, as in `kernels.types.types`, which imports torch.
ROOT = -1


class ChoiceScore(NamedTuple):
    """A choice and the model's log-probabilities of its tokens.

    Attributes:
        token_ids: the choice's tokens.
        logprobs: per token, the natural logarithm of its probability after the prompt and the tokens before it.
    """

    token_ids: list[int]
    logprobs: list[float]

    @property
    def cumulative_logprob(self) -> float:
        """Log-probability of the choice: the sum over its tokens."""
        return math.fsum(self.logprobs)

    @property
    def normalized_logprob(self) -> float:
        """Mean log-probability of its tokens, which does not favour short choices."""
        return self.cumulative_logprob / len(self.logprobs)


class ChoiceTree(NamedTuple):
    """The nodes of some choices, as a tree under the prompt's last token, and which scores they give.

    The last token of a choice needs no node: its score is read where the token before it is.

    Attributes:
        tokens, parents: the nodes, parents before children; see `DraftTree`.
        read: pairs of a node, or `ROOT`, and a token after it, whose log-probability is wanted; each once.
        paths: by choice, its pairs' places in `read`, token by token.
    """

    tokens: list[int]
    parents: list[int]
    read: list[tuple[int, int]]
    paths: dict[int, list[int]]


class Choices:
    """The choices of one request, and the scores that steps have given so far.

    Args:
        token_ids: the choices, each at least one token.
    """

    def __init__(self, token_ids: Sequence[Sequence[int]]) -> None:
        self._tokens = [list(tokens) for tokens in token_ids]
        self._logprobs: list[list[float] | None] = [None] * len(self._tokens)
        # In the order of their tokens, so that those of one tree share most nodes.
        self._pending = sorted(range(len(self._tokens)), key=lambda choice: self._tokens[choice])

    @property
    def is_complete(self) -> bool:
        """Return whether all choices are scored."""
        return not self._pending

    @property
    def most_nodes(self) -> int:
        """Nodes that the longest choice needs."""
        return max(map(len, self._tokens)) - 1

    @property
    def least_nodes(self) -> int:
        """Nodes that the next tree needs at least: those of one choice."""
        return len(self._tokens[self._pending[0]]) - 1 if self._pending else 0

    def tree(self, most: int) -> ChoiceTree:
        """Return the tree of as many choices as fit.

        Args:
            most: limit of its nodes, at least `least_nodes`.
        """
        tree, places = ChoiceTree([], [], [], {}), dict[tuple[int, int], int]()
        children: dict[tuple[int, int], int] = {}
        for choice in self._pending:
            tokens = self._tokens[choice]
            node, missing = ROOT, len(tokens) - 1
            for token in tokens[:-1]:
                if (node, token) not in children:
                    break
                node, missing = children[node, token], missing - 1
            if len(tree.tokens) + missing > most:
                break
            node, tree.paths[choice] = ROOT, []
            for depth, token in enumerate(tokens, 1):
                key = node, token
                if key not in places:
                    places[key] = len(tree.read)
                    tree.read.append(key)
                tree.paths[choice].append(places[key])
                if depth < len(tokens):
                    if key not in children:
                        children[key] = len(tree.tokens)
                        tree.tokens.append(token)
                        tree.parents.append(node)
                    node = children[key]
        return tree

    def record(self, tree: ChoiceTree, logprobs: Sequence[float]) -> None:
        """Keep the scores of a tree's choices.

        Args:
            logprobs: one for each of `tree.read`.
        """
        for choice, places in tree.paths.items():
            self._logprobs[choice] = [logprobs[place] for place in places]
        self._pending = [choice for choice in self._pending if choice not in tree.paths]

    def scores(self) -> list[ChoiceScore]:
        """Return the scores of all choices, in the order in which they were given. They must be complete."""
        assert self.is_complete, "a choice is not scored yet"
        return [
            ChoiceScore(list(tokens), list(logprobs or ()))
            for tokens, logprobs in zip(self._tokens, self._logprobs, strict=True)
        ]
