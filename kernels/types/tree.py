"""A request's row in a step: a chain of known tokens, and the draft tree under the last of them."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from specdec.kernels.types.ragged_rows import WORD_BITS
from specdec.kernels.types.types import ROOT as ROOT


@dataclass(frozen=True)
class DraftTree:
    """Nodes in parent-before-child order under the last known token, which is the root and not a node.

    Attributes:
        tokens: token id of each node; siblings differ.
        parents: index of each node's parent, `ROOT` for a child of the root.
        draft_probs: float `[1 + nodes, vocab]`, row 0 for the root and row 1 + i for node i: the distribution q
            that the node's children were drawn from, in their order and without replacement. None where
            children were chosen deterministically.
        ranks: rank of each node in the tree, the most probable by its drafter first; empty where that is their order.
        read_values: returns the value of each node but the chained ones, the log-probability of its path by its
            drafter; called only for traced requests, since reading takes time. None for a drafter without values.
        num_chained: number of last nodes that come from chains and not from a model; they rank behind the others.

    Args:
        check: whether to look for the errors below.

    Raises:
        ValueError: lengths differ, a parent does not come before its child, or siblings share a token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: Tensor | None = field(default=None, compare=False, repr=False)
    ranks: tuple[int, ...] = field(default=(), compare=False, repr=False)
    read_values: Callable[[], Sequence[float]] | None = field(default=None, compare=False, repr=False)
    num_chained: int = field(default=0, compare=False, repr=False)
    check: InitVar[bool] = True

    def __post_init__(self, check: bool) -> None:
        if not check:
            return
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens for {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parent {parent} of node {node} must come before it")
        if len(self.children) != len(self.tokens):
            raise ValueError("two children of one node carry the same token")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node, the first of equal ones."""
        found: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            found.setdefault(key, node)
        return found

    @cached_property
    def children_of(self) -> dict[int, tuple[int, ...]]:
        """Nodes under each parent that has any, in their order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in found.items()}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit set, per node, of the nodes on its path from the root, itself included."""
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((0 if parent == ROOT else bits[parent]) | 1 << node)
        return tuple(bits)

    @cached_property
    def path_tokens(self) -> list[list[int]]:
        """`[1 + nodes, depth]` tokens below the root up to the root (row 0) and each node, padded with -1."""
        paths = [[-1] * max(self.depths, default=0)]
        for token, parent, depth in zip(self.tokens, self.parents, self.depths, strict=True):
            above = paths[1 + parent]
            paths.append([*above[: depth - 1], token, *above[depth:]])
        return paths


# The tree of a row without drafts.
NO_DRAFTS = DraftTree()


class TreeRow(NamedTuple):
    """One request's chain in a step.

    Attributes:
        tokens: the chain, `token_ids[num_cached : num_cached + k]`, k >= 1.
        num_cached: number of tokens whose keys and values are in the cache already.
        block_table: the request's blocks, enough for `num_cached + k` entries and those of its draft nodes.
        num_scored: number of the chain's last rows that need logits, the last one where a token is sampled.
        adapter: place of the request's adapter in the bank, 0 for none.
    """

    tokens: Sequence[int]
    num_cached: int
    block_table: Sequence[int]
    num_scored: int
    adapter: int = 0


class HostNodes(NamedTuple):
    """The nodes of one tree as far as the host knows them, zeros in place of the rest; see `DraftTree`."""

    tokens: Sequence[int]
    depths: Sequence[int]
    ancestors: Sequence[int]


def split_words(bits: int, words: int) -> list[int]:
    """Return a bit set of any size as signed 64-bit words, lowest first."""
    mask = (1 << WORD_BITS) - 1
    parts = [(bits >> (WORD_BITS * word)) & mask for word in range(words)]
    return [part - (1 << WORD_BITS) if part >> (WORD_BITS - 1) else part for part in parts]
