"""Rows that belong to no request, to measure or capture a step with. They use the null block."""

from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import TreeRow
from specdec.verify.sampling import Context, Sampling


def dummy_chain(cache: KVCache, num_tokens: int) -> tuple[list[TreeRow], HostTrees]:
    """Make a step of one chain whose tokens all get logits."""
    return [TreeRow([0] * num_tokens, 0, cache.null_block_table(num_tokens), num_tokens)], HostTrees.empty(1)


def dummy_rows(cache: KVCache, count: int, context: int) -> tuple[list[TreeRow], HostTrees]:
    """Make a step of rows of one token after `context` cached ones."""
    return [TreeRow([0], context, cache.null_block_table(context + 1), 1)] * count, HostTrees.empty(count)


def dummy_batch(cache: KVCache, most_rows: int, tokens: int, adapted: bool) -> tuple[list[TreeRow], HostTrees]:
    """Make a step of `tokens` tokens, divided among as many rows as allowed."""
    rows = min(tokens, most_rows)
    counts = [tokens // rows + (row < tokens % rows) for row in range(rows)]
    parts = [TreeRow([0] * count, 0, cache.null_block_table(count), 1, int(adapted)) for count in counts]
    return parts, HostTrees.empty(rows)


def dummy_draft_rows(
    cache: KVCache, count: int, context: int, shape: DraftShape, depth: int | None = None, adapter: int = 0
) -> list[DraftRow]:
    """Make rows that ask for the largest trees of `depth` levels after `context` tokens and one to be read."""
    known, depth = context + 1, depth or shape.depth
    table = cache.null_block_table(known + shape.slots)
    row = DraftRow(table, context, known, shape.nodes, depth, Context(Sampling(), [0] * known, context), True, adapter)
    return [row] * count


def dummy_reading_row(cache: KVCache, num_tokens: int) -> DraftRow:
    """Make a row whose tokens but the first are read by the draft head, and that asks for no tree."""
    table = cache.null_block_table(num_tokens + 1)
    return DraftRow(table, 1, num_tokens + 1, 0, 0, Context(Sampling(), [0] * (num_tokens + 1), 1))
