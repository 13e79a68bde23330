"""What follows a walk on the device: entries of accepted nodes, and the tokens that the next step reads."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import accepted as reference
from specdec.kernels.triton.accepted import commit
from specdec.kernels.triton.kv_copy import MOVES_AT_ONCE
from specdec.kernels.types.types import DraftedEntries, TokenTargets, Walk
from specdec.verify.tree_batch import slots_of
from tests.kernels.cache_moves import bits, cache, tiles
from tests.kernels.kernel_checks import BITS, DEVICE
from tests.strategies import draft_trees, seeds, shuffled_tables
from tests.trees import path_to

pytestmark = pytest.mark.slow

trees = st.lists(draft_trees(max_nodes=20, vocab_size=30), min_size=1, max_size=5).filter(any)


def walk_of(paths: list[list[int]], depth: int, next_tokens: list[int]) -> Walk:
    padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
    return Walk(*(torch.tensor(part, device=DEVICE) for part in (padded, [len(path) for path in paths], next_tokens)))


@pytest.mark.long
@given(trees, seeds, st.sampled_from([1, 2, 4, MOVES_AT_ONCE]), st.sampled_from(list(BITS)), st.booleans())
def test_accepted_entries_move_behind_their_chains(
    given_trees: list, seed: int, at_once: int, dtype: torch.dtype, has_features: bool
) -> None:
    """However many are read together; features are wider than a layer's entries here."""
    chance, size = random.Random(seed), 4
    starts = [chance.randrange(1, 12) for _ in given_trees]
    lengths = [start + len(tree) for start, tree in zip(starts, given_trees, strict=True)]
    plan = shuffled_tables(lengths, size, seed)
    most, depth = max(map(len, given_trees)), max(max(tree.depths, default=0) for tree in given_trees)
    paths, slots = [], []
    for tree, start, table in zip(given_trees, starts, plan.tables, strict=True):
        whole = path_to(tree, chance.randrange(len(tree))) if len(tree) else []
        paths.append(whole[: chance.randint(0, len(whole))])
        own = slots_of(table, start, start + len(tree), size)
        slots.append([*own, *[plan.num_blocks * size] * (most - len(own))])
    walk, places = walk_of(paths, depth, [0] * len(paths)), torch.tensor(slots, device=DEVICE)
    kv = cache(3, plan.num_blocks * size + 1, 2, 3, dtype=dtype, seed=seed)
    features = cache(plan.num_blocks * size + 1, 13, dtype=torch.float32, seed=seed + 1) if has_features else None
    expected, wanted = kv.clone(), None if features is None else features.clone()
    # As bits: numbers that are no numbers are moved too.
    reference.commit(walk, DraftedEntries(bits(expected), None if wanted is None else bits(wanted), places))
    with tiles(at_once, 4):
        commit(walk, DraftedEntries(kv, features, places))
    assert torch.equal(bits(kv), bits(expected))
    assert features is None or (wanted is not None and torch.equal(bits(features), bits(wanted)))


@pytest.mark.long
@given(trees, seeds, st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_tokens_go_where_they_are_read(given_trees: list, seed: int, more: int, width: int, has_sources: bool) -> None:
    """Of some rows of the walk, in any order, to one target or two; nothing else is written."""
    chance, depth = random.Random(seed), max(max(tree.depths, default=0) for tree in given_trees)
    with_nodes = [row for row, tree in enumerate(given_trees) if len(tree)]
    rows = chance.sample(with_nodes, chance.randint(1, len(with_nodes)))
    paths = []
    for tree in given_trees:
        whole = path_to(tree, chance.randrange(len(tree))) if len(tree) else []
        paths.append(whole[: chance.randint(0, len(whole))])
    walk = walk_of(paths, depth, [chance.randrange(-1, 30) for _ in paths])
    nodes = torch.tensor([token for tree in given_trees for token in tree.tokens], device=DEVICE)
    firsts = [sum(map(len, given_trees[:row])) for row in rows]
    generator, most = torch.Generator().manual_seed(seed), depth + 1 + more

    def numbers(*shape: int) -> Tensor:
        return torch.randint(100, shape, generator=generator).to(DEVICE)

    def target() -> TokenTargets:
        generator.manual_seed(seed)
        sources = numbers(len(rows), most) if has_sources else None
        tokens, accepted, positions, noise = (numbers(len(rows), *own) for own in ((most,), (), (width,), ()))
        own = torch.tensor(rows, device=DEVICE), torch.tensor(firsts, device=DEVICE)
        return TokenTargets(nodes, *own, tokens, accepted, sources, positions, noise)

    def parts_of(whole: TokenTargets) -> list[TokenTargets]:
        return [TokenTargets(nodes, *(None if own is None else own[part] for own in whole[1:])) for part in parts]

    def entries() -> DraftedEntries:
        # Each row's nodes have slots of their own.
        slots = torch.arange(len(paths) * most_nodes, device=DEVICE).view(len(paths), most_nodes)
        return DraftedEntries(cache(2, slots.numel(), 3, dtype=torch.float32, seed=seed), None, slots)

    most_nodes, cut = max(depth, *map(len, given_trees)), chance.randint(0, len(rows))
    # Nothing is written for no row at all, either.
    parts = chance.choice([[slice(None)], [slice(cut), slice(cut, None)]])
    found, expected, moved, wanted = target(), target(), entries(), entries()
    commit(walk, moved, parts_of(found))
    reference.commit(walk, wanted, parts_of(expected))
    assert torch.equal(bits(moved.kv), bits(wanted.kv))
    for name, mine, theirs in zip(TokenTargets._fields, found, expected, strict=True):
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name
    for place, row in enumerate(rows):
        brought = [given_trees[row].tokens[node] for node in paths[row]]
        assert found.tokens[place].tolist()[: len(brought)] == brought


def test_what_does_not_fit_is_refused() -> None:
    walk, one = walk_of([[0, 1]], 2, [3]), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    entries = DraftedEntries(torch.zeros(1, 4, 2, device=DEVICE), None, torch.zeros_like(walk.paths))
    with pytest.raises(ValueError, match=r"slots \(1, 1\) torch.int64: not int64 \(1, 2\) or wider"):
        commit(walk, entries._replace(slots=one[None]))
    with pytest.raises(ValueError, match="are in pieces"):
        commit(walk, entries._replace(features=torch.zeros(2, 4, device=DEVICE).t()))
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    target = TokenTargets(one, one, one, tokens, one, None, one[None], one)
    with pytest.raises(ValueError, match="all must be int64"):
        commit(walk, entries, [target._replace(nodes=torch.zeros(2, device=DEVICE))])
    with pytest.raises(ValueError, match="not all the same"):
        commit(walk, entries, [target._replace(accepted=one.expand(2).contiguous())])
