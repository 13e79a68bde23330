# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Follows the tokens that the target emits down the draft trees of a batch, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.gumbel_argmax import best_of_parts, best_token
from specdec.kernels.types.integers import next_power_of_2
from specdec.kernels.types.types import DraftProbs, NoiseColumns, PackedTrees, Walk

# Smaller trees take no less time, and would each have to be compiled for; their sizes change from step to step.
# Attention takes no larger ones.
LEAST_NODES = 128


def coupled_walk(scores: Tensor, trees: PackedTrees, noise: NoiseColumns) -> Walk:
    """Follow, from each root on, the first child with the token emitted at the node, until there is none.

    Args:
        scores: `[rows + nodes, vocab]`, float32, bfloat16 or float16; processed, not normalised; per row its root's,
            then its nodes', each in one piece. The token emitted there is the argmax of scores plus noise; see
            `gumbel_argmax`.
        trees: the trees; a path longer than `max_depth` ends there, with the token emitted after its last node.
        noise: of each root and node.

    Returns:
        The walk; a path ends with -1 where no token is emitted, which no child has.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    check_trees(scores, trees)
    tokens, parents, starts, max_nodes, max_depth = trees
    rows = starts.numel() - 1
    best = best_of_parts(scores, noise)
    walk = empty_walk(rows, max_depth, scores.device)
    if rows:
        parts = best.shape[1]
        coupled_walk_kernel[(rows,)](
            best, tokens, parents, starts, *walk, max_depth, PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts),
            BLOCK=block_size(max_nodes, max_depth), num_warps=1,
        )  # fmt: skip
    return walk


def check_trees(scores: Tensor, trees: PackedTrees, draft_probs: DraftProbs | None = None) -> None:
    """Check that the trees of a walk fit its scores.

    Raises:
        ValueError: naming what does not fit.
    """
    rows, count = trees.starts.numel() - 1, len(scores)
    nodes = count - rows
    columns = {"starts": (trees.starts, rows + 1), "tokens": (trees.tokens, nodes), "parents": (trees.parents, nodes)}
    if draft_probs is not None:
        table = draft_probs.table
        columns["draft_probs.rows"] = draft_probs.rows, count
        if table.shape[1:] != scores.shape[1:] or table.dtype != torch.float32 or table.stride(1) != 1:
            raise ValueError(
                f"draft_probs {tuple(table.shape)} {table.dtype}, strides {table.stride()}: not float32 of "
                f"{scores.shape[1]} columns, as there are scores"
            )
    for name, (part, size) in columns.items():
        if part.shape != (size,) or part.dtype != torch.int64 or not part.is_contiguous():
            raise ValueError(
                f"{name} {tuple(part.shape)} {part.dtype}, strides {part.stride()}: not {size} of int64 in one piece, "
                f"as there are {count} scores of {rows} rows"
            )


def block_size(max_nodes: int, max_depth: int) -> int:
    """Return the shape of a walk's registers, of the nodes of a tree as of a path: a chain has all nodes on one."""
    return next_power_of_2(max(max_nodes, max_depth, LEAST_NODES))


def empty_walk(rows: int, max_depth: int, device: torch.device) -> Walk:
    """Return memory for a kernel to fill."""
    return Walk(
        torch.empty(rows, max_depth, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )


# The columns of a table of nodes may begin anywhere.
@triton.jit(do_not_specialize=["max_depth"], do_not_specialize_on_alignment=["p_tokens", "p_parents"])
def coupled_walk_kernel(
    p_best,  # [rows + nodes, PARTS]: keys
    p_tokens,  # [nodes]
    p_parents,  # [nodes]
    p_starts,  # [rows + 1]
    p_paths,  # [rows, max_depth]
    p_lengths,  # [rows]
    p_next_tokens,  # [rows]
    max_depth,  # run-time: the deepest tree of the step
    PARTS: tl.constexpr,  # a model has one
    BLOCK_PARTS: tl.constexpr,  # the shape of the registers
    BLOCK: tl.constexpr,  # nodes of a tree or path, as above
):
    i_row = tl.program_id(0).to(tl.int64)
    start = tl.load(p_starts + i_row)
    # Every row before this one has a root, which is no node.
    num_nodes = tl.load(p_starts + i_row + 1) - start - 1
    p_best += (start + 1) * PARTS
    # [BLOCK]
    o_node = tl.arange(0, BLOCK)
    m_node = o_node < num_nodes
    b_tokens = tl.load(p_tokens + start - i_row + o_node, mask=m_node, other=-1)
    # No node has itself for a parent, nor any beyond the last.
    b_parents = tl.load(p_parents + start - i_row + o_node, mask=m_node, other=BLOCK)
    b_path = tl.full([BLOCK], -1, tl.int64)
    # BLOCK: the walk has ended.
    node = tl.full([], -1, tl.int32)
    length = tl.full([], 0, tl.int32)
    emitted = tl.full([], -1, tl.int64)
    while node < BLOCK:
        # Only nodes on the path need their token, so parts are joined here.
        emitted = best_token(p_best + node * PARTS, PARTS, BLOCK_PARTS)
        m_next = (b_parents == node) & (b_tokens == emitted) & (emitted >= 0) & (length < max_depth)
        following = tl.min(tl.where(m_next, o_node, BLOCK), 0)
        b_path = tl.where((o_node == length) & (following < BLOCK), following, b_path)
        length += (following < BLOCK).to(tl.int32)
        node = following
    tl.store(p_paths + i_row * max_depth + o_node, b_path, mask=o_node < max_depth)
    tl.store(p_lengths + i_row, length.to(tl.int64))
    tl.store(p_next_tokens + i_row, emitted)
