"""Drafts from the text itself, against a search by hand."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.drafting.ngram_drafter import LEAST_MATCH, LONGEST_MATCH, NGramDrafter
from specdec.kernels.tree import DraftTree
from specdec.verify.sampling import Context, Sampling
from tests.strategies import draft_shapes
from tests.trees import chain_of, path_to

# Few tokens, so that much of a text occurs twice.
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def row(text: list[int], nodes: int, depth: int) -> DraftRow:
    return DraftRow([], 0, len(text), nodes, depth, Context(Sampling(), text, 1))


def matched(text: list[int], place: int) -> int:
    """Return how many of the last tokens also precede `place`."""
    count = 0
    while count < min(place, LONGEST_MATCH) and text[place - 1 - count] == text[-1 - count]:
        count += 1
    return count


def by_hand(text: list[int], shape: DraftShape, nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Paths of the tree's nodes, in order."""
    places = [place for place in range(1, len(text)) if matched(text, place) >= LEAST_MATCH]
    places.sort(key=lambda place: (-matched(text, place), -place))
    paths: list[tuple[int, ...]] = []
    for place in places[: shape.branching]:
        continuation = tuple(text[place : place + min(depth, shape.depth)])
        for length in range(1, len(continuation) + 1):
            if continuation[:length] not in paths:
                paths.append(continuation[:length])
    return paths[:nodes]


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[above] for above in path_to(tree, node)) for node in range(len(tree))]


@given(texts, draft_shapes(4, 4), st.integers(0, 12), st.integers(0, 5))
def test_trees_equal_a_search_by_hand(text: list[int], shape: DraftShape, nodes: int, depth: int) -> None:
    (tree,) = NGramDrafter(shape).propose([row(text, nodes, depth)]).read()
    assert paths_of(tree) == (by_hand(text, shape, nodes, depth) if nodes and depth else [])


def test_the_longest_match_comes_first_then_the_latest() -> None:
    text = [1, 2, 3, 10, 0, 2, 3, 20, 0, 2, 3, 30, 9, 1, 2, 3]
    (tree,) = NGramDrafter(DraftShape(1, 3, 3)).propose([row(text, 3, 1)]).read()
    assert tree.tokens == (10, 30, 20)
    assert tree.parents == (-1, -1, -1)


def test_a_text_that_repeats_itself_is_drafted_as_far_as_it_goes() -> None:
    (tree,) = NGramDrafter(DraftShape(6, 1, 6)).propose([row([5, 6, 7, 8, 5, 6], 6, 6)]).read()
    assert tree == chain_of([7, 8, 5, 6])


def test_nothing_follows_what_has_not_occurred() -> None:
    rows = [row(text, 9, 3) for text in ([1], [1, 2, 3], [4, 5, 4], [7, 7])]
    trees = NGramDrafter(DraftShape(3, 3, 9)).propose(rows).read()
    assert trees == [DraftTree()] * 4
