"""Chains: draft tokens that are known without a pass of a model, and what they are worth. Pure Python."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# The parent of a root's children, as in `kernels.types.types`, which imports torch.
ROOT = -1
# Longest match that is told apart from longer ones.
LONGEST_MATCH = 8
# In place of a match: the node is another child where an earlier chain has one already.
ELSEWHERE = -1
# Tries that the prior of a rate stands for, and upper bounds of the tries that a rate averages: of one request, and of
# a source over all requests.
PRIOR, MEMORY_OF_ONE, MEMORY = 2.0, 20.0, 200.0
# Nodes of a lower value are not proposed.
LEAST_VALUE = 0.005


class ChainRates:
    """Measured acceptance of a source's tokens, by the length of the match before them.

    The rate of a token is the probability that it is emitted if all before it in its chain are, and no child of an
    earlier chain at its place is. It is measured whether or not the token was drafted, since the emitted tokens tell.

    Args:
        source: rates of the same source over all requests, which learn what these learn and are their prior; None for
            those themselves.
        shorter: tokens by which a match in the request's own text may be shorter and as much worth, of rates without
            measurements.

    Attributes:
        tokens, right: number of tokens whose place in the output is known, and of those that were right.
    """

    def __init__(self, source: "ChainRates | None" = None, shorter: int = 0) -> None:
        self.source, self._shorter = source, shorter
        self.tokens = self.right = 0
        self._memory = MEMORY if source is None else MEMORY_OF_ONE
        # The last entry is that of `ELSEWHERE`.
        self._hits = [0.0] * (LONGEST_MATCH + 2)
        self._tries = [0.0] * (LONGEST_MATCH + 2)

    def rate(self, match: int) -> float:
        """Return the acceptance after a match of this length, or `ELSEWHERE`."""
        place = min(match, LONGEST_MATCH)
        prior = _guess(place, self._shorter) if self.source is None else self.source.rate(place)
        return (self._hits[place] + PRIOR * prior) / (self._tries[place] + PRIOR)

    def learn(self, match: int, accepted: bool) -> None:
        """Add a token whose place in the output is known."""
        place, kept = min(match, LONGEST_MATCH), 1 - 1 / self._memory
        self.tokens, self.right = self.tokens + 1, self.right + accepted
        self._hits[place] = kept * self._hits[place] + accepted
        self._tries[place] = kept * self._tries[place] + 1
        if self.source is not None:
            self.source.learn(place, accepted)


def _guess(place: int, shorter: int) -> float:
    """Return the acceptance before anything is measured."""
    match = max(0, place - shorter)
    return 0.1 if place == ELSEWHERE else (match + 1) / (match + 3)


class Chain(NamedTuple):
    """Tokens that may follow a request's last one.

    Attributes:
        tokens: the tokens, in order.
        match: number of last tokens of the text that also precede the chain where it was found.
        rates: acceptance of its source.
    """

    tokens: Sequence[int]
    match: int
    rates: ChainRates


class ChainSource(Protocol):
    """Source of chains for one request."""

    def chains(self, token_ids: Sequence[int], depth: int) -> Sequence[Chain]:
        """Return chains that may follow, the most probable first; none where the source knows nothing.

        Args:
            token_ids: known tokens of the request; every call has those of the one before, and more or the same.
            depth: most tokens of a chain.
        """
        ...


class ChainNodes(NamedTuple):
    """Nodes of a tree of chains, parents before children; see `DraftTree`."""

    tokens: Sequence[int]
    parents: Sequence[int]


class ChainTree:
    """The chains of a row as one tree: equal beginnings are shared.

    Args:
        chains: of all sources; nodes that an earlier chain has belong to that one.

    Attributes:
        values: per node in descending order, the probability that it is accepted.
        first_value: probability that a child of the root is.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._rates: list[tuple[ChainRates, int]] = []
        self._children: dict[int, dict[int, int]] = {}
        # Per parent, the probability that none of its children so far is right.
        self._left: dict[int, float] = {}
        values: list[float] = []
        for chain in chains:
            self._add(chain, values)
        # Stable, so that parents come before their children.
        self._order = sorted(range(len(values)), key=lambda node: -values[node])
        self.values = [values[node] for node in self._order]
        self.first_value = min(1.0, sum(values[node] for node in self._children.get(ROOT, {}).values()))

    def _add(self, chain: Chain, values: list[float]) -> None:
        node, value = ROOT, 1.0
        for match, token in enumerate(chain.tokens, chain.match):
            children = self._children.setdefault(node, {})
            child = children.get(token)
            if child is None:
                place = ELSEWHERE if children else match
                rate, left = chain.rates.rate(place), self._left.get(node, 1.0)
                value *= left * rate
                if value < LEAST_VALUE:
                    return
                self._left[node] = left * (1 - rate)
                child = children[token] = len(values)
                self._tokens.append(token)
                self._parents.append(node)
                self._rates.append((chain.rates, place))
                values.append(value)
            node, value = child, values[child]

    def __len__(self) -> int:
        return len(self.values)

    def best(self, count: int) -> ChainNodes:
        """Return the most valuable nodes."""
        kept = sorted(self._order[:count])
        place = {node: index for index, node in enumerate(kept)}
        place[ROOT] = ROOT
        return ChainNodes([self._tokens[node] for node in kept], [place[self._parents[node]] for node in kept])

    def learn(self, emitted: Sequence[int]) -> None:
        """Compare the chains with the tokens that the request took, and update the sources' rates."""
        node = ROOT
        for token in emitted:
            children = self._children.get(node, {})
            for other, child in children.items():
                rates, place = self._rates[child]
                rates.learn(place, other == token)
                if other == token:
                    # Later children apply only if this one is wrong.
                    break
            if token not in children:
                return
            node = children[token]
