"""Draft trees that stay on the device where they were grown, until the host reads them along with their outcome."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.ragged_rows import WORD_BITS
from specdec.kernels.upload import upload
from specdec.verify.tree import ROOT, DraftTree, split_words


class NodeTensors(NamedTuple):
    """The nodes of a step's trees, one tree after another.

    Attributes:
        tokens, depths: int64 `[nodes]`.
        parents: int64 `[nodes]`, the place of each node's parent in its own tree, `ROOT` for a child of the root.
        ancestors: int64 `[nodes, words]`, bits of the nodes on the path from the root, the node itself included.
    """

    tokens: Tensor
    depths: Tensor
    parents: Tensor
    ancestors: Tensor


class GrownTrees:
    """The best candidates of each row as a tree in order of depth.

    Every tree of a row has as many nodes as it may, so the host knows all sizes before it knows a node.

    Args:
        values: float32 `[rows, candidates]`, the more a candidate is worth, level by level; a child's is at most its
            parent's.
        tokens: int64, likewise.
        above: int64, likewise: the candidate that each is a child of, `ROOT` for a child of the root.
        level_ends: of levels 1, 2, …: how many candidates there are up to it.
        budgets: most nodes of each row.
        max_depths: most levels of each row.

    Attributes:
        sizes: nodes of each row's tree.
        levels: at most.
    """

    def __init__(
        self,
        values: Tensor,
        tokens: Tensor,
        above: Tensor,
        level_ends: Sequence[int],
        budgets: Sequence[int],
        max_depths: Sequence[int],
    ) -> None:
        device, (rows, count) = values.device, values.shape
        self.levels = len(level_ends)
        reach = [level_ends[min(depth, len(level_ends)) - 1] if depth > 0 else 0 for depth in max_depths]
        self.sizes = [min(budget, most) for budget, most in zip(budgets, reach, strict=True)]
        most = max(self.sizes, default=0)
        place = torch.arange(count, device=device)
        depth_of = torch.bucketize(place, upload(level_ends, device), right=True) + 1
        out_of_reach = place >= upload(reach, device)[:, None]
        # Stable, so of equal values the shallower comes first, and what is out of reach comes last.
        order = values.masked_fill(out_of_reach, float("-inf")).sort(dim=1, descending=True, stable=True).indices
        beyond = torch.arange(most, device=device) >= upload(self.sizes, device)[:, None]
        kept, self._ranks = order[:, :most].masked_fill(beyond, count).sort(dim=1)
        # One more candidate stands for those that are none.
        kept_safe = kept.clamp_max(count - 1)
        places = torch.full((rows, count + 1), ROOT, dtype=torch.int64, device=device)
        places.scatter_(1, kept, torch.arange(most, device=device).expand(rows, -1))
        self._tokens = tokens.gather(1, kept_safe)
        # The root is candidate -1, and so the last place, which no kept candidate takes.
        places[:, count] = ROOT
        self._parents = places.gather(1, above.gather(1, kept_safe) % (count + 1))
        self._depths = depth_of[kept_safe]
        self._ancestors = _ancestors(self._parents, len(level_ends))
        self._host: list[int] | None = None
        self._nodes: dict[tuple[int, ...], NodeTensors] = {}

    def trees(self) -> list[DraftTree]:
        """One per row."""
        return [GrownTree(self, row) if size else DraftTree() for row, size in enumerate(self.sizes)]

    @property
    def table(self) -> Tensor:
        """int64 `[rows, 3 * most]`: what the host reads, tokens, parents and ranks."""
        return torch.cat([self._tokens, self._parents, self._ranks], 1)

    def learn(self, table: list[int]) -> None:
        """The host has read `table`, row by row."""
        self._host = table

    def column(self, row: int, number: int) -> tuple[int, ...]:
        """Tokens (0), parents (1) or ranks (2) of a tree; read from the device with all others if need be."""
        if self._host is None:
            self.learn(self.table.flatten().tolist())
        assert self._host is not None
        most = self._tokens.shape[1]
        start = (3 * row + number) * most
        return tuple(self._host[start : start + self.sizes[row]])

    def nodes(self, rows: Sequence[int]) -> NodeTensors:
        """Of some rows' trees, on the device; packing, noise and walk ask for the same."""
        if tuple(rows) in self._nodes:
            return self._nodes[tuple(rows)]
        most = self._tokens.shape[1]
        flat = [row * most + node for row in rows for node in range(self.sizes[row])]
        chosen = upload(flat, self._tokens.device)
        tokens, depths, parents = (part.flatten()[chosen] for part in (self._tokens, self._depths, self._parents))
        found = NodeTensors(tokens, depths, parents, self._ancestors.flatten(0, 1)[chosen])
        self._nodes[tuple(rows)] = found
        return found


class GrownTree(DraftTree):
    """One of `GrownTrees`, which knows its size at once and its nodes when asked."""

    def __init__(self, batch: GrownTrees, row: int) -> None:
        self.__dict__.update(batch=batch, row=row)

    batch: GrownTrees
    row: int

    def __len__(self) -> int:
        return self.batch.sizes[self.row]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        return (self.tokens, self.parents) == (other.tokens, other.parents)

    __hash__ = DraftTree.__hash__

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.batch.column(self.row, 0)

    @property
    def parents(self) -> tuple[int, ...]:
        return self.batch.column(self.row, 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.batch.column(self.row, 2)


def grown_together(trees: Sequence[DraftTree]) -> tuple[GrownTrees, list[int]] | None:
    """The batch that all trees with nodes are of, and their rows in it; None where they are not of one."""
    grown = [tree for tree in trees if len(tree)]
    batches = {id(tree.batch): tree.batch for tree in grown if isinstance(tree, GrownTree)}
    if len(batches) != 1 or not all(isinstance(tree, GrownTree) for tree in grown):
        return None
    return next(iter(batches.values())), [tree.row for tree in grown if isinstance(tree, GrownTree)]


def node_tensors(trees: Sequence[DraftTree], device: torch.device) -> NodeTensors:
    """The nodes of all trees, where they are or copied to the device."""
    together = grown_together(trees)
    if together is not None:
        batch, rows = together
        return batch.nodes(rows)
    words = max(1, max((-(-len(tree) // WORD_BITS) for tree in trees), default=1))
    return NodeTensors(
        tokens=upload([token for tree in trees for token in tree.tokens], device),
        depths=upload([depth for tree in trees for depth in tree.depths], device),
        parents=upload([parent for tree in trees for parent in tree.parents], device),
        ancestors=upload([split_words(bits, words) for tree in trees for bits in tree.ancestors], device).view(
            -1, words
        ),
    )


def _ancestors(parents: Tensor, levels: int) -> Tensor:
    """int64 `[rows, nodes, words]`."""
    (rows, count), device = parents.shape, parents.device
    words = max(1, -(-count // WORD_BITS))
    own = upload([split_words(1 << node, words) for node in range(count)], device)
    bits = own.view(1, count, words).expand(rows, -1, -1)
    under_root = (parents == ROOT)[:, :, None]
    index = parents.clamp_min(0)[:, :, None].expand(-1, -1, words)
    for _ in range(levels - 1):
        bits = own.view(1, count, words) | bits.gather(1, index).masked_fill(under_root, 0)
    return bits
