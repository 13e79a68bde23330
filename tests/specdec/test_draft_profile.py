"""Values of ranks from traced trees."""

import math

from specdec.cli.profile import rank_values
from specdec.core.outputs import TreeTrace


def tree(values: list[float | None], parents: tuple[int, ...], path: tuple[int, ...]) -> TreeTrace:
    logs = tuple(None if value is None else math.log(value) for value in values)
    tokens = tuple(range(len(parents)))
    return TreeTrace(0, tokens, parents, path, tokens, logs)


def test_ranks_follow_the_models_own_values() -> None:
    """Nodes 1, 0, 2 in their order. The last, without a value, is a chain's."""
    trees = [tree([0.3, 0.6, 0.2, None], (-1, -1, 0, 2), (1,))] * 3 + [tree([0.9], (-1,), ())]
    assert rank_values(trees) == [0.75, 0.0, 0.0]
