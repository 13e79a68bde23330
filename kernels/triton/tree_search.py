# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""A search of draft trees level by level: the next frontier, and the best nodes of all levels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types.device_trees import NodeTable
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS
from specdec.kernels.types.tree_search import Frontier, SearchedLevel, SearchedLevels
from specdec.kernels.types.types import TopK

BITS = tl.constexpr(WORD_BITS)
NEVER = tl.constexpr(float("-inf"))
ROOT = tl.constexpr(-1)
# Candidates that all others are compared with at a time.
PART = 16
# Candidates of a warp.
PER_WARP = 64


def next_frontier(
    children: TopK, above: Frontier | None, own_bits: Tensor | None, num_rows: int, width: int
) -> SearchedLevel:
    """Add a level of candidates; the `width` most probable of each row are the next frontier, the first of equal ones.

    A path's log-probability is the sum of its tokens' in float32; a token that is not a number is impossible.

    Args:
        children: of all rows' frontier nodes in turn, `[rows * nodes, k]`.
        above: the frontier that they are children of; None for the roots.
        own_bits: int64 `[width, words]`, the bit of each next frontier node's own entry; None where no ancestors are
            asked for.
        width: at most as many as a row has candidates.

    Raises:
        ValueError: `width` is larger.
    """
    nodes, each = children.tokens.shape
    count, device = nodes * each // num_rows, children.tokens.device
    if width > count:
        raise ValueError(f"width is {width}; a row has {count} candidates")
    words = 0 if own_bits is None else own_bits.shape[1]
    scores, tokens, sums = (part.contiguous() for part in (children.scores, children.tokens, children.log_sum_exp))
    values = torch.empty(num_rows, count, device=device)
    # Each of its own, so that all are aligned alike.
    best, found, parents = (torch.empty(num_rows, width, dtype=torch.int64, device=device) for _ in range(3))
    found_values = torch.empty(num_rows, width, device=device)
    bits = torch.empty(num_rows, width, words, dtype=torch.int64, device=device) if words else None
    block = triton.next_power_of_2(max(count, PART))
    above_values = None if above is None else above.values.contiguous()
    above_bits = above.ancestors.contiguous() if words and above is not None and above.ancestors is not None else None
    next_frontier_kernel[(num_rows,)](
        scores, sums, tokens, above_values, above_bits, own_bits,
        values, best, found, parents, found_values, bits, COUNT=count, EACH=each, WIDTH=width, WORDS=words, BLOCK=block,
        PART=PART, num_warps=_warps(block),
    )  # fmt: skip
    return SearchedLevel(values, tokens.view(num_rows, count), best, Frontier(found, parents, found_values, bits))


def best_nodes(levels: SearchedLevels, most: int, width: int) -> NodeTable:
    """Keep the best candidates of each row, in the order of their levels, with their ancestors as bits.

    Of equal values the first comes first, so that no node is kept without its parent. Every tree has as many nodes as
    `counts` says, also where a value is -inf. Behind them are children of the root without meaning.

    Args:
        levels: of a search whose frontiers had `width` nodes, each with `width` children.
        most: nodes of a row in what is returned.
    """
    values, tokens, best, counts, reach = (part.contiguous() for part in levels)
    (rows, count), device = values.shape, values.device
    words = max(1, ceil_div(most, WORD_BITS))
    numbers = torch.empty(4 + words, rows, most, dtype=torch.int64, device=device)
    block = triton.next_power_of_2(max(count, most, PART))
    best_nodes_kernel[(rows,)](
        values, tokens, best, counts, reach, numbers, most, COUNT=count, LEVELS=best.shape[1] + 1, WIDTH=width,
        WORDS=words, BLOCK=block, PART=PART, num_warps=_warps(block),
    )  # fmt: skip
    return numbers


def _warps(block: int) -> int:
    return min(16, max(1, block // PER_WARP))


@triton.jit
def value_of(p_scores, p_sums, p_above, o_candidate, COUNT: tl.constexpr, EACH: tl.constexpr):
    """Log-probability of the paths to some candidates of a row."""
    m_candidate = o_candidate < COUNT
    o_node = o_candidate // EACH
    b_value = tl.load(p_scores + o_candidate, mask=m_candidate, other=NEVER)
    b_value -= tl.load(p_sums + o_node, mask=m_candidate, other=0.0)
    b_value = tl.where(b_value == b_value, b_value, NEVER)
    if p_above is not None:
        b_value += tl.load(p_above + o_node, mask=m_candidate, other=0.0)
    return b_value


@triton.jit
def goes_before(b_first, o_first, b_second, o_second):
    """Return whether a candidate ranks before another: by value, then by place."""
    return (b_first > b_second) | ((b_first == b_second) & (o_first < o_second))


@triton.jit(do_not_specialize_on_alignment=["p_own_bits"])
def next_frontier_kernel(
    p_scores,  # [rows, COUNT]
    p_sums,  # [rows, COUNT // EACH]
    p_tokens,  # [rows, COUNT]
    p_above,  # [rows, COUNT // EACH], None for the roots
    p_above_bits,  # [rows, COUNT // EACH, WORDS], None for the roots
    p_own_bits,  # [WIDTH, WORDS]
    p_values,  # [rows, COUNT]
    p_best,  # [rows, WIDTH]
    p_found,  # [rows, WIDTH]
    p_parents,  # [rows, WIDTH]
    p_found_values,  # [rows, WIDTH]
    p_bits,  # [rows, WIDTH, WORDS]
    COUNT: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_scores += i_row * COUNT
    p_sums += i_row * (COUNT // EACH)
    if p_above is not None:
        p_above += i_row * (COUNT // EACH)
    # [BLOCK]
    o_candidate = tl.arange(0, BLOCK)
    m_candidate = o_candidate < COUNT
    b_value = value_of(p_scores, p_sums, p_above, o_candidate, COUNT, EACH)
    tl.store(p_values + i_row * COUNT + o_candidate, b_value, mask=m_candidate)
    b_rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNT, PART):
        o_other = start + tl.arange(0, PART)
        b_other = value_of(p_scores, p_sums, p_above, o_other, COUNT, EACH)
        m_before = goes_before(b_other[None, :], o_other[None, :], b_value[:, None], o_candidate[:, None])
        b_rank += tl.sum((m_before & (o_other < COUNT)[None, :]).to(tl.int32), 1)
    m_best = m_candidate & (b_rank < WIDTH)
    o_found = i_row * WIDTH + b_rank
    b_parent = o_candidate // EACH
    tl.store(p_best + o_found, o_candidate.to(tl.int64), mask=m_best)
    tl.store(p_found + o_found, tl.load(p_tokens + i_row * COUNT + o_candidate, mask=m_best, other=0), mask=m_best)
    tl.store(p_parents + o_found, b_parent.to(tl.int64), mask=m_best)
    tl.store(p_found_values + o_found, b_value, mask=m_best)
    for word in tl.static_range(WORDS):
        b_bits = tl.load(p_own_bits + b_rank * WORDS + word, mask=m_best, other=0)
        if p_above_bits is not None:
            o_above = (i_row * (COUNT // EACH) + b_parent) * WORDS + word
            b_bits |= tl.load(p_above_bits + o_above, mask=m_best, other=0)
        tl.store(p_bits + o_found * WORDS + word, b_bits, mask=m_best)


@triton.jit
def reached_value(p_values, o_candidate, reach, COUNT: tl.constexpr):
    """Value of some candidates of a row; -inf of those that its tree cannot have."""
    b_value = tl.load(p_values + o_candidate, mask=o_candidate < COUNT, other=NEVER)
    return tl.where(o_candidate < reach, b_value, NEVER)


@triton.jit
def bit_in(o_node, word: tl.constexpr):
    """Bit of each node in a word of ancestors; 0 where it is in another word."""
    b_one = tl.full(o_node.shape, 1, tl.int64)
    return tl.where(o_node // BITS == word, b_one << (o_node % BITS).to(tl.int64), 0)


@triton.jit(do_not_specialize=["most"])
def best_nodes_kernel(
    p_values,  # [rows, COUNT]
    p_tokens,  # [rows, COUNT]
    p_best,  # [rows, LEVELS - 1, WIDTH]
    p_counts,  # [rows]
    p_reach,  # [rows]
    p_numbers,  # [4 + WORDS, rows, most]
    most,
    COUNT: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    size, reach = tl.load(p_counts + i_row), tl.load(p_reach + i_row)
    p_values += i_row * COUNT
    # [BLOCK]
    o_candidate = tl.arange(0, BLOCK)
    m_candidate = o_candidate < COUNT
    b_value = reached_value(p_values, o_candidate, reach, COUNT)
    b_rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNT, PART):
        o_other = start + tl.arange(0, PART)
        b_other = reached_value(p_values, o_other, reach, COUNT)
        m_before = goes_before(b_other[None, :], o_other[None, :], b_value[:, None], o_candidate[:, None])
        b_rank += tl.sum((m_before & (o_other < COUNT)[None, :]).to(tl.int32), 1)
    m_kept = m_candidate & (b_rank < size)
    b_place = tl.cumsum(m_kept.to(tl.int32), 0) - 1
    # The candidate that each one is a child of; the root is none.
    o_later = tl.maximum(o_candidate - WIDTH, 0)
    b_level = tl.where(o_candidate < WIDTH, 0, 1 + o_later // (WIDTH * WIDTH))
    m_later = m_candidate & (b_level > 0)
    o_best = (i_row * (LEVELS - 1) + b_level - 1) * WIDTH + (o_later % (WIDTH * WIDTH)) // WIDTH
    b_start = tl.where(b_level > 1, WIDTH + (b_level - 2) * (WIDTH * WIDTH), 0)
    b_above = b_start + tl.load(p_best + o_best, mask=m_later, other=0).to(tl.int32)
    b_above = tl.where(m_later, b_above, ROOT)
    b_parent = tl.where(m_later, tl.gather(b_place, tl.maximum(b_above, 0), 0), ROOT)
    part = tl.num_programs(0).to(tl.int64) * most
    p_node = p_numbers + i_row * most + b_place
    tl.store(p_node, tl.load(p_tokens + i_row * COUNT + o_candidate, mask=m_kept, other=0), mask=m_kept)
    tl.store(p_node + part, b_parent.to(tl.int64), mask=m_kept)
    tl.store(p_node + 2 * part, (b_level + 1).to(tl.int64), mask=m_kept)
    tl.store(p_node + 3 * part, b_rank.to(tl.int64), mask=m_kept)
    # Behind them.
    p_behind, m_behind = p_numbers + i_row * most + o_candidate, (o_candidate >= size) & (o_candidate < most)
    tl.store(p_behind, 0, mask=m_behind)
    tl.store(p_behind + part, ROOT, mask=m_behind)
    tl.store(p_behind + 2 * part, 1, mask=m_behind)
    tl.store(p_behind + 3 * part, 0, mask=m_behind)
    for word in tl.static_range(WORDS):
        # Each node takes its parent's bits, then those of the parent's parent, and so on, twice as far each time.
        b_bit = bit_in(tl.maximum(b_place, 0), word)
        b_bits, b_from, far = b_bit, b_above, 1
        while far < LEVELS:
            o_from = tl.maximum(b_from, 0)
            b_bits |= tl.where(b_from >= 0, tl.gather(b_bits, o_from, 0), 0)
            b_from = tl.where(b_from >= 0, tl.gather(b_from, o_from, 0), ROOT)
            far *= 2
        tl.store(p_node + (4 + word) * part, b_bits, mask=m_kept)
        tl.store(p_behind + (4 + word) * part, bit_in(o_candidate, word), mask=m_behind)
