"""TreeBatch.pack against a construction token by token."""

import random
from itertools import zip_longest
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.tree import ROOT, DraftTree, TreeRow, split_words
from specdec.verify.tree_batch import TreeBatch, slots_of
from tests.strategies import draft_trees, seeds, shuffled_tables

CPU = torch.device("cpu")


class Expected(NamedTuple):
    """Expected fields of one packed row."""

    token: int
    position: int
    slot: int
    sees: frozenset[int]


class Drawn(NamedTuple):
    """Rows to pack, and the trees of the first of them."""

    parts: list[TreeRow]
    trees: list[DraftTree]
    block_size: int

    @property
    def pairs(self) -> list[tuple[TreeRow, DraftTree]]:
        return [(part, tree or DraftTree()) for part, tree in zip_longest(self.parts, self.trees)]

    def pack(self) -> TreeBatch:
        return TreeBatch.pack(self.parts, HostTrees(self.trees), self.block_size, CPU)


@st.composite
def tree_rows(draw: st.DrawFn) -> Drawn:
    block_size = draw(st.sampled_from([1, 4, 8, 16]))
    sizes = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4))
    trees = [draw(draft_trees(max_nodes=130, vocab_size=7)) for _ in sizes]
    scored = [draw(st.integers(len(tree) > 0, size[1])) for tree, size in zip(trees, sizes, strict=True)]
    seed = draw(seeds)
    lengths = [cached + chain + len(tree) for (cached, chain), tree in zip(sizes, trees, strict=True)]
    tables = shuffled_tables(lengths, block_size, seed).tables
    generator = random.Random(seed)
    parts = [
        TreeRow([generator.randrange(7) for _ in range(chain)], cached, table, flag)
        for (cached, chain), table, flag in zip(sizes, tables, scored, strict=True)
    ]
    # Rows behind the last tree have none.
    while not draw(st.booleans()) and trees and not len(trees[-1]):
        trees.pop()
    return Drawn(parts, trees, block_size)


def expected_rows(part: TreeRow, tree: DraftTree, block_size: int) -> list[Expected]:
    def slot(entry: int) -> int:
        return part.block_table[entry // block_size] * block_size + entry % block_size

    rows = []
    for i, token in enumerate(part.tokens):
        entry = part.num_cached + i
        rows.append(Expected(token, entry, slot(entry), frozenset(range(entry + 1))))
    root = part.num_cached + len(part.tokens) - 1
    for node, token in enumerate(tree.tokens):
        sees, depth, above = set(range(root + 1)), 0, node
        while above != ROOT:
            sees.add(root + 1 + above)
            depth, above = depth + 1, tree.parents[above]
        rows.append(Expected(token, root + depth, slot(root + 1 + node), frozenset(sees)))
    return rows


def seen_entries(rows: RaggedRows, request: int, row: int) -> frozenset[int]:
    """Entries that `visible` and the ancestor words name."""
    sees = set(range(int(rows.visible[row])))
    for word, bits in enumerate(rows.ancestors[row].tolist()):
        for bit in range(WORD_BITS):
            if (bits >> bit) & 1:
                sees.add(rows.tree_starts[request] + word * WORD_BITS + bit)
    return frozenset(sees)


@given(tree_rows())
def test_packed_rows_equal_construction_token_by_token(drawn: Drawn) -> None:
    batch = drawn.pack()
    expected = [(b, row) for b, pair in enumerate(drawn.pairs) for row in expected_rows(*pair, drawn.block_size)]
    assert batch.tokens.tolist() == [row.token for _, row in expected]
    assert batch.positions.tolist() == [row.position for _, row in expected]
    assert batch.slots.tolist() == [row.slot for _, row in expected]
    for i, (request, row) in enumerate(expected):
        assert seen_entries(batch.rows, request, i) == row.sees
    assert len(set(batch.slots.tolist())) == len(expected)


@given(tree_rows())
def test_counts_and_logit_rows_equal_construction_part_by_part(drawn: Drawn) -> None:
    batch = drawn.pack()
    starts, samples, start = [], [], 0
    for part, tree in drawn.pairs:
        starts.append(start)
        chain_end = start + len(part.tokens)
        start = chain_end + len(tree)
        samples += list(range(chain_end - part.num_scored, start))
    assert list(batch.row_starts) == starts
    rows = torch.arange(start)
    assert batch.scored(rows).tolist() == samples
    assert (batch.logit_rows is None) == (len(samples) == start)
    assert list(batch.rows.query_lens) == [len(p.tokens) + len(tree) for p, tree in drawn.pairs]
    assert list(batch.rows.lengths) == [p.num_cached + len(p.tokens) + len(tree) for p, tree in drawn.pairs]
    assert list(batch.rows.tree_starts) == [p.num_cached + len(p.tokens) for p in drawn.parts]
    assert batch.rows.first == 0
    for part, table in zip(drawn.parts, batch.rows.block_tables.tolist(), strict=True):
        assert table[: len(part.block_table)] == list(part.block_table)


@given(draft_trees(max_nodes=200, vocab_size=7), st.integers(0, 2))
def test_split_words_put_together_again_equal_the_bits(tree: DraftTree, spare: int) -> None:
    words = -(-max(1, len(tree)) // WORD_BITS) + spare
    for bits in tree.ancestors:
        parts = split_words(bits, words)
        assert len(parts) == words
        assert all(-(2**63) <= part < 2**63 for part in parts)
        assert sum((part % 2**64) << (WORD_BITS * i) for i, part in enumerate(parts)) == bits


def test_split_words_at_the_sign_bit() -> None:
    assert split_words(1 << 63, 1) == [-(2**63)]
    assert split_words(1 << 64, 2) == [0, 1]
    assert split_words((1 << 128) - 1, 2) == [-1, -1]


def test_slots_of_equals_lookup_per_entry() -> None:
    assert slots_of([5, 2, 9], 3, 10, 4) == [23, 8, 9, 10, 11, 36, 37]
    assert slots_of([5], 2, 2, 4) == []
