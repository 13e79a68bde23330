"""Draft trees on a device, which the host reads in one transfer with their outcome."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS
from specdec.kernels.types.tree import NO_DRAFTS, DraftTree, HostNodes
from specdec.kernels.types.types import ROOT, DraftProbs, NodeTensors, NoiseColumns, NoiseKey, NoiseRows
from specdec.kernels.types.upload import Download, Packet, upload

# Marks roots and nodes that no children were drawn for.
NO_PROBS = -1


# The nodes of one tree per row, parents before children, int64 `[4 + words, rows, most]`: tokens; the place of each
# node's parent, `ROOT` for a child of the root; depths; ranks, as `DraftTree.ranks`; and the words of each node's
# ancestors, itself included. Entries behind a row's nodes have no meaning.
NodeTable = Tensor


def node_table(columns: Sequence[Tensor], depth: int) -> NodeTable:
    """Return the table of trees of at most `depth` levels.

    Args:
        columns: tokens, parents, depths and ranks, int64 `[rows, most]`.
    """
    return torch.cat([torch.stack([*columns]), ancestors_of(columns[1], depth).permute(2, 0, 1)])


class DeviceNodes:
    """The nodes of several trees on a device; the host knows only how many each has.

    Args:
        make: returns the nodes; called once, when they are first used.
        sizes: nodes of each row's tree.
        depth: most levels.
        most: most nodes of a row.
        probs: distributions that children were drawn from, its `rows` here `[rows, 1 + most]`; None if no tree was
            drawn.
        drawn: of each row, whether its children were drawn; by default all if there are `probs`.
        chained: of each row, `DraftTree.num_chained`; by default 0.
    """

    def __init__(
        self,
        make: Callable[[], NodeTable],
        sizes: Sequence[int],
        depth: int,
        most: int,
        probs: DraftProbs | None = None,
        drawn: Sequence[bool] | None = None,
        chained: Sequence[int] | None = None,
    ) -> None:
        self._make = make
        self.sizes, self.depth, self.most, self.probs = sizes, depth, most, probs
        self.drawn = [probs is not None] * len(sizes) if drawn is None else drawn
        self.chained = [0] * len(sizes) if chained is None else chained
        self.host: list[list[int]] | None = None
        self._chosen: dict[tuple[int, ...], Callable[[], NodeTensors]] = {}

    @staticmethod
    def made(table: NodeTable, sizes: Sequence[int], depth: int, **given: Any) -> "DeviceNodes":
        """Return nodes that are there."""
        return DeviceNodes(lambda: table, sizes, depth, table.shape[2], **given)

    @cached_property
    def table(self) -> NodeTable:
        """The nodes."""
        return self._make()

    @staticmethod
    def of(trees: Sequence[DraftTree], device: torch.device) -> "DeviceNodes":
        """Return trees that the host knows, none of them drawn."""
        sizes = [len(tree) for tree in trees]
        most, depth = max(sizes), max(max(tree.depths, default=0) for tree in trees)
        parts = [(tree.tokens, tree.parents, tree.depths, tree.ranks or range(len(tree))) for tree in trees]
        rows = [[[*part, *[0] * (most - len(part))] for part in each] for each in parts]
        table = node_table(upload(rows, device).view(len(trees), 4, most).unbind(1), depth)
        return DeviceNodes.made(table, sizes, depth, chained=[tree.num_chained for tree in trees])

    @cached_property
    def paths(self) -> Tensor:
        """Tokens on the way to the root and to each node, int64 `[rows, 1 + most, depth]`, padded with -1."""
        (tokens, parents, depths, *_), rows = self.table, len(self.sizes)
        place = torch.arange(self.depth, device=tokens.device)
        own = torch.where(place == depths[:, :, None] - 1, tokens[:, :, None], -1)
        root = own.new_full((rows, 1, self.depth), -1)
        above = (parents + 1)[:, :, None].expand(-1, -1, self.depth)
        paths = torch.cat([root, own], 1)
        for _ in range(self.depth - 1):
            paths = torch.cat([root, torch.where(own >= 0, own, paths.gather(1, above))], 1)
        return paths

    def chosen(self, rows: Sequence[int], packet: Packet) -> Callable[[], NodeTensors]:
        """Return what returns the nodes of some rows' trees, once the packet is sent.

        Packing, noise and verification ask for the same nodes, which are taken together when they are asked for first.
        """
        found = self._chosen.get(tuple(rows))
        if found is None:
            flat = [row * self.most + node for row in rows for node in range(self.sizes[row])]
            # An even number, so that all columns begin at multiples of 16 bytes, as kernels are compiled for.
            places = packet.add([*flat, *flat[: len(flat) % 2]])

            def take() -> NodeTensors:
                taken = self.table.flatten(1).index_select(1, places)[:, : len(flat)]
                return NodeTensors(taken[0], taken[2], taken[1], taken[4:].t())

            found = self._chosen[tuple(rows)] = cache(take)
        return found

    def tree(self, row: int) -> DraftTree:
        """Return a row's tree without its `draft_probs`. `host` must be set: tokens, parents and ranks of all."""
        assert self.host is not None
        start = row * self.most
        tokens, parents, ranks = (tuple(part[start : start + self.sizes[row]]) for part in self.host)
        return DraftTree(tokens, parents, ranks=ranks, num_chained=self.chained[row], check=False)

    def concat(self, other: "DeviceNodes") -> "DeviceNodes":
        """Return these trees, followed by the others."""
        both = (self, other)
        most, device = max(nodes.most for nodes in both), self.table.device
        columns = [[pad(part, (0, most - nodes.most)) for part in nodes.table[:4]] for nodes in both]
        depth = max(self.depth, other.depth)
        tables, rows, count = list[Tensor](), list[Tensor](), 0
        for nodes in both:
            if nodes.probs is None:
                rows.append(torch.full((len(nodes.sizes), 1 + most), NO_PROBS, dtype=torch.int64, device=device))
            else:
                own = nodes.probs.rows
                shifted = torch.where(own == NO_PROBS, own, own + count)
                rows.append(pad(shifted, (0, most - nodes.most), value=NO_PROBS))
                tables.append(nodes.probs.table)
                count += len(nodes.probs.table)
        return DeviceNodes.made(
            node_table([torch.cat(parts) for parts in zip(*columns, strict=True)], depth),
            sizes=[*self.sizes, *other.sizes],
            depth=depth,
            probs=DraftProbs(torch.cat(tables), torch.cat(rows)) if tables else None,
            drawn=[*self.drawn, *other.drawn],
            chained=[*self.chained, *other.chained],
        )


# Writes the nodes of trees into a packed batch: sets tokens (int64 `[rows]`), adds depths to positions (int64 `[rows]`,
# the root's at nodes), and sets ancestors (int64 `[rows, words]`).
Completion = Callable[[Tensor, Tensor, Tensor], None]


class DeviceTrees:
    """Trees on a device, with the methods of `HostTrees`.

    Args:
        batch: the nodes.
        rows: the batch's row of each tree, None for an empty tree; by default all rows in order.
    """

    def __init__(self, batch: DeviceNodes, rows: Sequence[int | None] | None = None) -> None:
        self.batch = batch
        self.rows = range(len(batch.sizes)) if rows is None else rows
        self.sizes = [0 if row is None else batch.sizes[row] for row in self.rows]
        self.depth = batch.depth
        self.is_drawn = [row is not None and batch.sizes[row] > 0 and batch.drawn[row] for row in self.rows]

    def select(self, rows: Sequence[int | None]) -> "DeviceTrees":
        return DeviceTrees(self.batch, [None if row is None else self.rows[row] for row in rows])

    def concat(self, others: "DeviceTrees") -> "DeviceTrees":
        shift = len(self.batch.sizes)
        rows = [*self.rows, *(None if row is None else shift + row for row in others.rows)]
        return DeviceTrees(self.batch.concat(others.batch), rows)

    def host_nodes(self, row: int) -> HostNodes:
        return HostNodes(*[(0,) * self.sizes[row]] * 3)

    def completion(self, places: Sequence[int], packet: Packet) -> Completion | None:
        chosen, at = self.nodes(packet), packet.add(places)

        def complete(tokens: Tensor, positions: Tensor, ancestors: Tensor) -> None:
            nodes = chosen()
            tokens.index_copy_(0, at, nodes.tokens)
            positions.index_add_(0, at, nodes.depths)
            ancestors[:, : nodes.ancestors.shape[1]].index_copy_(0, at, nodes.ancestors[:, : ancestors.shape[1]])

        return complete

    def nodes(self, packet: Packet) -> Callable[[], NodeTensors]:
        return self.batch.chosen([row for row in self.rows if row is not None and self.batch.sizes[row]], packet)

    def paths(self, row: int, device: torch.device) -> Tensor:
        own = self.rows[row]
        if own is None:
            return torch.empty(1, 0, dtype=torch.int64, device=device)
        return self.batch.paths[own, : 1 + self.sizes[row]]

    def draft_probs(self, device: torch.device) -> DraftProbs:
        assert self.batch.probs is not None
        assert all(self.is_drawn)
        width = 1 + self.batch.most
        flat = [
            row * width + place
            for row, size in zip(self.rows, self.sizes, strict=True)
            if row is not None
            for place in range(1 + size)
        ]
        return DraftProbs(self.batch.probs.table, self.batch.probs.rows.flatten()[upload(flat, device)])

    def noise(self, keys: Sequence[NoiseKey | None], packet: Packet) -> Callable[[], NoiseRows]:
        """Return the noise as columns, since the host does not know the depths."""
        counts = [1 + size for size in self.sizes]
        columns = NoiseColumns.of([key for key, count in zip(keys, counts, strict=True) for _ in range(count)], packet)
        if not any(keys):
            return lambda: NoiseRows((), columns)
        node_rows, end = list[int](), 0
        for count in counts:
            node_rows += range(end + 1, end + count)
            end += count
        chosen, at = self.nodes(packet), packet.add(node_rows)
        # Not added twice, however often it is asked for.
        return cache(
            lambda: NoiseRows((), columns._replace(positions=columns.positions.index_add_(0, at, chosen().depths)))
        )

    def with_probs(self) -> list[DraftTree]:
        found = []
        for row, drawn, tree in zip(self.rows, self.is_drawn, self.read(), strict=True):
            if drawn and row is not None and self.batch.probs is not None:
                own = self.batch.probs.rows[row, : 1 + len(tree)].clamp_min(0)
                tree = replace(tree, draft_probs=self.batch.probs.table[own], check=False)
            found.append(tree)
        return found

    def read(self) -> list[DraftTree]:
        if self.batch.host is None and any(self.sizes):
            self.begin_read([])()
        return [
            self.batch.tree(row) if row is not None and size else NO_DRAFTS
            for row, size in zip(self.rows, self.sizes, strict=True)
        ]

    def begin_read(self, parts: Sequence[Tensor]) -> Callable[[], list[list[int]]]:
        if self.batch.host is not None or not any(self.sizes):
            return Download(parts).read
        tokens, parents, _, ranks = self.batch.table[:4]
        download = Download([*parts, tokens, parents, ranks])

        def read() -> list[list[int]]:
            numbers = download.read()
            self.batch.host = numbers[len(parts) :]
            return numbers[: len(parts)]

        return read


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Return the nodes on the path to each node as bit sets, int64 `[rows, nodes, words]`."""
    (rows, count), device = parents.shape, parents.device
    words = max(1, ceil_div(count, WORD_BITS))
    node = torch.arange(count, device=device)
    own = (node.bitwise_and(WORD_BITS - 1).new_ones(count) << node.bitwise_and(WORD_BITS - 1))[:, None]
    if words > 1:
        own = own.new_zeros(count, words).scatter_(1, (node // WORD_BITS)[:, None], own)
    bits = own.view(1, count, words).expand(rows, -1, -1)
    under_root = (parents == ROOT)[:, :, None]
    index = parents.clamp_min(0)[:, :, None].expand(-1, -1, words)
    for _ in range(depth - 1):
        bits = own.view(1, count, words) | bits.gather(1, index).masked_fill(under_root, 0)
    return bits
