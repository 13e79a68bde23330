"""Rows of nobody, in the null block: what is measured and captured before the first request comes."""

from specdec.draft_heads.draft_shape import DraftShape
from specdec.draft_heads.drafter import DraftRow
from specdec.kv_cache import KVCache
from specdec.verify.sampling import Context, Sampling


def dummy_draft_rows(
    cache: KVCache, count: int, context: int, shape: DraftShape, depth: int, temperature: float = 0.0
) -> list[DraftRow]:
    """Rows that ask for trees of `depth` levels after `context` tokens and one that the head has yet to read."""
    known = context + 1
    table = cache.nowhere(known + shape.slots)
    requests = [Context(Sampling(temperature), [0] * known, context) for _ in range(count)]
    return [DraftRow(table, context, known, shape.nodes, depth, request) for request in requests]
