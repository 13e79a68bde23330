"""Moves in the cache: exact, in all layers, and nothing else is touched."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.reference import kv_copy as kv_copy_reference
from specdec.kernels.triton.kv_copy import MOVES_AT_ONCE, copy_blocks, move_kv
from specdec.verify.tree_batch import slots_of
from tests.kernels.cache_moves import bits, cache, tiles
from tests.kernels.kernel_checks import BITS, DEVICE, huge
from tests.strategies import draft_trees, seeds, shuffled_tables
from tests.trees import path_to

pytestmark = pytest.mark.slow


class Moves(NamedTuple):
    """The moves of a step, and how many slots there are."""

    source: list[int]
    target: list[int]
    num_slots: int


@st.composite
def accepted_paths(draw: st.DrawFn) -> Moves:
    """Draw moves as the engine makes them: from nodes of a path in each request's tree to the places after its root."""
    trees = draw(st.lists(draft_trees(max_nodes=20, vocab_size=30), min_size=1, max_size=5))
    size = draw(st.sampled_from([4, 8]))
    generator = random.Random(draw(seeds))
    starts = [generator.randrange(1, 12) for _ in trees]
    plan = shuffled_tables([start + len(tree) for start, tree in zip(starts, trees, strict=True)], size, draw(seeds))
    source, target = [], []
    for tree, start, table in zip(trees, starts, plan.tables, strict=True):
        path = path_to(tree, generator.randrange(len(tree))) if len(tree) else []
        slots = slots_of(table, start, start + len(tree), size)
        source += [slots[node] for node in path]
        target += slots[: len(path)]
        # Places without an accepted node, and what no tree has.
        source += slots[len(path) :]
        target += slots[len(path) :]
    spare = plan.num_blocks * size
    return Moves([*source, spare, spare], [*target, spare, spare], spare + 1)


@pytest.mark.long
@given(accepted_paths(), seeds, st.sampled_from([1, 2, 4, MOVES_AT_ONCE]), st.sampled_from(list(BITS)))
def test_accepted_paths_move_down_whole(moves: Moves, seed: int, at_once: int, dtype: torch.dtype) -> None:
    """However many moves are read together, and some to where they are: nothing is read after it was overwritten."""
    kv = cache(3, moves.num_slots, 2, 3, dtype=dtype, seed=seed)
    expected = kv.clone()
    ends = [torch.tensor(end, dtype=torch.int64, device=DEVICE) for end in (moves.source, moves.target)]
    bits(expected)[:, ends[1]] = bits(kv)[:, ends[0]]
    with tiles(at_once, 4):
        move_kv(kv, *ends)
    assert torch.equal(bits(kv), bits(expected))


@given(seeds, st.integers(0, MOVES_AT_ONCE), st.sampled_from([1, 5, 64, 100]))
def test_few_moves_may_overlap_in_any_way(seed: int, count: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = cache(2, 40, size, dtype=torch.bfloat16, seed=seed)
    source = torch.randint(0, 40, (count,), generator=generator).to(DEVICE)
    target = torch.randperm(40, generator=generator)[:count].to(DEVICE)
    expected = kv.clone()
    kv_copy_reference.move_kv(bits(expected), source, target)
    with tiles(MOVES_AT_ONCE, 64):
        move_kv(kv, source, target)
    assert torch.equal(bits(kv), bits(expected))


@pytest.mark.long
@given(seeds, st.integers(1, 60), st.sampled_from([1, 4, MOVES_AT_ONCE]), st.sampled_from([1, 3, 8]))
def test_blocks_are_copied_like_runs_of_slots(seed: int, count: int, at_once: int, block_size: int) -> None:
    """Blocks are as `KVCache.apply_moves` groups them: none is read or written after it was written."""
    generator = random.Random(seed)
    blocks = list(range(40))
    generator.shuffle(blocks)
    source: list[int] = []
    target: list[int] = []
    for _ in range(count):
        free = [block for block in blocks if block not in target]
        if len(free) > 1:
            source.append(generator.choice(free))
            target.append(generator.choice([block for block in free if block != source[-1]]))
    kv = cache(2, 40 * block_size, 2, 5, dtype=torch.bfloat16, seed=seed)
    expected = kv.clone()
    for old, new in zip(source, target, strict=True):
        parts = [slice(block * block_size, (block + 1) * block_size) for block in (new, old)]
        bits(expected)[:, parts[0]] = bits(expected)[:, parts[1]].clone()
    plain = kv.clone()
    ends = [torch.tensor(end, dtype=torch.int64, device=DEVICE) for end in (source, target)]
    kv_copy_reference.copy_blocks(bits(plain), *ends, block_size)
    with tiles(at_once, 32):
        copy_blocks(kv, *ends, block_size)
    assert torch.equal(bits(kv), bits(expected))
    assert torch.equal(bits(plain), bits(expected))


def test_slots_beyond_two_billion_numbers() -> None:
    """Within a layer, and from layer to layer; touches a few pages of 8.6 GB of address space."""
    slots = 2**31 // 256 + 8
    kv = huge(2 * slots * 256).view(2, slots, 2, 128)
    far = slots - 4
    for layer in (0, 1):
        kv[layer, far:] = layer + torch.arange(4, device=DEVICE).view(4, 1, 1)
    ends = [torch.tensor(end, device=DEVICE) for end in ([far, far + 1, far + 3], [0, far, far + 1])]
    move_kv(kv, *ends)
    copy_blocks(kv, torch.tensor([far // 4], device=DEVICE), torch.tensor([1], device=DEVICE), 4)
    for layer in (0, 1):
        assert (kv[layer, 0] == layer).all()
        for i, number in enumerate((1, 3, 2, 3)):
            assert (kv[layer, far + i] == layer + number).all()
            assert (kv[layer, 4 + i] == layer + number).all()


def test_layers_may_lie_apart_and_have_any_trailing_shape() -> None:
    """A step's features are moved as a cache of one layer."""
    kv = cache(4, 6, 7, dtype=torch.bfloat16, seed=0)
    before = kv.clone()
    move_kv(kv[::2], torch.tensor([5], device=DEVICE), torch.tensor([2], device=DEVICE))
    bits(before)[::2, 2] = bits(before)[::2, 5]
    assert torch.equal(bits(kv), bits(before))


def test_misfits_are_refused() -> None:
    kv, moves = torch.zeros(2, 6, 4, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"source \(3,\) torch.int64 and target \(2,\)"):
        move_kv(kv, moves, moves[:2])
    with pytest.raises(ValueError, match="int32"):
        move_kv(kv, moves, moves.int())
    with pytest.raises(ValueError, match="not in one piece"):
        move_kv(kv.transpose(1, 2), moves, moves)
    with pytest.raises(ValueError, match="not in one piece"):
        move_kv(kv, moves, moves.repeat(2)[::2])
    with pytest.raises(ValueError, match="6 slots are no whole number of blocks of 4"):
        copy_blocks(kv, moves, moves, 4)
