"""Rejection sampling down the draft trees of a batch in plain torch: the reference of the Triton kernel."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.reference_sampling import Walk, philox_words

# Streams of `verify.noise`.
COIN, RESIDUAL = 2, 3
# One of the numbers of a stream at an output position: (stream, position, place) -> [0, 1).
Uniform = Callable[[int, int, int], float]


def rejection_walk(
    scores: Tensor,
    draft_probs: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    starts: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    sampled: Tensor,
    max_nodes: int,
    max_depth: int,
) -> Walk:
    """See `specdec.kernels.rejection_walk`; computes in float64, and takes it.

    `max_nodes` only says how large the kernel's registers must be.
    """
    assert max_nodes >= 0
    draft, above, position = tokens.tolist(), parents.tolist(), positions.tolist()
    paths, lengths, next_tokens = [], [], []
    for row, (start, end) in enumerate(pairwise(starts.tolist())):
        # Every row before this one has a root, which is no node.
        nodes = slice(start - row, end - row - 1)
        children: dict[int, list[tuple[int, int]]] = {}
        for node, (parent, said) in enumerate(zip(above[nodes], draft[nodes], strict=True)):
            children.setdefault(parent, []).append((node, said))
        uniform = _uniforms(seeds[row], sample_indices[row])
        path: list[int] = []
        following: int | None = -1
        while following is not None:
            at = start + 1 + following
            below = children.get(following, []) if len(path) < max_depth else []
            best, token = (part.item() for part in scores[at].double().max(-1))
            if not abs(best) < float("inf"):
                following, token = None, -1
            elif not sampled[row]:
                following = next((node for node, said in below if said == token), None)
            else:
                q = None if draft_probs is None else draft_probs[at].double()
                following, left = _try_children(scores[at], q, below, uniform, position[row], len(path))
                if following is None:
                    token = _draw(left, uniform(RESIDUAL, position[row] + len(path), 0))
            if following is not None:
                path.append(following)
        paths.append(path + [-1] * (max_depth - len(path)))
        lengths.append(len(path))
        next_tokens.append(token)
    device = scores.device
    return Walk(
        torch.tensor(paths, dtype=torch.int64, device=device).view(len(paths), max_depth),
        torch.tensor(lengths, dtype=torch.int64, device=device),
        torch.tensor(next_tokens, dtype=torch.int64, device=device),
    )


def _uniforms(seed: Tensor, sample_index: Tensor) -> Uniform:
    def uniform(stream: int, position: int, place: int) -> float:
        at = torch.full_like(seed, position)[None]
        word = int(philox_words(seed[None], sample_index[None], at, place + 1, stream)[0, place])
        return ((word & (1 << 64) - 1) >> 11) * 2.0**-53

    return uniform


def _try_children(
    scores: Tensor, q: Tensor | None, children: list[tuple[int, int]], uniform: Uniform, position: int, depth: int
) -> tuple[int | None, Tensor]:
    """The first child that is accepted, None if none is; and what is left of p by then."""
    p = torch.softmax(scores.double(), -1)
    for rank, (child, token) in enumerate(children):
        own = torch.zeros_like(p).index_fill_(0, torch.tensor(token, device=p.device), 1) if q is None else q
        if own[token] > 0:
            # Cantor's pairing.
            place = (depth + rank) * (depth + rank + 1) // 2 + rank
            if uniform(COIN, position, place) < float(p[token] / own[token]):
                return child, p
            p = _normalised((p - own).clamp(min=0), p)
            if q is not None:
                rest = q.clone()
                rest[token] = 0
                q = _normalised(rest, q)
    return None, p


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """`otherwise` where rounding has left nothing."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


def _draw(weights: Tensor, u: float) -> int:
    """The first index whose sum is above u of the whole; where rounding lets none be, the last that has a weight."""
    sums = weights.cumsum(0)
    places = ((sums > u * sums[-1]) & (weights > 0)).nonzero()
    return int(places[0] if len(places) else weights.nonzero()[-1])
