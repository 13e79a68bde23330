"""Drafters by the compiled library: a head reads tokens, and its trees are searched, all in one call."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.native.adapters import NativeAdapters
from specdec.kernels.native.library import (
    BlockFields,
    DraftingFields,
    HeadFields,
    Library,
    MatrixFields,
    address_of,
    cache_fields,
    joined,
    numbers,
    padded_tables,
    pointer_to,
)
from specdec.kernels.native.operations import NativeProjection, embedding_fields, layers_of, vectors_of
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.fused import BlockWeights, DraftingCache, DraftingRow, HeadWeights
from specdec.kernels.types.product import Product
from specdec.kernels.types.tree import NO_DRAFTS, DraftTree

WITHOUT_FEATURES, WITH_INPUT_PRODUCT, WITH_NORMS = range(3)
LARGEST_WIDTH = 64
# Gates of a Markov head take a multiple of these floats each, as `gate_floats` of edges.h has it.
GATE_FLOATS = 16
# min_p, top_k and top_p of rows without filters.
KEEP_ALL = (0.0, 0, 1.0)


class NativeTrees:
    """Rows for the library's drafters, and the trees that they write.

    Args:
        noise: of sampled rows.

    Attributes:
        adapters: those of the head's layers; None without.
    """

    # The library's drafter, and its head.
    _name: str
    _head: HeadFields | BlockFields
    adapters: NativeAdapters | None = None

    def __init__(self, library: Library, noise: GumbelNoise, vocab_size: int, cache: DraftingCache) -> None:
        self.library, self.noise, self.vocab_size, self.cache = library, noise, vocab_size, cache
        # Of every call; what differs is set by `__call__`.
        self._fields = DraftingFields(
            width=cache.width,
            block_size=cache.block_size,
            first=cache.first,
            features=cache.features.data_ptr() or None,
            rotary=cache.rotary.data_ptr(),
            **cache_fields(cache.kv),
        )

    def takes(self, rows: Sequence[DraftingRow]) -> bool:
        """Return whether trees are not too wide for the library, and need no more noise than is kept."""
        noisy = sum(row.noise is not None for row in rows)
        deepest = max((row.depth for row in rows), default=0)
        return self.cache.width <= LARGEST_WIDTH and noisy * deepest <= self.noise.num_kept(self.vocab_size)

    def __call__(self, rows: Sequence[DraftingRow], least_reach: float) -> HostTrees:
        """See `FusedDrafting`."""
        drafts = [row.num_nodes > 0 and row.depth > 0 for row in rows]
        # The library wants rows with trees first.
        order = sorted(range(len(rows)), key=lambda row: not drafts[row])
        ordered, trees = [rows[i] for i in order], sum(drafts)
        with_trees = ordered[:trees]
        tables, blocks = padded_tables([row.block_table for row in ordered])
        budgets = [row.num_nodes for row in with_trees]
        most = max(budgets, default=0)
        written, lists = joined(
            [0] * trees,
            *[[0] * (trees * most)] * 3,
            [token for row in ordered for token in row.tokens],
            [row.start for row in ordered],
            [row.end for row in ordered],
            [row.first for row in ordered],
            tables,
            budgets,
            [row.depth for row in with_trees],
        )
        values = array("f", bytes(4 * trees * most))
        temperatures = limits = None
        if any(row.temperature != 1 for row in with_trees):
            temperatures = torch.tensor([row.temperature for row in with_trees])
        if any(row.limits is not None for row in with_trees):
            limits = torch.tensor([row.limits or KEEP_ALL for row in with_trees], dtype=torch.float32)
        noise = self._noise(with_trees)
        adapters = None
        if any(row.adapter for row in rows):
            assert self.adapters is not None
            adapters = self.adapters.addresses([row.adapter for row in ordered])
        given = self._fields
        given.rows, given.trees, given.table_blocks = len(rows), trees, blocks
        given.most, given.least_reach = most, least_reach
        given.sizes, given.nodes, given.parents, given.ranks = lists[:4]
        given.tokens, given.starts, given.ends, given.firsts, given.tables, given.budgets, given.depths = lists[4:]
        given.temperatures, given.limits = pointer_to(temperatures), pointer_to(limits)
        given.noise = None if noise is None else address_of(noise)
        given.values, given.adapters = address_of(values), None if adapters is None else address_of(adapters)
        self.library.call(self._name, self._head, given)
        found = [NO_DRAFTS] * len(rows)
        for place, row, size in zip(range(0, trees * most, most or 1), order, written[:trees], strict=False):
            begins = (trees + part * trees * most + place for part in range(3))
            nodes, parents, ranks = (tuple(written[begin : begin + size]) for begin in begins)
            read = memoryview(values)[place : place + size].tolist
            found[row] = DraftTree(nodes, parents, None, ranks, read_values=read, check=False)
        return HostTrees(found)

    def _noise(self, rows: Sequence[DraftingRow]) -> "array[int] | None":
        """Return addresses `[rows, depth]` of each level's noise, 0 for a row without; None where no row has any."""
        if all(row.noise is None for row in rows):
            return None
        depth = max(row.depth for row in rows)
        keys = [
            key and key._replace(position=key.position + level)
            for key in (row.noise for row in rows)
            for level in range(depth)
        ]
        return numbers(self.noise.addresses(keys, self.vocab_size))


class NativeDrafting(NativeTrees):
    """The drafter of one head and output matrix, level by level.

    Args:
        noise: of sampled rows.
        output: from states to scores.
        tokens: int64 `[size]`, the tokens scored; None for all in order.
    """

    _name = "draft"

    def __init__(
        self,
        library: Library,
        noise: GumbelNoise,
        head: HeadWeights,
        output: Product,
        vocab_size: int,
        tokens: Tensor | None,
        cache: DraftingCache,
    ) -> None:
        super().__init__(library, noise, vocab_size, cache)
        layers, pointers = layers_of(head.layers)
        self.adapters = layers[0].adapters
        kind = WITHOUT_FEATURES
        if head.input is not None:
            kind = WITH_INPUT_PRODUCT
        elif head.state_norm is not None:
            kind = WITH_NORMS
        norms = vectors_of(head.embed_norm, head.state_norm, head.norm)
        given = head.input
        assert given is None or isinstance(given, NativeProjection)
        assert isinstance(output, NativeProjection)
        table, packed, embedding = embedding_fields(library, head.embedding)
        self._kept = (layers, norms, pointers, given, output, embedding, tokens)
        self._head = HeadFields(
            kind,
            head.embedding.shape[1],
            len(layers),
            head.residual_is_normed,
            head.states_are_normed,
            head.eps,
            table,
            packed,
            *map(pointer_to, norms),
            address_of(pointers),
            pointer_to(tokens),
            MatrixFields() if given is None else given.fields,
            output.fields,
        )


class NativeBlockDrafting(NativeTrees):
    """The drafter of one block head and output matrix: one pass, and trees of its candidates.

    Args:
        noise: of sampled rows.
        output: from states to scores.
        tokens: int64 `[size]`, the tokens scored; None for all in order.
        scorer_rows: int64 `[vocab_size]`, the row of `BlockWeights.successors` of each token; None for all in order.
    """

    _name = "draft_block"

    def __init__(
        self,
        library: Library,
        noise: GumbelNoise,
        head: BlockWeights,
        output: Product,
        vocab_size: int,
        tokens: Tensor | None,
        scorer_rows: Tensor | None,
        cache: DraftingCache,
    ) -> None:
        super().__init__(library, noise, vocab_size, cache)
        layers, pointers = layers_of(head.layers)
        self.adapters = layers[0].adapters
        norms, causal = vectors_of(head.hidden_norm, head.norm, head.key_norms), numbers(map(int, head.causal))
        assert isinstance(head.context, NativeProjection)
        assert isinstance(output, NativeProjection)
        parts = [None if part is None else part.detach().contiguous() for part in (head.predecessors, head.successors)]
        rank = 0 if parts[0] is None else parts[0].shape[1]
        markov, joint = _gates(head.joint, rank)
        table, packed, embedding = embedding_fields(library, head.embedding)
        self._kept = (layers, norms, pointers, causal, head.context, output, parts, joint)
        self._tables = (embedding, tokens, scorer_rows)
        self._head = BlockFields(
            head.embedding.shape[1],
            len(layers),
            head.rows,
            head.slots,
            head.mask_token,
            rank,
            markov,
            head.eps,
            table,
            packed,
            *map(pointer_to, norms),
            address_of(causal),
            address_of(pointers),
            *map(pointer_to, (tokens, scorer_rows, *parts, *joint)),
            head.context.fields,
            output.fields,
        )


def _gates(joint: tuple[Tensor, Tensor] | None, rank: int) -> tuple[int, tuple[Tensor, Tensor] | tuple[None, None]]:
    """Return the kind of Markov head as native.h numbers it, and its gates as `block_head` has them."""
    if joint is None:
        return 0, (None, None)
    weight, bias = (part.detach().float() for part in joint)
    gates = len(bias) // rank
    if gates == 1:
        inputs = weight
    else:
        path, token, slot = torch.split(weight, [rank, rank, weight.shape[1] - 2 * rank], 1)
        inputs = torch.cat([slot, token, path], 1)
    lacking = -rank % GATE_FLOATS
    padded = F.pad(inputs.reshape(gates, rank, -1), (0, 0, 0, lacking)).flatten(0, 1)
    return (1 if gates == 1 else 2), (padded.t().contiguous(), F.pad(bias.view(gates, rank), (0, lacking)).flatten())
