"""Tree searches over heads whose log-probabilities depend on the path alone."""

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_search import TreeBounds, TreeSearch
from specdec.kernels.types.device_trees import DeviceTrees
from specdec.kernels.types.tree_search import SearchKernels
from specdec.kernels.types.types import TopK
from specdec.kernels.types.upload import Packet
from tests.kernel_sets import TORCH

VOCAB = 12
Path = tuple[int, ...]
Head = Callable[[Path], Tensor]


def random_head(seed: int, row: int) -> Head:
    """Return a head with float32 log-probabilities that depend on the path, no two equal."""

    def head(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, row, path)) % 2**63)
        return torch.log_softmax(2 * torch.randn(VOCAB, generator=generator), -1)

    return head


def coarse_head(seed: int, row: int, least: float = -math.inf) -> Head:
    """Return a head full of ties: one certain token (0, all others `least`), two equal ones, or all equal."""

    def head(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, row, path)) % 2**63)
        likely = int(torch.tensor([1, 1, 2, VOCAB])[torch.randint(4, (1,), generator=generator)])
        scores = torch.full((VOCAB,), least)
        scores[torch.randperm(VOCAB, generator=generator)[:likely]] = 0.0
        return torch.log_softmax(scores, -1)

    return head


def search_with(
    heads: list[Head], shape: DraftShape, kernels: SearchKernels = TORCH.search
) -> tuple[TreeSearch, list[list[list[Path]]]]:
    """Run a search. Return it with the frontiers that it requested, per row and level, as paths."""
    search = TreeSearch(len(heads), shape.branching, kernels)
    frontiers: list[list[list[Path]]] = [[[()]] for _ in heads]
    for _ in range(shape.depth):
        log_probs = [torch.stack([head(path) for path in own[-1]]) for head, own in zip(heads, frontiers, strict=True)]
        best = torch.cat(log_probs).topk(min(shape.branching, VOCAB))
        children = TopK(best.indices, best.values, torch.zeros(len(best.values)))
        frontier = search.expand(children)
        for own, tokens, parents in zip(frontiers, frontier.tokens.tolist(), frontier.parents.tolist(), strict=True):
            own.append([(*own[-1][parent], token) for token, parent in zip(tokens, parents, strict=True)])
    return search, frontiers


def device_trees_of(search: TreeSearch, budgets: Sequence[int], depths: Sequence[int]) -> DeviceTrees:
    """Return the trees of a search on a device."""
    packet = Packet(torch.device("cpu"))
    bounds = TreeBounds.of(budgets, depths, search.num_levels, search.width, packet, max(budgets))
    return search.candidates().trees(bounds, search.kernels, packet)


bounds = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=3)
