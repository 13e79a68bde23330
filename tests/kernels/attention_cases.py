"""Cases of tree attention as tensors, with the slots that each row sees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.llama.llama_config import alibi_slopes
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.tree import ROOT, DraftTree
from tests.strategies import draft_trees, seeds, shuffled_tables

KV_HEADS, DIM = 2, 4
NOT_A_BLOCK = 10**9


class Part(NamedTuple):
    """One request: cached entries, known tokens, and tree nodes of which the last `asked` are rows."""

    cached: int
    chain: int
    tree: DraftTree
    asked: int


class Case(NamedTuple):
    """Requests of a step.

    Attributes:
        slid: whether entries that no row sees hold nothing, and blocks of them are none; rows then see somewhat less.
    """

    parts: list[Part]
    group: int
    block_size: int
    first: int
    seed: int
    window: int = 0
    alibi: bool = False
    slid: bool = False

    def slopes(self, kv_heads: int, dtype: torch.dtype = torch.float64) -> Tensor | None:
        """Slopes of the query heads, where the case has ALiBi."""
        heads = kv_heads * self.group
        return torch.tensor(alibi_slopes(heads), dtype=dtype) if self.alibi else None

    def begin(self, place: int) -> int:
        """The first entry that rows of a part see."""
        part = self.parts[place]
        if not self.slid:
            return self.first
        begin = part.cached + 1 - self.window if self.window else 0
        return max(self.first, min(max(0, begin) + (self.seed + place) % 5, part.cached))


class Built(NamedTuple):
    """A case as tensors, and the slots that each row sees."""

    query: Tensor
    kv: Tensor
    rows: RaggedRows
    slots_seen: list[list[int]]


def biases(slopes: Tensor | None, keys: int) -> Tensor | float:
    """ALiBi's bias of a row's keys in the order of positions, float64 `[keys, heads]`; 0 without."""
    return 0.0 if slopes is None else torch.arange(1 - keys, 1)[:, None] * slopes.double()


def climb(tree: DraftTree, node: int) -> list[int]:
    return [] if node == ROOT else [*climb(tree, tree.parents[node]), node]


def build(case: Case) -> Built:
    size = case.block_size
    lengths = [part.cached + part.chain + len(part.tree) for part in case.parts]
    plan = shuffled_tables(lengths, size, case.seed)
    longest = max(len(table) for table in plan.tables)
    words = max(1, -(-max(len(part.tree) for part in case.parts) // WORD_BITS))
    visible, ancestors, slots_seen, stored = [], [], [], []
    firsts, tables = [case.begin(place) for place in range(len(case.parts))], []
    for part, table, length, first in zip(case.parts, plan.tables, lengths, firsts, strict=True):
        slots = [table[s // size] * size + s % size for s in range(length)]
        stored += slots[first:]
        lost = first // size if case.slid else 0
        tables.append([*[NOT_A_BLOCK] * lost, *table[lost:], *[NOT_A_BLOCK] * (longest - len(table))])
        root_end = part.cached + part.chain
        for i in range(part.chain):
            visible.append(part.cached + i + 1)
            ancestors.append([0] * words)
            slots_seen.append(slots[first : part.cached + i + 1])
        for node in range(len(part.tree) - part.asked, len(part.tree)):
            path = climb(part.tree, node)
            row = [0] * words
            for above in path:
                bit = above % WORD_BITS
                row[above // WORD_BITS] += -(1 << 63) if bit == 63 else 1 << bit
            visible.append(root_end)
            ancestors.append(row)
            slots_seen.append(slots[first:root_end] + [slots[root_end + above] for above in path])
    generator = torch.Generator().manual_seed(case.seed)
    kv = torch.full((plan.num_blocks * size, 2 * KV_HEADS, DIM), float("nan"), dtype=torch.float64)
    kv[stored] = torch.randn(len(stored), 2 * KV_HEADS, DIM, dtype=torch.float64, generator=generator)
    rows = RaggedRows(
        query_lens=[part.chain + part.asked for part in case.parts],
        lengths=lengths,
        tree_starts=[part.cached + part.chain for part in case.parts],
        block_tables=torch.tensor(tables),
        visible=torch.tensor(visible),
        ancestors=torch.tensor(ancestors),
        block_size=size,
        first=case.first,
        firsts=firsts if case.slid else (),
    )
    query = torch.randn(len(visible), KV_HEADS * case.group, DIM, dtype=torch.float64, generator=generator)
    # In the order of positions, so the window is the end.
    return Built(query, kv, rows, [slots[-case.window :] for slots in slots_seen])


def windows(parts: Sequence[Part]) -> st.SearchStrategy[int]:
    """None, or a window that holds every path."""
    deepest = max((len(climb(part.tree, node)) for part in parts for node in range(len(part.tree))), default=0)
    return st.just(0) | st.integers(max(1, deepest), deepest + 40)


def star(nodes: int) -> DraftTree:
    return DraftTree(tuple(range(nodes)), (ROOT,) * nodes)


def blocks(cached: list[int], size: int, group: int, first: int = 1) -> Built:
    """A block of rows behind each request's cached entries, which all see each other."""
    built = build(Case([Part(count, 0, star(size), size) for count in cached], group, 8, first, 3))
    rows = replace(built.rows, ancestors=torch.full_like(built.rows.ancestors, (1 << size) - 1), sees_later=True)
    slots = [seen[:-1] for seen in built.slots_seen]
    own = [seen[-1] for seen in built.slots_seen]
    together = [own[row // size * size :][:size] for row in range(len(own))]
    return Built(built.query, built.kv, rows, [a + b for a, b in zip(slots, together, strict=True)])


@st.composite
def small_parts(draw: st.DrawFn, first: int) -> Part:
    cached = draw(st.integers(first, 60))
    tree = draw(draft_trees(max_nodes=12, vocab_size=50))
    if tree and cached > first and draw(st.booleans()):
        return Part(cached, 0, tree, draw(st.integers(1, len(tree))))
    return Part(cached, draw(st.integers(1, 12)), tree, len(tree))


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Requests of up to 60 cached entries, with chains and trees of up to 12."""
    first = draw(st.integers(0, 1))
    requests = draw(st.lists(small_parts(first), min_size=1, max_size=3))
    sizes = draw(st.sampled_from([1, 3, 4])), draw(st.sampled_from([8, 16, 24]))
    return Case(requests, *sizes, first, draw(seeds), draw(windows(requests)), draw(st.booleans()))


def chain(start: int, count: int) -> tuple[Tensor, RaggedRows]:
    """Return the slots and rows of tokens after `start` others, in blocks in order."""
    slots = torch.arange(start, start + count)
    rows = RaggedRows(
        query_lens=[count],
        lengths=[start + count],
        tree_starts=[start + count],
        block_tables=torch.arange((start + count + 7) // 8)[None],
        visible=slots + 1,
        ancestors=torch.zeros(count, 1, dtype=torch.int64),
        block_size=8,
    )
    return slots, rows
