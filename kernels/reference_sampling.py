"""Sampling and the walk down the trees in plain torch: the reference of the Triton kernels."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Philox 4x64-10: multipliers and key increments of Salmon et al. 2011.
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
HALF = 0xFFFFFFFF


class NoiseKeys(NamedTuple):
    """Where each row's noise comes from, int64 `[rows]` each, from 0 to 2**63 - 1.

    Attributes:
        seeds: of the requests.
        sample_indices: which of a request's samples.
        positions: output positions.
    """

    seeds: Tensor
    sample_indices: Tensor
    positions: Tensor


class TopK(NamedTuple):
    """The largest perturbed scores of each row, best first.

    Attributes:
        tokens: int64 `[rows, k]`, distinct; the lower id first where scores are equal.
        scores: float32 `[rows, k]`, noise included; -inf where no more tokens are possible.
        log_sum_exp: float32 `[rows]` over the whole row: what turns scores into log-chances.
    """

    tokens: Tensor
    scores: Tensor
    log_sum_exp: Tensor


class DraftProbs(NamedTuple):
    """What the children of a batch's roots and nodes were drawn from.

    Attributes:
        table: float32 `[laws, vocab]`.
        rows: int64 `[rows + nodes]`, which law the children of each root and node were drawn from, row by row; of no
            meaning where there are none.
    """

    table: Tensor
    rows: Tensor


class Walk(NamedTuple):
    """What each row's step yields: the tokens of its path, then `next_tokens`.

    Attributes:
        paths: int64 `[rows, max_depth]`, accepted nodes from the root's child downwards, then -1.
        lengths: int64 `[rows]`, how many they are.
        next_tokens: int64 `[rows]`, the target's own token after them, or -1 where there is none.
    """

    paths: Tensor
    lengths: Tensor
    next_tokens: Tensor


def philox_words(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, count: int, stream: int = 0, lane: int = 0
) -> Tensor:
    """`np.random.Philox(counter=[0, lane, stream, position], key=[seed, sample index]).random_raw(count)`, by row.

    Args:
        seeds, sample_indices, positions: int64 `[rows]`.

    Returns:
        int64 `[rows, count]`, the bits of the uint64 words.
    """
    rows, blocks = len(seeds), -(-count // 4)
    # Numpy counts up before it draws.
    counter = [torch.arange(1, blocks + 1, device=seeds.device).expand(rows, -1)]
    counter += [torch.full_like(counter[0], word) for word in (lane, stream)]
    counter.append(positions[:, None].expand(-1, blocks))
    key = [seeds[:, None], sample_indices[:, None]]
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(counter[2 * i], multiplier) for i, multiplier in enumerate(MULTIPLIERS)
        )
        counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0]
        key = [part + _signed(increment) for part, increment in zip(key, INCREMENTS, strict=True)]
    return torch.stack(counter, -1).flatten(1)[:, :count]


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Both halves of the 128-bit product, made of products of 32-bit halves; int64 wraps around as uint64 does."""
    low, high = multiplier & HALF, multiplier >> 32
    x_low, x_high = x & HALF, _upper(x)
    low_low, low_high, high_low = x_low * low, x_low * high, x_high * low
    middle = _upper(low_low) + (low_high & HALF) + (high_low & HALF)
    return x_high * high + _upper(low_high) + _upper(high_low) + _upper(middle), x * _signed(multiplier)


def _upper(x: Tensor) -> Tensor:
    """The upper 32 bits, as a number without a sign."""
    return (x >> 32) & HALF


def _signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def gumbel_noise(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, size: int, stream: int = 0, lane: int = 0
) -> Tensor:
    """Standard Gumbel variates as `verify.noise.gumbel` makes them, float32 `[rows, size]`.

    Args:
        seeds, sample_indices, positions: int64 `[rows]`.
    """
    words = philox_words(seeds, sample_indices, positions, (size + 1) // 2, stream, lane)
    halves = torch.stack([words & HALF, _upper(words)], -1).flatten(1)[:, :size]
    v = halves.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def gumbel_argmax(scores: Tensor, seeds: Tensor, sample_indices: Tensor, positions: Tensor, sampled: Tensor) -> Tensor:
    """See `specdec.kernels.gumbel_argmax`."""
    values, tokens = _perturbed(scores, seeds, sample_indices, positions, sampled, 0, 0).max(-1)
    return tokens.masked_fill_(~values.isfinite(), -1)


def perturbed_top_k(
    scores: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    sampled: Tensor,
    k: int,
    tokens: Tensor | None = None,
    stream: int = 0,
    lane: int = 0,
) -> TopK:
    """See `specdec.kernels.perturbed_top_k`."""
    if tokens is not None:
        # In order, so that of equal scores the lowest token comes first.
        tokens, order = tokens.expand(scores.shape).sort(dim=-1)
        scores = scores.gather(1, order)
    perturbed = _perturbed(scores, seeds, sample_indices, positions, sampled, stream, lane, tokens)
    perturbed = perturbed.masked_fill(perturbed.isnan(), float("-inf"))
    values, best = perturbed.sort(dim=-1, descending=True, stable=True)
    found = best[:, :k] if tokens is None else tokens.gather(1, best[:, :k])
    return TopK(found, values[:, :k], torch.logsumexp(perturbed, -1))


def _perturbed(
    scores: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    sampled: Tensor,
    stream: int,
    lane: int,
    tokens: Tensor | None = None,
) -> Tensor:
    """`[rows, n]`, a tensor of its own: float32, float64 for float64 scores. `tokens` is `[rows, n]`."""
    size = scores.shape[1] if tokens is None else int(tokens.max()) + 1
    noise = gumbel_noise(seeds, sample_indices, positions, size, stream, lane)
    if tokens is not None:
        noise = noise.gather(1, tokens)
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.to(exact) + noise.masked_fill_(~sampled[:, None], 0)


def tree_walk(emitted: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, max_nodes: int, max_depth: int) -> Walk:
    """See `specdec.kernels.tree_walk`; `max_nodes` only says how large the kernel's registers must be."""
    assert max_nodes >= 0
    said, draft, above, bounds = emitted.tolist(), tokens.tolist(), parents.tolist(), starts.tolist()
    paths, lengths, next_tokens = [], [], []
    for row, (start, end) in enumerate(pairwise(bounds)):
        # Every row before this one has a root, which is no node.
        nodes = slice(start - row, end - row - 1)
        path: list[int] = []
        node = -1
        # Parents come before children, so one pass meets every node after its parent.
        for child, (parent, token) in enumerate(zip(above[nodes], draft[nodes], strict=True)):
            if parent == node and said[start + 1 + node] == token >= 0 and len(path) < max_depth:
                path.append(child)
                node = child
        paths.append(path + [-1] * (max_depth - len(path)))
        lengths.append(len(path))
        next_tokens.append(said[start + 1 + node])
    device = emitted.device
    return Walk(
        torch.tensor(paths, dtype=torch.int64, device=device).view(len(paths), max_depth),
        torch.tensor(lengths, dtype=torch.int64, device=device),
        torch.tensor(next_tokens, dtype=torch.int64, device=device),
    )
