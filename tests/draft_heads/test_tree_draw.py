"""TreeDraw against drawing without replacement in plain Python."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_draw import DrawSizes, TreeDraw
from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.tree import ROOT, DraftTree
from tests.draft_heads.drawn_levels import VOCAB, Head, Path, draw_level, draw_with
from tests.kernel_sets import TORCH
from tests.strategies import draft_shapes, seeds
from tests.trees import chain_of, path_to

ENDLESS = 10**6


def paths_of(tree: DraftTree) -> list[Path]:
    return [tuple(tree.tokens[above] for above in path_to(tree, node)) for node in range(len(tree))]


def families(tree: DraftTree) -> dict[Path, list[int]]:
    """Path of each parent -> its children's tokens in their order."""
    paths = {ROOT: (), **dict(enumerate(paths_of(tree)))}
    return {paths[parent]: [tree.tokens[node] for node in nodes] for parent, nodes in tree.children_of.items()}


def drawn_order(head: Head, path: Path, noise: Tensor) -> list[int]:
    """Gumbel top-k: all tokens that q can draw, in the order in which it draws them."""
    log_q = head.log_q(path)
    perturbed = {token: float(log_q[token]) + float(noise[token]) for token in range(VOCAB) if log_q[token].isfinite()}
    return sorted(perturbed, key=lambda token: -perturbed[token])


rows = st.integers(1, 3)


@given(draft_shapes(4, 5), rows, seeds, st.booleans())
def test_children_are_drawn_in_order_and_shared_equally(shape: DraftShape, rows: int, seed: int, zeros: bool) -> None:
    heads = [Head(seed, row, zeros) for row in range(rows)]
    drawn = draw_with(heads, shape, [0] * shape.depth)
    trees = drawn.draw.host_trees([ENDLESS] * rows, [shape.depth] * rows).read()
    per_level = max(1, shape.nodes // shape.depth)
    for head, noise, frontiers, tree in zip(heads, drawn.noise, drawn.frontiers, trees, strict=True):
        found = families(tree)
        for path, children in found.items():
            assert children == drawn_order(head, path, noise[len(path)])[: len(children)]
        for level in range(shape.depth):
            candidates = [path for path in paths_of(tree) if len(path) == level] if level else [()]
            expanded = [path for path in found if len(path) == level]
            # A frontier also holds places that nothing could be drawn for.
            assert set(expanded) == set(frontiers[level]) & set(candidates)
            assert 1 <= len(expanded) <= shape.branching
            counts = {path: len(found[path]) for path in expanded}
            assert sum(counts.values()) <= per_level
            most = max(counts.values())
            assert most <= shape.branching
            assert counts == {path: min(most, head.support(path)) for path in expanded}
            rest = [head.value(path) for path in candidates if path not in found]
            assert min(head.value(path) for path in expanded) >= max(rest, default=float("-inf")) - 1e-9


@given(draft_shapes(4, 5), rows, seeds, st.booleans())
def test_each_parent_has_the_q_of_its_children(shape: DraftShape, rows: int, seed: int, zeros: bool) -> None:
    heads = [Head(seed, row, zeros) for row in range(rows)]
    trees = (
        draw_with(heads, shape, [0] * shape.depth).draw.host_trees([shape.nodes] * rows, [shape.depth] * rows).read()
    )
    for head, tree in zip(heads, trees, strict=True):
        table = tree.draft_probs
        assert table is not None
        assert table.shape == (1 + len(tree), VOCAB)
        assert torch.equal(table[0], head.log_q(()).exp())
        for node, path in enumerate(paths_of(tree)):
            q = head.log_q(path).exp() if node in tree.children_of else torch.zeros(VOCAB, dtype=torch.float64)
            assert torch.equal(table[1 + node], q)
            # Of a token that q cannot draw, the rule would say nothing.
            assert table[1 + tree.parents[node], tree.tokens[node]] > 0


@given(draft_shapes(4, 5), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=3), seeds)
@example(DraftShape(3, 3, 9), [(0, 3), (2, 3), (3, 3), (8, 3), (9, 2), (9, 9)], 0)
def test_bounds_cut_off_whole_levels(shape: DraftShape, bounds: list[tuple[int, int]], seed: int) -> None:
    heads = [Head(seed, row, False) for row in range(len(bounds))]
    draw = draw_with(heads, shape, [0] * shape.depth).draw
    whole = draw.host_trees([ENDLESS] * len(heads), [shape.depth] * len(heads)).read()
    trees = draw.host_trees([budget for budget, _ in bounds], [depth for _, depth in bounds]).read()
    for tree, full, (budget, max_depth) in zip(trees, whole, bounds, strict=True):
        sizes = [sum(depth <= d for depth in full.depths) for d in range(1 + min(max_depth, shape.depth))]
        fitting = [size for size in sizes if size <= budget]
        # Only the root's own children are cut within a level, the last drawn first.
        size = min(sizes[1], budget) if len(fitting) == 1 < len(sizes) else fitting[-1]
        assert (tree.tokens, tree.parents) == (full.tokens[:size], full.parents[:size])


@given(draft_shapes(4, 5), st.integers(0, 30), seeds, st.booleans(), st.data())
def test_how_many_children_does_not_depend_on_which(
    shape: DraftShape, budget: int, seed: int, zeros: bool, data: st.DataObject
) -> None:
    """Else they would be no draws from q: whatever a level draws, its parents and their numbers stay."""
    heads = [Head(seed, 0, zeros)]
    changed = data.draw(st.integers(0, shape.depth - 1))
    one, other = (
        draw_with(heads, shape, [0] * changed + [lane] + [0] * (shape.depth - 1 - changed))
        .draw.host_trees([budget], [9])
        .read()[0]
        for lane in (0, 1)
    )
    before, after = (
        {path: children for path, children in families(tree).items() if len(path) <= changed} for tree in (one, other)
    )
    assert {path: len(children) for path, children in before.items()} == {
        path: len(children) for path, children in after.items()
    }
    above = [path for path in paths_of(one) if len(path) <= changed]
    assert above == [path for path in paths_of(other) if len(path) <= changed]


@given(st.integers(1, 6), seeds)
def test_branching_of_one_is_a_chain(depth: int, seed: int) -> None:
    head = Head(seed, 0, False)
    drawn = draw_with([head], DraftShape(depth, 1, depth), [0] * depth)
    (tree,) = drawn.draw.host_trees([depth], [depth]).read()
    tokens: Path = ()
    for noise in drawn.noise[0]:
        tokens = (*tokens, drawn_order(head, tokens, noise)[0])
    assert tree == chain_of(tokens)


@pytest.mark.parametrize("possible", [1, 2, VOCAB])
def test_no_more_children_than_q_can_draw(possible: int) -> None:
    log_q = torch.full((1, 1, VOCAB), float("-inf"))
    log_q[0, 0, :possible] = 0.0
    draw = TreeDraw(1, DrawSizes.of(VOCAB, DraftShape(1, VOCAB, VOCAB)), 1, TORCH.search)
    draw_level(draw, torch.log_softmax(log_q, -1), gumbel(0, 0, 0, VOCAB)[None])
    (tree,) = draw.host_trees([VOCAB], [1]).read()
    assert sorted(tree.tokens) == list(range(possible))
