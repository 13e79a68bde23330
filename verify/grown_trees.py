"""Draft trees that stay on the device where they were grown, until the host reads them along with their outcome."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.ragged_rows import WORD_BITS
from specdec.kernels.types import DraftProbs
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


class NodeColumns(NamedTuple):
    """A tree per row, its nodes in order, parents before children; what lies behind them has no meaning.

    Attributes:
        tokens, depths: int64 `[rows, most]`.
        parents: int64 `[rows, most]`, the place of each node's parent, `ROOT` for a child of the root.
        ranks: int64 `[rows, most]`, as `DraftTree.ranks`.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor


class GrownTrees:
    """A tree per row, of whose nodes the host knows the number alone.

    Args:
        columns: the nodes.
        sizes: nodes of each row's tree.
        levels: at most.
        laws: what children were drawn from, `rows` here being `[rows, 1 + most]`; None where all were chosen without
            chance.
        drawn: of each row, whether its children were drawn; all of them where there are laws, unless it is given.
    """

    def __init__(
        self,
        columns: NodeColumns,
        sizes: Sequence[int],
        levels: int,
        laws: DraftProbs | None = None,
        drawn: Sequence[bool] | None = None,
    ) -> None:
        self.columns = columns
        self.sizes, self.levels, self.laws = sizes, levels, laws
        self.drawn = [laws is not None] * len(sizes) if drawn is None else drawn
        self._ancestors = _ancestors(columns.parents, levels)
        self._host: list[int] | None = None
        self._paths: Tensor | None = None
        self._nodes: dict[tuple[int, ...], NodeTensors] = {}

    def trees(self) -> list[DraftTree]:
        """One per row."""
        return [GrownTree(self, row) if size else DraftTree() for row, size in enumerate(self.sizes)]

    @property
    def table(self) -> Tensor:
        """int64 `[rows, 3 * most]`: what the host reads, tokens, parents and ranks."""
        return torch.cat([self.columns.tokens, self.columns.parents, self.columns.ranks], 1)

    def learn(self, table: list[int]) -> None:
        """The host has read `table`, row by row."""
        self._host = table

    def column(self, row: int, number: int) -> tuple[int, ...]:
        """Tokens (0), parents (1) or ranks (2) of a tree; read from the device with all others if need be."""
        if self._host is None:
            self.learn(self.table.flatten().tolist())
        assert self._host is not None
        start = (3 * row + number) * self.most
        return tuple(self._host[start : start + self.sizes[row]])

    @property
    def most(self) -> int:
        """Nodes that a row has room for."""
        return self.columns.tokens.shape[1]

    @property
    def paths(self) -> Tensor:
        """int64 `[rows, 1 + most, levels]` tokens from below the root to the root and each node, padded with -1."""
        if self._paths is None:
            self._paths = _paths(self.columns, self.levels)
        return self._paths

    def nodes(self, rows: Sequence[int]) -> NodeTensors:
        """Of some rows' trees, on the device; packing, noise and walk ask for the same."""
        if tuple(rows) in self._nodes:
            return self._nodes[tuple(rows)]
        flat = [row * self.most + node for row in rows for node in range(self.sizes[row])]
        chosen = upload(flat, self._ancestors.device)
        tokens, parents, depths, _ = (part.flatten()[chosen] for part in self.columns)
        found = NodeTensors(tokens, depths, parents, self._ancestors.flatten(0, 1)[chosen])
        self._nodes[tuple(rows)] = found
        return found

    def draft_laws(self, rows: Sequence[int]) -> DraftProbs:
        """Of some rows' roots and nodes, in turn; all were drawn."""
        assert self.laws is not None
        flat = [row * (1 + self.most) + place for row in rows for place in range(1 + self.sizes[row])]
        return DraftProbs(self.laws.table, self.laws.rows.flatten()[upload(flat, self.laws.rows.device)])


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

    def paths_on(self, device: torch.device) -> Tensor:
        return self.batch.paths[self.row, : 1 + len(self)].to(device)

    @property
    def is_drawn(self) -> bool:
        return self.batch.drawn[self.row]

    @property
    def draft_probs(self) -> Tensor | None:
        if not self.is_drawn:
            return None
        laws = self.batch.draft_laws([self.row])
        return laws.table[laws.rows].masked_fill(laws.rows[:, None] == NO_LAW, 0)


# In the place of a law where nothing was drawn.
NO_LAW = -1


def grown_together(trees: Sequence[DraftTree]) -> tuple[GrownTrees, list[int]] | None:
    """The batch that all trees with nodes are of, and their rows in it; None where they are not of one."""
    grown = [tree for tree in trees if len(tree)]
    batches = {id(tree.batch): tree.batch for tree in grown if isinstance(tree, GrownTree)}
    if len(batches) != 1 or not all(isinstance(tree, GrownTree) for tree in grown):
        return None
    return next(iter(batches.values())), [tree.row for tree in grown if isinstance(tree, GrownTree)]


def joined(trees: Sequence[DraftTree]) -> list[DraftTree]:
    """The trees of several batches as those of one; as they are where they are of one, or of the host."""
    grown = [tree for tree in trees if isinstance(tree, GrownTree)]
    batches = list({id(tree.batch): tree.batch for tree in grown}.values())
    if len(batches) < 2 or len(grown) < sum(1 for tree in trees if len(tree)):
        return list(trees)
    most, device = max(batch.most for batch in batches), batches[0].columns.tokens.device
    columns = [[pad(part, (0, most - batch.most)) for part in batch.columns] for batch in batches]
    tables, rows, count = list[Tensor](), list[Tensor](), 0
    for batch in batches:
        if batch.laws is None:
            rows.append(torch.full((len(batch.sizes), 1 + most), NO_LAW, dtype=torch.int64, device=device))
        else:
            own = batch.laws.rows
            rows.append(pad(torch.where(own == NO_LAW, own, own + count), (0, most - batch.most), value=NO_LAW))
            tables.append(batch.laws.table)
            count += len(batch.laws.table)
    whole = GrownTrees(
        NodeColumns(*(torch.cat(parts) for parts in zip(*columns, strict=True))),
        sizes=[size for batch in batches for size in batch.sizes],
        levels=max(batch.levels for batch in batches),
        laws=DraftProbs(torch.cat(tables), torch.cat(rows)) if tables else None,
        drawn=[drawn for batch in batches for drawn in batch.drawn],
    )
    firsts, first = {}, 0
    for batch in batches:
        firsts[id(batch)] = first
        first += len(batch.sizes)
    return [GrownTree(whole, firsts[id(t.batch)] + t.row) if isinstance(t, GrownTree) else t for t in trees]


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


def draft_laws(trees: Sequence[DraftTree], device: torch.device) -> DraftProbs:
    """What the children of all trees' roots and nodes were drawn from; all must be drawn."""
    together = grown_together(trees)
    if together is not None and all(map(len, trees)):
        batch, rows = together
        return batch.draft_laws(rows)
    table = torch.cat([tree.draft_probs for tree in trees if tree.draft_probs is not None]).to(device, torch.float32)
    return DraftProbs(table, torch.arange(len(table), device=device))


def levels_of(trees: Sequence[DraftTree]) -> int:
    """At least the depth of the deepest node."""
    together = grown_together(trees)
    return together[0].levels if together else max((max(tree.depths, default=0) for tree in trees), default=0)


def _paths(columns: NodeColumns, levels: int) -> Tensor:
    device, rows = columns.tokens.device, len(columns.tokens)
    place = torch.arange(levels, device=device)
    own = torch.where(place == columns.depths[:, :, None] - 1, columns.tokens[:, :, None], -1)
    root = own.new_full((rows, 1, levels), -1)
    above = (columns.parents + 1)[:, :, None].expand(-1, -1, levels)
    paths = torch.cat([root, own], 1)
    for _ in range(levels - 1):
        paths = torch.cat([root, torch.where(own >= 0, own, paths.gather(1, above))], 1)
    return paths


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
