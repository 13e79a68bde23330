"""Adapters as the compiled library reads them."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.native.library import (
    BLOCK,
    MOST_PARTS,
    AdapterFields,
    Library,
    LoRAFields,
    LoRAPartFields,
    numbers,
)
from specdec.kernels.native.packed_matrix import PackedMatrix
from specdec.kernels.types.adapters import LayerAdapter, LowRank
from specdec.kernels.types.fused import FusedLayer
from specdec.kernels.types.product import Product
from specdec.kernels.types.ragged_rows import RaggedRows


class Adaptable:
    """A layer or product that adapters may stand beside.

    Attributes:
        adapters: those of its model, among which it has a `number`; None without.
    """

    adapters: "NativeAdapters | None" = None
    number = 0


class NativeAdapters:
    """Adapters of layers that run in one call.

    Args:
        layers: of the model, in order.
        context: a product beside the layers, whose adapter comes behind theirs, under the name "qkv"; None without.

    Attributes:
        running: the adapted rows of products of no layer, as `spans` returns them.
    """

    def __init__(self, library: Library, layers: Sequence[FusedLayer], context: Product | None = None) -> None:
        self.library = library
        self.running = numbers([])
        # By place: its layers' fields, and the matrices that these point to.
        self._places: dict[int, tuple[ctypes.Array[AdapterFields], list[PackedMatrix]]] = {}
        for number, each in enumerate((*layers, *([] if context is None else [context]))):
            assert isinstance(each, Adaptable)
            each.adapters, each.number = self, number

    def put(self, place: int, layers: Sequence[LayerAdapter]) -> None:
        """See `AdapterBank.put`."""
        kept: list[PackedMatrix] = []
        made = [
            AdapterFields(**{name: self._product(name, parts, kept) for name, parts in layer.items()})
            for layer in layers
        ]
        self._places[place] = (AdapterFields * len(made))(*made), kept

    def use(self, rows: RaggedRows) -> None:
        """See `AdapterBank.use`. Layers find their adapters by the rows themselves."""
        self.running = self.spans(rows.adapters, rows.query_lens) if rows.adapters else numbers([])

    def addresses(self, adapters: Sequence[int]) -> "array[int]":
        """Return where the layers of each request's adapter lie, 0 for none."""
        return numbers(ctypes.addressof(self._places[place][0]) if place else 0 for place in adapters)

    def spans(self, adapters: Sequence[int], counts: Sequence[int]) -> "array[int]":
        """Return the adapted rows of requests as `adapter_rows` of native.h, three numbers each.

        Args:
            adapters: place of each request's adapter, 0 for none.
            counts: rows of each request.
        """
        found = list[list[int]]()
        for place, count, end in zip(adapters, counts, accumulate(counts), strict=True):
            if not place:
                continue
            layers = ctypes.addressof(self._places[place][0])
            if found and found[-1][1:] == [end - count, layers]:
                found[-1][1] = end
            else:
                found.append([end - count, end, layers])
        return numbers(number for span in found for number in span)

    def _product(self, name: str, parts: Sequence[LowRank], kept: list[PackedMatrix]) -> LoRAFields:
        """Pack what an adapter adds beside a weight."""

        def packed(weight: Tensor, **layout: Any) -> PackedMatrix:
            kept.append(PackedMatrix(weight, None, self.library.dtype, self.library.weights, **layout))
            return kept[-1]

        in_turn, starts = name == "gate_up", _starts(parts)
        if not in_turn and (len(parts) > MOST_PARTS or any(start % BLOCK for start in starts)):
            # The library adds to whole blocks of a weight, so each part must begin with one.
            parts = [_joined(parts)]
        firsts = [0, 2] if in_turn else [start // BLOCK for start in _starts(parts)]
        placed = [(first, part) for first, part in zip(firsts, parts, strict=True) if len(part.down)]
        if not placed:
            return LoRAFields()
        # Each rank is made even, as the depth of every matrix is.
        order, columns, total = list[int](), list[int](), 0
        for _, (down, _) in placed:
            columns.append(len(order))
            order += [*range(total, total + len(down)), *[-1] * (len(down) % 2)]
            total += len(down)
        low = packed(torch.cat([down for _, (down, _) in placed]), order=torch.tensor(order))
        fields = [
            LoRAPartFields(first, in_turn, column, packed(up).fields)
            for (first, (_, up)), column in zip(placed, columns, strict=True)
        ]
        return LoRAFields(len(fields), low.fields, tuple(fields))


def _starts(parts: Sequence[LowRank]) -> list[int]:
    """Return the weight's column at which each part begins."""
    return [0, *accumulate(len(part.up) for part in parts)][: len(parts)]


def _joined(parts: Sequence[LowRank]) -> LowRank:
    """Return parts as one, of the sum of their ranks."""
    up: Tensor = torch.block_diag(*(part.up for part in parts))  # type: ignore[no-untyped-call]
    return LowRank(torch.cat([part.down for part in parts]), up)
