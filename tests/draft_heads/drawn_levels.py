"""Tree levels drawn from heads whose draft probabilities depend on the path alone."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_draw import DrawSizes, TreeDraw
from specdec.draft_heads.drafting.tree_search import Frontier
from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.types import Stream
from tests.kernel_sets import TORCH

VOCAB = 9
Path = tuple[int, ...]


class Head:
    """Float64 log q of each path of one row. With `zeros`, q excludes some tokens, sometimes all but one."""

    def __init__(self, seed: int, row: int, zeros: bool) -> None:
        self.key, self.zeros = (seed, row), zeros
        self.log_q = cache(self._log_q)

    def _log_q(self, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((*self.key, path)) % 2**63)
        scores = 2 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
        if self.zeros:
            count = int(torch.randint(VOCAB, (), generator=generator))
            scores[torch.randperm(VOCAB, generator=generator)[:count]] = float("-inf")
        return torch.log_softmax(scores, -1)

    def support(self, path: Path) -> int:
        return int(self.log_q(path).isfinite().sum())

    def value(self, path: Path) -> float:
        return sum(float(self.log_q(path[:depth])[token]) for depth, token in enumerate(path))


class Drawn(NamedTuple):
    """A draw, the noise of each row and level, and the frontier of each level as paths."""

    draw: TreeDraw
    noise: list[list[Tensor]]
    frontiers: list[list[list[Path]]]


def draw_level(draw: TreeDraw, log_q: Tensor, noise: Tensor) -> Frontier:
    """Draw the next level with `noise` of shape `[rows, vocab]`."""
    return draw.expand(log_q, (log_q + noise[:, None]).topk(min(draw.count, VOCAB)).indices)


def draw_with(heads: list[Head], shape: DraftShape, lanes: list[int]) -> Drawn:
    """Draw one level for each of `lanes`, the noise lane of the level."""
    draw = TreeDraw(len(heads), DrawSizes.of(min(shape.branching, VOCAB), shape), shape.depth, TORCH.search)
    noise = [
        [gumbel(11, row, level, VOCAB, Stream.DRAFT, lane) for level, lane in enumerate(lanes)]
        for row in range(len(heads))
    ]
    frontiers: list[list[list[Path]]] = [[[()]] for _ in heads]
    for level in range(len(lanes)):
        log_q = [
            torch.stack([head.log_q(path) for path in own[-1]]) for head, own in zip(heads, frontiers, strict=True)
        ]
        frontier = draw_level(draw, torch.stack(log_q), torch.stack([own[level] for own in noise]))
        for own, tokens, parents in zip(frontiers, frontier.tokens.tolist(), frontier.parents.tolist(), strict=True):
            own.append([(*own[-1][parent], token) for token, parent in zip(tokens, parents, strict=True)])
        assert draw.frontier_paths().tolist() == [[list(path) for path in own[-1]] for own in frontiers]
    return Drawn(draw, noise, frontiers)
