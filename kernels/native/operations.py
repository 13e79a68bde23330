"""The operations of a step on a CPU by the compiled library."""

from array import array
from collections.abc import Sequence
from ctypes import addressof
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.native.adapters import Adaptable
from specdec.kernels.native.library import (
    KV_KINDS,
    LayerFields,
    Library,
    StepFields,
    address_of,
    joined,
    numbers,
    pointer_to,
)
from specdec.kernels.native.packed_matrix import PackedMatrix, Rounding, blocks_in_turn
from specdec.kernels.types.fused import FusedLayer, LayerWeights
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.kernels.types.ragged_rows import RaggedRows


class NativeProjection(Adaptable):
    """`x @ weight.T + bias` with the weight packed for the library.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
        quantization: of the weight; see `PackedMatrix`.

    Attributes:
        fields: the packed weight, for the library.
    """

    keeps_weight = False

    def __init__(
        self, library: Library, weight: Tensor, bias: Tensor | None = None, quantization: Rounding = "none"
    ) -> None:
        self.library, self.weight, self.bias, self.quantization = library, weight, bias, quantization
        self.size = weight.shape[0]
        self.packed = packed_matrix(library, weight, bias, quantization)
        self.fields = self.packed.fields

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        out = x.new_empty(x.shape[0], self.size)
        if x.shape[0]:
            x, step = x.contiguous(), self._adapted(x.shape[0])
            self.library.call("product", self.fields, step, len(x), x.data_ptr(), out.data_ptr())
        return out

    def _adapted(self, rows: int) -> StepFields | None:
        if self.adapters is None or not self.adapters.running:
            return None
        spans = self.adapters.running
        return StepFields(rows=rows, layer=self.number, spans=len(spans) // 3, adapted=address_of(spans))


class PackedRows:
    """Rows of a quantised weight, read where the library has packed it."""

    def __init__(self, library: Library, packed: PackedMatrix) -> None:
        self.library, self.packed = library, packed

    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """See `RowSource`."""
        out = torch.empty(len(rows), self.packed.fields.inputs, dtype=self.library.dtype)
        rows = rows.contiguous()
        self.library.call("rows", self.packed.fields, len(rows), rows.data_ptr(), out.data_ptr())
        return out.to(dtype)


def packed_matrix(
    library: Library, weight: Tensor, bias: Tensor | None = None, quantization: Rounding = "none"
) -> PackedMatrix:
    """Pack a weight with its rows in order. A quantised one is packed once, and keeps this form alone."""
    if not isinstance(weight, QuantizedTensor):
        return PackedMatrix(weight, bias, library.dtype, library.weights, quantization)
    if isinstance(weight.source, PackedRows) and bias is None:
        return weight.source.packed
    packed = PackedMatrix(weight, bias, library.dtype, library.weights)
    weight.packed_in(PackedRows(library, packed))
    return packed


def embedding_fields(library: Library, embedding: Tensor) -> tuple[int | None, int | None, object]:
    """Return where an embedding lies as plain numbers, where its packed matrix, and what keeps them there."""
    if isinstance(embedding, QuantizedTensor):
        packed = packed_matrix(library, embedding)
        return None, addressof(packed.fields), packed
    table = embedding.contiguous()
    return table.data_ptr(), None, table


def layers_of(given: Sequence[FusedLayer]) -> "tuple[list[NativeLayer], array[int]]":
    """Return layers as the library has prepared them, and their addresses."""
    layers = [layer for layer in given if isinstance(layer, NativeLayer)]
    assert len(layers) == len(given)
    return layers, numbers(addressof(layer.fields) for layer in layers)


def vectors_of(*given: Tensor | None) -> list[Tensor | None]:
    """Return norms and other vectors as the library reads them."""
    return [None if vector is None else vector.detach().float().contiguous() for vector in given]


class NativeLayer(Adaptable):
    """A decoder layer in one call. It keeps its weights in packed form alone.

    In 4 bits it keeps them unrounded besides where the processor has tile registers: those multiply many rows with
    bfloat16 in less time than with numbers that are unpacked.
    """

    fields: LayerFields

    def __init__(self, library: Library, weights: LayerWeights, quantization: Rounding = "none") -> None:
        self.library = library
        has_both = quantization == "q4" and library.form == "amx" and not isinstance(weights.qkv[0], QuantizedTensor)
        self._for_many = NativeLayer(library, weights) if has_both else None
        hidden, intermediate = weights.mlp.down[0].shape
        order = blocks_in_turn(intermediate)
        made = partial(PackedMatrix, dtype=library.dtype, memory=library.weights, quantization=quantization)
        qkv, output = made(*weights.qkv), made(*weights.output)
        mlp = weights.mlp
        gate_up, down = made(*mlp.gate_up, order=order), made(*mlp.down, depth=len(order) // 2)
        vectors = vectors_of(
            weights.input_norm, weights.query_norm, weights.key_norm, weights.post_norm, weights.slopes
        )
        self._kept = (qkv, output, gate_up, down, vectors)
        self.fields = LayerFields(
            weights.heads,
            weights.kv_heads,
            weights.head_dim,
            hidden,
            weights.window,
            weights.eps,
            *map(pointer_to, vectors),
            qkv.fields,
            output.fields,
            gate_up.fields,
            down.fields,
            None if self._for_many is None else addressof(self._for_many.fields),
        )

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        slots: Tensor,
        rows: RaggedRows,
        scales: Tensor | None = None,
    ) -> Tensor:
        step = step_of(rows)
        fields = step.over(kv, scales)
        fields.slots = slots.data_ptr()
        cos, sin = cos.contiguous(), sin.contiguous()
        fields.cos, fields.sin = cos.data_ptr(), sin.data_ptr()
        if rows.adapters:
            assert self.adapters is not None
            step.adapted = step.adapted or self.adapters.spans(rows.adapters, rows.query_lens)
            fields.layer, fields.spans, fields.adapted = self.number, len(step.adapted) // 3, address_of(step.adapted)
        out = torch.empty_like(residual)
        self.library.call("layer", self.fields, fields, pointer_to(x), residual.data_ptr(), out.data_ptr())
        return out


class StepRows:
    """The rows of a step as the library reads them.

    Attributes:
        adapted: rows with adapters, once a layer has looked them up.
    """

    adapted: "array[int] | None" = None

    def __init__(self, rows: RaggedRows) -> None:
        assert not rows.table_rows, "block tables stay on a device where graphs read them"
        request = [r for r, count in enumerate(rows.query_lens) for _ in range(count)]
        self._kept, places = joined(request, rows.tree_starts, rows.lengths, rows.firsts)
        self._tensors = [tensor.contiguous() for tensor in (rows.block_tables, rows.visible, rows.ancestors)]
        tables, visible, ancestors = (tensor.data_ptr() for tensor in self._tensors)
        self.fields = StepFields(
            rows=len(request),
            words=rows.ancestors.shape[1],
            table_blocks=rows.block_tables.shape[1],
            block_size=rows.block_size,
            first=rows.first,
            request=places[0],
            tables=tables,
            visible=visible,
            ancestors=ancestors,
            tree_starts=places[1],
            lengths=places[2],
            firsts=places[3] if rows.firsts else None,
        )

    def over(self, kv: Tensor, scales: Tensor | None = None) -> StepFields:
        """Return the fields, with one layer's cache and the checkpoint's scales of it."""
        fields = self.fields
        fields.kv_kind, fields.slot_bytes = KV_KINDS[kv.dtype], kv.stride(0) * kv.element_size()
        fields.kv, fields.kv_scales = kv.data_ptr(), pointer_to(scales)
        return fields


def step_of(rows: RaggedRows) -> StepRows:
    """Return a step's rows for the library; made once a step."""
    step: StepRows | None = rows.plans.get("native")
    if step is None:
        step = rows.plans["native"] = StepRows(rows)
    return step


class NativeOperations:
    """Operations of the kernel set that take tensors alone."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def tree_attention(
        self,
        query: Tensor,
        kv: Tensor,
        rows: RaggedRows,
        scale: float,
        window: int = 0,
        slopes: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """See `specdec.kernels.triton.tree_attention`."""
        query, slopes = query.contiguous(), None if slopes is None else slopes.float()
        out = torch.empty_like(query)
        (_, heads, dim), step = query.shape, step_of(rows).over(kv, kv_scales)
        sizes, places = (heads, kv.shape[1] // 2, dim, window), (query.data_ptr(), out.data_ptr())
        self.library.call("attend", *sizes, pointer_to(slopes), scale, step, *places)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `specdec.kernels.reference.elementwise.rms_norm`."""
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self.library.call("norm", x.numel() // size, size, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr())
        return out

    def filter_logits(self, scores: Tensor, limits: Tensor) -> Tensor:
        """See `specdec.kernels.triton.logit_filters`."""
        assert scores.dtype == limits.dtype == torch.float32
        given, limits = scores.contiguous(), limits.contiguous()
        self.library.call("filter", *given.shape, given.data_ptr(), limits.data_ptr())
        return scores if given is scores else scores.copy_(given)


class NativeMoves:
    """Moves of cache entries between slots, of all tensors given; see `KernelSet.entry_moves`.

    All entries are read before any is written.
    """

    def __init__(self, library: Library, parts: Sequence[Tensor]) -> None:
        self.library, self._parts = library, list(parts)
        # Asked once: the tensors stay where they are.
        self._places = [
            (part.data_ptr(), part.shape[0], part.stride(0) * part.element_size(), part.stride(1) * part.element_size())
            for part in parts
        ]

    def __call__(self, source: Sequence[int], target: Sequence[int]) -> None:
        kept, ends = joined(source, target)
        for place in self._places:
            self.library.call("move", *place, len(source), *ends)
        # Until here the library reads them.
        del kept
