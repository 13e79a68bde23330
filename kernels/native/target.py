"""A pass of the target by the compiled library, packing included."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.kernels.native.library import (
    BEFORE_LAYER,
    Library,
    MatrixFields,
    PassFields,
    TargetFields,
    address_of,
    cache_layout,
    joined,
    numbers,
    padded_tables,
)
from specdec.kernels.native.operations import NativeLayer, NativeProjection, embedding_fields
from specdec.kernels.types.fused import TargetCache, TargetWeights
from specdec.kernels.types.tree import DraftTree, TreeRow

NO_CALLS = BEFORE_LAYER()
NO_FEATURES, STATES_AS_FEATURES, TAPS_AS_FEATURES = range(3)


class NativeTarget:
    """The pass of one target over one cache."""

    def __init__(self, library: Library, weights: TargetWeights, cache: TargetCache) -> None:
        self.library, self.cache = library, cache
        layers = [layer for layer in weights.layers if isinstance(layer, NativeLayer)]
        assert len(layers) == len(weights.layers)
        features, feature, taps = NO_FEATURES, MatrixFields(), list[int]()
        if weights.features is not None:
            features = STATES_AS_FEATURES
            product = weights.features.product
            if product is not None:
                assert isinstance(product, NativeProjection)
                features, feature, taps = TAPS_AS_FEATURES, product.fields, list(weights.features.taps)
        assert isinstance(weights.output, NativeProjection)
        pointers, tapped = numbers([layer.address for layer in layers]), numbers(taps)
        norm = weights.norm.detach().float().contiguous()
        table, packed, embedding = embedding_fields(library, weights.embedding)
        self._kept = (weights, layers, pointers, tapped, embedding, norm)
        self._vocab_size, self._adapters = weights.output.size, layers[0].adapters
        self._layout = cache_layout(cache.kv)
        self._addresses = [
            None if part is None else part.data_ptr() for part in (cache.rotary, cache.kv, cache.scales, cache.features)
        ]
        self._target = TargetFields(
            weights.embedding.shape[1],
            len(layers),
            features,
            len(taps),
            weights.eps,
            table,
            packed,
            norm.data_ptr(),
            address_of(pointers),
            address_of(tapped),
            weights.output.fields,
            feature,
        )

    def __call__(
        self, rows: Sequence[TreeRow], trees: Sequence[DraftTree], before_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """See `FusedTarget`."""
        tables, blocks = padded_tables([row.block_table for row in rows])
        packed, parents = list[int](), list[int]()
        for row, tree in zip(rows, trees, strict=True):
            packed += row.tokens
            packed += tree.tokens
            parents += tree.parents
        known, nodes = [len(row.tokens) for row in rows], [len(tree.tokens) for tree in trees]
        cached, scored, cache = [row.num_cached for row in rows], [row.num_scored for row in rows], self.cache
        kept, lists = joined(packed, cached, known, nodes, scored, tables, parents)
        adapters = [row.adapter for row in rows]
        spans = numbers([])
        if any(adapters):
            assert self._adapters is not None
            spans = self._adapters.spans(adapters, [own + drafted for own, drafted in zip(known, nodes, strict=True)])
        logits = cache.rotary.new_empty(sum(scored) + len(parents), self._vocab_size)
        calls = None if before_layer is None else _Calls(before_layer)
        self.library.target_pass(
            self._target,
            PassFields(
                len(rows),
                blocks,
                cache.block_size,
                *self._layout,
                *lists,
                *self._addresses,
                logits.data_ptr(),
                NO_CALLS if calls is None else calls.pointer,
                len(spans) // 3,
                address_of(spans) if spans else None,
            ),
        )
        # Until here the library reads them.
        del kept
        if calls is not None:
            calls.check()
        return logits


class _Calls:
    """Calls of a Python function by the library, which no exception can pass through.

    Attributes:
        pointer: what the library calls.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self.pointer = BEFORE_LAYER(self._call)

    def _call(self, layer: int) -> None:
        if self._error is None:
            try:
                self._function(layer)
            except BaseException as error:
                self._error = error

    def check(self) -> None:
        """Raise the function's first error, after which it is not called again."""
        if self._error is not None:
            raise self._error
