"""EAGLE-2 for one row by its definition, with a dense pass for each node and no cache."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.tree import DraftTree
from tests.trees import path_to

TokenPath = tuple[int, ...]


def dense_search(logits_after: Callable[[TokenPath], Tensor], row: DraftRow, shape: DraftShape) -> set[TokenPath]:
    """The paths of the row's tree.

    Args:
        logits_after: `[vocab]` float64, behind the row's known tokens and a path.
    """

    def log_probs(path: TokenPath) -> list[float]:
        logits = logits_after(path)
        sampling = row.context.sampling
        if not sampling.is_greedy:
            noise = gumbel(sampling.seed, sampling.sample_index, row.context.num_output + len(path), len(logits))
            logits = torch.log_softmax(logits / sampling.temperature, -1) + noise
        return torch.log_softmax(logits, -1).tolist()

    values: dict[TokenPath, float] = {(): 0.0}
    frontier: list[TokenPath] = [()]
    for _ in range(min(shape.depth, row.max_depth)):
        level: dict[TokenPath, float] = {}
        for path in frontier:
            log_q = log_probs(path)
            for token in sorted(range(len(log_q)), key=lambda token, log_q=log_q: -log_q[token])[: shape.branching]:
                level[*path, token] = values[path] + log_q[token]
        values |= level
        frontier = sorted(level, key=lambda path: -level[path])[: shape.branching]
        if sum(math.exp(level[path]) for path in frontier) < shape.min_reach:
            break
    del values[()]
    return set(sorted(values, key=lambda path: (-values[path], len(path)))[: row.num_nodes])


def paths_of(tree: DraftTree) -> set[TokenPath]:
    return {tuple(tree.tokens[above] for above in path_to(tree, node)) for node in range(len(tree))}
