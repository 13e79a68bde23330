"""Moves that a device makes of a walk, against those that the host makes of its outcome."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.execution.worker import accepted_moves
from specdec.kernels.reference.accepted import commit
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kernels.types.types import DraftedEntries, TokenTargets, Walk
from specdec.kernels.types.upload import Packet
from specdec.verify.tree_batch import slots_of
from tests.strategies import draft_trees, seeds, shuffled_tables
from tests.trees import path_to

CPU = torch.device("cpu")
trees = st.lists(draft_trees(max_nodes=12, vocab_size=20), min_size=1, max_size=5)


class Memory:
    """A cache of one number a slot, whose last block is the null block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.null_block, self.block_size = num_blocks, block_size
        self.entries = torch.arange((num_blocks + 1) * block_size)[None, :, None].clone()

    def commit(self, walk: Walk, slots: Tensor, targets: Sequence[TokenTargets]) -> None:
        # As the kernel wants them.
        assert slots.is_contiguous()
        commit(walk, DraftedEntries(self.entries, None, slots), targets)


def walked(paths: list[list[int]], depth: int) -> Walk:
    """Return a walk with these paths; what lies behind them has no meaning."""
    rows = torch.tensor([[*path, *[99] * (depth - len(path))] for path in paths]).view(len(paths), depth)
    return Walk(rows, torch.tensor([len(path) for path in paths]), torch.zeros(len(paths), dtype=torch.int64))


@given(trees, seeds, st.sampled_from([1, 4, 8]))
# Of one level, with more nodes than that.
@example([DraftTree((5, 6), (-1, -1))] * 3, 0, 4)
def test_accepted_entries_come_to_lie_behind_their_chains(many: list[DraftTree], seed: int, block_size: int) -> None:
    chance, batch = random.Random(seed), HostTrees(many)
    starts = [chance.randrange(1, 12) for _ in many]
    plan = shuffled_tables([start + len(tree) for start, tree in zip(starts, many, strict=True)], block_size, seed)
    memory: Any = Memory(plan.num_blocks, block_size)
    expected, paths = memory.entries.clone(), list[list[int]]()
    for tree, start, table in zip(many, starts, plan.tables, strict=True):
        path = path_to(tree, chance.randrange(len(tree))) if len(tree) and chance.random() < 0.8 else []
        slots = slots_of(table, start, start + len(tree), block_size)
        expected[:, slots[: len(path)]] = memory.entries[:, [slots[node] for node in path]]
        paths.append(list(path))
    parts = [TreeRow([0], start - 1, table, 1) for start, table in zip(starts, plan.tables, strict=True)]
    packet = Packet(CPU)
    move = accepted_moves(memory, parts, batch, packet)
    packet.send()
    move(walked(paths, batch.depth), ())
    assert memory.entries.equal(expected)
