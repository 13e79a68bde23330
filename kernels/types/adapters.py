"""Low-rank adapters of a model's layers (LoRA, Hu et al. 2021), and which rows of a step have one."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.types.product import Product
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.upload import upload

# Rows of an adapter that are multiplied together: the fewest that tensor cores take.
TILE_ROWS = 16
# Columns of a weight that are added to together.
TILE_COLUMNS = 128
# Under which the sorted rows are kept in `RaggedRows.plans`.
ADAPTED = "adapters"


class LowRank(NamedTuple):
    """Low-rank update of one weight: an adapter adds `x @ down.T @ up.T` to its product. Rank 0 adds nothing.

    Attributes:
        down: `[rank, inputs]`.
        up: `[columns, rank]`, the adapter's scale included.
    """

    down: Tensor
    up: Tensor


class AdaptedPart(NamedTuple):
    """A linear layer in a checkpoint, and the rows of its weight."""

    module: str
    columns: int


class AdaptableProduct(NamedTuple):
    """A product of a layer that adapters may change.

    Attributes:
        inputs: columns of its weight.
        parts: the layers of a checkpoint that are joined in it.
    """

    inputs: int
    parts: tuple[AdaptedPart, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of its inputs, then the columns of each part."""
        return self.inputs, *(part.columns for part in self.parts)


def adaptable(inputs: int, parts: Mapping[str, int]) -> AdaptableProduct:
    """Return a product of parts, whose names and columns are given."""
    return AdaptableProduct(inputs, tuple(AdaptedPart(*part) for part in parts.items()))


# Low-rank updates of the parts of each product of a layer, by the products' names: "qkv", "output", and those of the
# layer's MLP.
LayerAdapter = Mapping[str, Sequence[LowRank]]


class AdapterBank(Protocol):
    """Adapters of a model in numbered places, which rows name; 0 is no adapter."""

    def put(self, place: int, layers: Sequence[LayerAdapter]) -> None:
        """Place an adapter's weights, in place of those before. No row of the running step has that place."""
        ...

    def use(self, rows: RaggedRows) -> None:
        """Have the passes that follow adapt these rows."""
        ...


class StackedLowRank(NamedTuple):
    """One product's adapters in all places, padded with zeros to one rank.

    Attributes:
        down: `[places, parts, rank, inputs]`.
        up: `[places, columns, rank]`, columns of all parts in turn.
        ranks: int32 `[places, parts]`, 0 where there is no adapter.
        tiles: int32 `[tiles, 3]`: columns `[begin, end)` of one part each: part, begin, end.
        starts: where each part's columns begin, and the end.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    tiles: Tensor
    starts: Sequence[int]


class AdapterRows(NamedTuple):
    """The rows of a step that have an adapter, sorted by it.

    Attributes:
        order: int64 `[adapted rows]`, packed rows, those of one adapter side by side; there may be unused ones behind.
        tiles: int32 `[tiles, 3]`, of at most `TILE_ROWS` rows each: place of an adapter, and where its rows begin and
            end in `order`; zeros for a tile without rows.
    """

    order: Tensor
    tiles: Tensor

    @staticmethod
    def of(rows: RaggedRows) -> "AdapterRows | None":
        """Sort a step's rows, once a step; None if none has an adapter."""
        if ADAPTED not in rows.plans:
            rows.plans[ADAPTED] = AdapterRows._sorted(rows) if any(rows.adapters) else None
        found: AdapterRows | None = rows.plans[ADAPTED]
        return found

    @staticmethod
    def _sorted(rows: RaggedRows) -> "AdapterRows":
        found: dict[int, list[int]] = {}
        starts = itertools.accumulate(rows.query_lens, initial=0)
        for place, count, start in zip(rows.adapters, rows.query_lens, starts, strict=False):
            if place:
                found.setdefault(place, []).extend(range(start, start + count))
        order, tiles = list[int](), list[tuple[int, int, int]]()
        for place, own in found.items():
            begin, end = len(order), len(order) + len(own)
            order += own
            tiles += [(place, first, min(first + TILE_ROWS, end)) for first in range(begin, end, TILE_ROWS)]
        device = rows.visible.device
        return AdapterRows(upload(order, device), upload(tiles, device, torch.int32))


class AdapterBuffer:
    """Buffers at fixed addresses for the adapted rows of captured steps. Graphs of all sizes share them.

    Args:
        tokens: rows of the largest step.
        places: number of adapters.
    """

    def __init__(self, tokens: int, places: int, device: torch.device) -> None:
        self._places = places
        self._order = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._tiles = torch.zeros(self._num_tiles(tokens), 3, dtype=torch.int32, device=device)

    def _num_tiles(self, tokens: int) -> int:
        """Return the largest number of tiles for `tokens` rows."""
        places = min(tokens, self._places)
        return places + (tokens - places) // TILE_ROWS

    def rows(self, tokens: int) -> AdapterRows:
        """Return the rows to capture a pass of `tokens` tokens with."""
        return AdapterRows(self._order[:tokens], self._tiles[: self._num_tiles(tokens)])


def fill_adapted(own: AdapterRows | None, given: AdapterRows | None) -> None:
    """Copy another step's rows into captured ones, where there are both; unused tiles do nothing."""
    if own is None or given is None:
        return
    own.order[: len(given.order)].copy_(given.order)
    own.tiles[: len(given.tiles)].copy_(given.tiles)
    own.tiles[len(given.tiles) :].zero_()


# Adds to a product's outputs `[rows, columns]` what adapters make of its inputs `[rows, inputs]`.
GroupedLoRA = Callable[[Tensor, Tensor, StackedLowRank, AdapterRows], None]


class StackedAdapters:
    """Adapters beside products that are called one by one.

    Args:
        add: adds what adapters make of a product's inputs.
        places: number of adapters.
        rank: the largest.

    Attributes:
        rows: the rows that the next products have; None while none has an adapter.
    """

    def __init__(self, add: GroupedLoRA, places: int, rank: int) -> None:
        self.add, self.places, self.rank = add, places, rank
        self.rows: AdapterRows | None = None
        self._layers: list[dict[str, AdaptedProduct]] = []

    def adapt(self, products: Mapping[str, tuple[Product, Sequence[int]]], like: Tensor) -> "dict[str, AdaptedProduct]":
        """Return the products of the next layer with adapters beside them.

        Args:
            products: each with its inputs' size, then the columns of its parts.
            like: a tensor of the dtype and on the device of the weights.
        """
        layer = {name: AdaptedProduct(self, product, sizes, like) for name, (product, sizes) in products.items()}
        self._layers.append(layer)
        return layer

    def put(self, place: int, layers: Sequence[LayerAdapter]) -> None:
        """See `AdapterBank.put`."""
        for own, given in zip(self._layers, layers, strict=True):
            for name, product in own.items():
                product.put(place, given[name])

    def use(self, rows: RaggedRows) -> None:
        """See `AdapterBank.use`."""
        self.rows = AdapterRows.of(rows)


class AdaptedProduct:
    """A product with adapters beside it."""

    def __init__(self, bank: StackedAdapters, product: Product, sizes: Sequence[int], like: Tensor) -> None:
        self.bank, self.product = bank, product
        self.weight, self.bias, self.size = product.weight, product.bias, product.size
        inputs, *columns = sizes
        starts = list(itertools.accumulate(columns, initial=0))
        tiles = [
            (part, begin, min(begin + TILE_COLUMNS, end))
            for part, (start, end) in enumerate(itertools.pairwise(starts))
            for begin in range(start, end, TILE_COLUMNS)
        ]
        places, rank = bank.places + 1, bank.rank
        self.stacked = StackedLowRank(
            like.new_zeros(places, len(columns), rank, inputs),
            like.new_zeros(places, starts[-1], rank),
            like.new_zeros(places, len(columns), dtype=torch.int32),
            upload(tiles, like.device, torch.int32),
            starts,
        )

    @property
    def keeps_weight(self) -> bool:
        return self.product.keeps_weight

    def put(self, place: int, parts: Sequence[LowRank]) -> None:
        """Place an adapter's matrices."""
        down, up, ranks, _, starts = self.stacked
        for tensor in (down, up, ranks):
            tensor[place].zero_()
        for part, each in enumerate(parts):
            rank = len(each.down)
            down[place, part, :rank].copy_(each.down)
            up[place, starts[part] : starts[part + 1], :rank].copy_(each.up)
            ranks[place, part].fill_(rank)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        out = self.product(x)
        if self.bank.rows is not None:
            self.bank.add(x, out, self.stacked, self.bank.rows)
        return out
