"""Tree attention over a paged cache, against attention of torch that needs its keys gathered first.

Queries are three times as long as a model's might be, so that weights differ much, and an entry that is seen by
mistake or not at all shows in some row's result.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.batch import random_batch, random_tree
from benchmarks.gpu.race import BOUNDS, Case, Peer, Subject
from benchmarks.gpu.sizes import Sizes
from specdec.kernels.reference import tree_attention as tree_attention_reference
from specdec.kernels.triton.tree_attention import tree_attention
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import DraftTree

QUERY_SCALE = 3
# By peer the backends that it may take: those with masks, on a CPU flash attention; not the one that keeps all scores.
FUSED = {
    "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}
# The twin keeps all scores. It is not timed where they take more bytes than this.
TWIN_SCORES = 2**31

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Kind(NamedTuple):
    """Rows of each request of a step."""

    name: str
    chain: int
    has_tree: bool
    batches: tuple[int, ...]


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """Trees first, then plain decoding and chunks of prompts; short contexts first."""
    kinds = (
        Kind("tree", 1, True, sizes.batches),
        Kind("decode", 1, False, sizes.batches),
        Kind("chunk", sizes.chunk, False, sizes.chunk_batches),
    )
    most_rows = {kind.name: kind.chain + sizes.tree.nodes * kind.has_tree for kind in kinds}
    num_blocks = max(
        max(kind.batches) * -(-(max(sizes.contexts) + most_rows[kind.name]) // sizes.block_size) for kind in kinds
    )

    # Made when the first case asks for it, so that what there is no memory for is a case.
    @cache
    def kv() -> Tensor:
        shape = (num_blocks * sizes.block_size, 2 * sizes.kv_heads, sizes.head_dim)
        return torch.randn(shape, dtype=sizes.dtype, device=device)

    for kind in kinds:
        # There is a limit to how often one function is compiled anew.
        torch.compiler.reset()
        for context in sizes.contexts:
            for batch in kind.batches:
                shape: dict[str, int | str] = {"rows": kind.name, "batch": batch, "context": context}
                yield Subject("tree_attention", shape, partial(_case, sizes, kv, kind, batch, context))


def _case(sizes: Sizes, made: Callable[[], Tensor], kind: Kind, batch: int, context: int) -> Case:
    kv, size = made(), sizes.block_size
    device = kv.device
    chance = random.Random(batch + context)
    trees = [random_tree(sizes.tree, chance) if kind.has_tree else DraftTree() for _ in range(batch)]
    rows = random_batch(context, kind.chain, trees, size, len(kv) // size, device, seed=batch).rows
    (count,), (length,) = set(rows.query_lens), set(rows.lengths)
    query = QUERY_SCALE * torch.randn(batch * count, sizes.heads, sizes.head_dim, dtype=sizes.dtype, device=device)
    scale = sizes.head_dim**-0.5

    def gather() -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks, `[batch, kv_heads, entries, head_dim]`, each in one piece."""
        blocks = kv.view(-1, size, *kv.shape[1:])[rows.block_tables]
        split = blocks.view(batch, -1, 2, sizes.kv_heads, sizes.head_dim).permute(2, 0, 3, 1, 4)
        keys, values = split.contiguous().unbind()
        return keys, values

    keys, values = gather()
    sees = _sees(rows, batch)
    # SDPA: the heads of a group as further rows, since with a mask none of its fused kernels shares keys among heads.
    folded = query.view(batch, count, sizes.kv_heads, -1, sizes.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # Flex: `[batch, heads, rows, head_dim]`.
    by_head = query.view(batch, count, sizes.heads, -1).transpose(1, 2).contiguous()

    @cache
    def dense_mask() -> Tensor:
        at = [torch.arange(n, device=device) for n in (batch, count, keys.shape[2])]
        seen = sees(at[0][:, None, None], at[0], at[1][:, None], at[2])
        mask = torch.zeros(seen.shape, dtype=sizes.dtype, device=device).masked_fill_(~seen, float("-inf"))
        return mask[:, None].repeat(1, sizes.heads // sizes.kv_heads, 1, 1).flatten(1, 2)[:, None]

    def sdpa(name: str) -> Tensor:
        with sdpa_kernel(FUSED[name]):
            return F.scaled_dot_product_attention(folded, keys, values, attn_mask=dense_mask(), scale=scale)

    @cache
    def block_mask() -> Any:
        return create_block_mask(sees, batch, None, count, keys.shape[2], device=str(device))

    def flex() -> Any:
        compiled = _compiled_flex(sizes.flex_backend)
        return compiled(by_head, keys, values, block_mask=block_mask(), scale=scale, enable_gqa=True)

    def from_folded(output: Tensor) -> Tensor:
        by_group = output.view(batch, sizes.kv_heads, -1, count, sizes.head_dim)
        return by_group.permute(0, 3, 1, 2, 4).reshape(query.shape)

    peers = {name: Peer(partial(sdpa, name), from_folded) for name in FUSED}
    peers["gather"] = Peer(gather, None)
    if batch in sizes.flex_batches and context in sizes.flex_contexts:
        peers["flex"] = Peer(flex, lambda output: output.transpose(1, 2).reshape(query.shape))
    if 4 * len(query) * sizes.heads * length <= TWIN_SCORES:
        peers["twin"] = Peer(lambda: tree_attention_reference.tree_attention(query, kv, rows, scale))
    # Every row sees the context and, on average, half of a chunk; of a tree, little.
    seen = len(query) * (context + (count + 1) / 2 * (not kind.has_tree))
    return Case(
        run=lambda: tree_attention(query, kv, rows, scale),
        twin=lambda: _one_by_one(query, kv, rows, scale),
        num_bytes=(batch * length * kv[0].numel() + 2 * query.numel()) * kv.element_size(),
        bound=BOUNDS[sizes.dtype],
        peers=peers,
        flops=int(4 * sizes.heads * sizes.head_dim * seen),
    )


def _one_by_one(query: Tensor, kv: Tensor, rows: RaggedRows, scale: float) -> Tensor:
    """The twin, a request at a time: it keeps all scores, and those of a large batch fill a GPU."""
    outputs = []
    start = 0
    for request, count in enumerate(rows.query_lens):
        of_request, own = slice(request, request + 1), slice(start, start + count)
        alone = replace(
            rows,
            query_lens=rows.query_lens[of_request],
            lengths=rows.lengths[of_request],
            tree_starts=rows.tree_starts[of_request],
            block_tables=rows.block_tables[of_request],
            visible=rows.visible[own],
            ancestors=rows.ancestors[own],
        )
        outputs.append(tree_attention_reference.tree_attention(query[own], kv, alone, scale))
        start += count
    return torch.cat(outputs)


def _sees(rows: RaggedRows, batch: int) -> Sees:
    """Return FlexAttention's mask function: whether a request's row sees a cache entry."""
    visible, ancestors = rows.visible.view(batch, -1), rows.ancestors.view(batch, -1)
    starts = torch.tensor(rows.tree_starts, device=visible.device)

    def sees(request: Tensor, head: Tensor, row: Tensor, entry: Tensor) -> Tensor:  # noqa: ARG001
        # Entries before the tree are visible to its nodes, so that a bit read wrongly there decides nothing; the last
        # bit is none of a node's.
        node = (entry - starts[request]).clamp(0, 63)
        is_ancestor = (ancestors[request, row] >> node) & 1 == 1
        return (entry < visible[request, row]) | is_ancestor

    return sees


@cache
def _compiled_flex(backend: str) -> Any:
    # In one graph or not at all: uncompiled, it keeps all scores.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False, backend=backend)
