"""A pass of the target by the compiled library, packing included."""

from collections.abc import Sequence
from sys import getrefcount

from torch import Tensor

from specdec.kernels.native.library import (
    Library,
    MatrixFields,
    PassFields,
    TargetFields,
    address_of,
    cache_fields,
    joined,
    numbers,
    padded_tables,
    pointer_to,
)
from specdec.kernels.native.operations import NativeProjection, embedding_fields, layers_of, vectors_of
from specdec.kernels.types.fused import TargetCache, TargetWeights
from specdec.kernels.types.tree import DraftTree, TreeRow

NO_FEATURES, STATES_AS_FEATURES, TAPS_AS_FEATURES = range(3)
# Rows of logits at most whose memory is kept: beside larger passes a new tensor costs nothing.
MOST_KEPT = 16
# References to logits that nothing else uses: the attribute, a local variable and the argument of `getrefcount`.
UNSHARED = 3


class NativeTarget:
    """The pass of one target over one cache."""

    def __init__(self, library: Library, weights: TargetWeights, cache: TargetCache) -> None:
        self.library, self.cache = library, cache
        layers, pointers = layers_of(weights.layers)
        features, feature, taps = NO_FEATURES, MatrixFields(), list[int]()
        if weights.features is not None:
            features = STATES_AS_FEATURES
            product = weights.features.product
            if product is not None:
                assert isinstance(product, NativeProjection)
                features, feature, taps = TAPS_AS_FEATURES, product.fields, list(weights.features.taps)
        assert isinstance(weights.output, NativeProjection)
        tapped, (norm,) = numbers(taps), vectors_of(weights.norm)
        table, packed, embedding = embedding_fields(library, weights.embedding)
        self._kept = (weights, layers, pointers, tapped, embedding, norm)
        self._vocab_size, self._adapters = weights.output.size, layers[0].adapters
        self._none = self._logits = cache.rotary.new_empty(0, self._vocab_size)
        self._rows, self._address = 0, 0
        # Of every pass; what differs is set by `__call__`.
        self._pass = PassFields(
            block_size=cache.block_size,
            rotary=cache.rotary.data_ptr(),
            kv_scales=pointer_to(cache.scales),
            feature_cache=pointer_to(cache.features),
            **cache_fields(cache.kv),
        )
        self._target = TargetFields(
            weights.embedding.shape[1],
            len(layers),
            features,
            len(taps),
            weights.eps,
            table,
            packed,
            pointer_to(norm),
            address_of(pointers),
            address_of(tapped),
            weights.output.fields,
            feature,
        )

    def __call__(self, rows: Sequence[TreeRow], trees: Sequence[DraftTree]) -> Tensor:
        """See `FusedTarget`."""
        tables, blocks = padded_tables([row.block_table for row in rows])
        packed, parents = list[int](), list[int]()
        for row, tree in zip(rows, trees, strict=True):
            packed += row.tokens
            packed += tree.tokens
            parents += tree.parents
        known, nodes = [len(row.tokens) for row in rows], [len(tree.tokens) for tree in trees]
        cached, scored = [row.num_cached for row in rows], [row.num_scored for row in rows]
        kept, lists = joined(packed, cached, known, nodes, scored, tables, parents)
        given = self._pass
        given.requests, given.table_blocks = len(rows), blocks
        given.tokens, given.cached, given.known, given.nodes, given.scored, given.tables, given.parents = lists
        given.spans, given.adapted, spans = 0, None, None
        if any(adapters := [row.adapter for row in rows]):
            assert self._adapters is not None
            spans = self._adapters.spans(adapters, [own + drafted for own, drafted in zip(known, nodes, strict=True)])
            given.spans, given.adapted = len(spans) // 3, address_of(spans)
        logits = self._logits_of(sum(scored) + len(parents))
        given.logits = self._address
        self.library.call("pass", self._target, given)
        # Until here the library reads them.
        del kept, spans
        return logits

    def _logits_of(self, rows: int) -> Tensor:
        """Return memory for logits `[rows, vocab_size]`.

        The tensor of the last pass is used again if it has as many rows and is referenced nowhere else. A new one takes
        tens of microseconds: the weights of a pass have driven torch's code out of the processor's caches.
        """
        logits = self._logits
        if rows != self._rows or getrefcount(logits) > UNSHARED:
            logits = self.cache.rotary.new_empty(rows, self._vocab_size)
            self._address = logits.data_ptr()
            self._logits, self._rows = (logits, rows) if rows <= MOST_KEPT else (self._none, 0)
        return logits
