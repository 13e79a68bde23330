"""The draft tree: what may follow a request's last known token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Nodes in parent-before-child order under the last known token, which is the root and no node.

    Attributes:
        tokens: token id of each node; siblings differ.
        parents: index of each node's parent, `ROOT` for a child of the root.

    Raises:
        ValueError: lengths differ, a parent does not come before its child, or siblings share a token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens for {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parent {parent} of node {node} must come before it")
        if len(self.children) != len(self.tokens):
            raise ValueError("two children of one node carry the same token")

    @staticmethod
    def chain(tokens: Sequence[int]) -> "DraftTree":
        return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node."""
        return {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per node a bit set of the nodes on its path from the root, itself included."""
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((0 if parent == ROOT else bits[parent]) | 1 << node)
        return tuple(bits)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
