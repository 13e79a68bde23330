"""Walks that weigh p against q in plain torch: the reference of the Triton kernels."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.philox_reference import philox_words
from specdec.kernels.types import DraftProbs, Stream, Walk

# One of the numbers of a stream at an output position: (stream, position, place) -> [0, 1).
Uniform = Callable[[int, int, int], float]


def rejection_walk(
    scores: Tensor,
    draft_probs: DraftProbs | None,
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
            largest, argmax = scores[at].double().max(-1)
            best, token = float(largest), int(argmax)
            if not abs(best) < float("inf"):
                following, token = None, -1
            elif not sampled[row]:
                following = next((node for node, said in below if said == token), None)
            else:
                q = _law(draft_probs, at) if draft_probs is not None and below else None
                following, left = _try_children(scores[at], q, below, uniform, position[row], len(path))
                if following is None:
                    token = _draw(left, uniform(Stream.RESIDUAL, position[row] + len(path), 0))
            if following is not None:
                path.append(following)
        paths.append(path + [-1] * (max_depth - len(path)))
        lengths.append(len(path))
        next_tokens.append(token)
    return _as_tensors(paths, lengths, next_tokens, max_depth, scores.device)


def block_walk(
    scores: Tensor,
    draft_probs: DraftProbs,
    tokens: Tensor,
    starts: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    max_depth: int,
) -> Walk:
    """See `specdec.kernels.block_walk`; computes in float64, and takes it."""
    draft, position = tokens.tolist(), positions.tolist()
    paths, lengths, next_tokens = [], [], []
    for row, (start, end) in enumerate(pairwise(starts.tolist())):
        chain = draft[start - row : end - row - 1]
        largest = scores[start:end].double().max(-1).values.tolist()
        lawful = next((at for at, best in enumerate(largest) if not abs(best) < float("inf")), len(largest))
        chain = chain[:lawful]
        p = torch.softmax(scores[start : start + min(lawful, 1 + len(chain))].double(), -1)
        q = [_law(draft_probs, start + place) for place in range(len(chain))]
        prefix = [1.0]
        for place, token in enumerate(chain):
            ratio = float(p[place, token] / q[place][token]) if q[place][token] > 0 else 0.0
            prefix.append(min(prefix[-1] * ratio, 1.0))
        uniform = _uniforms(seeds[row], sample_indices[row])
        kept, h = len(chain), prefix[-1]
        left = p[kept] if kept < lawful else None
        while kept > 0 and not uniform(Stream.COIN, position[row], kept * (kept - 1) // 2) < h:
            kept -= 1
            rest = (prefix[kept] * p[kept] - q[kept]).clamp(min=0)
            total = float(rest.sum()) + 1 - prefix[kept]
            h = float(rest.sum()) / total if total > 0 else 1.0
            left = _normalised(rest, p[kept])
        paths.append([place if place < kept else -1 for place in range(max_depth)])
        lengths.append(kept)
        next_tokens.append(-1 if left is None else _draw(left, uniform(Stream.RESIDUAL, position[row] + kept, 0)))
    return _as_tensors(paths, lengths, next_tokens, max_depth, scores.device)


def _as_tensors(
    paths: list[list[int]], lengths: list[int], next_tokens: list[int], max_depth: int, device: torch.device
) -> Walk:
    return Walk(
        torch.tensor(paths, dtype=torch.int64, device=device).view(len(paths), max_depth),
        torch.tensor(lengths, dtype=torch.int64, device=device),
        torch.tensor(next_tokens, dtype=torch.int64, device=device),
    )


def _law(draft_probs: DraftProbs, at: int) -> Tensor:
    """float64 `[vocab]`: what the children of this root or node were drawn from."""
    return draft_probs.table[draft_probs.rows[at]].double()


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
            if uniform(Stream.COIN, position, place) < float(p[token] / own[token]):
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
