# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Follows emitted tokens down the draft trees of a batch, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types.types import PackedTrees, Walk

ROOT = tl.constexpr(-1)


# Smaller trees take no less time, and would each have to be compiled for; their sizes change from step to step.
LEAST_NODES, LEAST_DEPTH = 64, 8


def tree_walk(emitted: Tensor, trees: PackedTrees) -> Walk:
    """Follow, from each root on, the first child with the token emitted at the node, until there is none.

    Args:
        emitted: int64 `[rows + nodes]`, per row the token that the target emits after its root, then after each of
            its nodes; -1 where it emits none, which no child has.
        trees: the trees; a path longer than `max_depth` ends there, with the token emitted after its last node.

    Raises:
        ValueError: shapes or dtypes are others.
    """
    tokens, parents, starts, max_nodes, max_depth = trees
    rows = starts.numel() - 1
    if tokens.shape != parents.shape or emitted.numel() != rows + tokens.numel():
        raise ValueError(
            f"{emitted.numel()} emitted tokens, {tokens.numel()} nodes, {parents.numel()} parents and {rows} rows "
            "do not fit each other"
        )
    given = (emitted, tokens, parents, starts)
    if {part.dtype for part in given} != {torch.int64} or not all(part.is_contiguous() for part in given):
        kinds = [(part.dtype, part.stride()) for part in given]
        raise ValueError(f"emitted, tokens, parents and starts are {kinds}: all must be int64 in one piece")
    walk = empty_walk(rows, max_depth, emitted.device)
    nodes, depth = block_sizes(max_nodes, max_depth)
    if rows:
        tree_walk_kernel[(rows,)](
            emitted, tokens, parents, starts, *walk, max_depth, BLOCK=nodes, BLOCK_DEPTH=depth, num_warps=1,
        )  # fmt: skip
    return walk


def block_sizes(max_nodes: int, max_depth: int) -> tuple[int, int]:
    """Return the shape of a walk's registers: of the nodes of a tree, and of a path."""
    return max(triton.next_power_of_2(max_nodes), LEAST_NODES), max(triton.next_power_of_2(max_depth), LEAST_DEPTH)


def empty_walk(rows: int, max_depth: int, device: torch.device) -> Walk:
    """Return memory for a kernel to fill."""
    return Walk(
        torch.empty(rows, max_depth, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )


@triton.jit(do_not_specialize=["max_depth"])
def tree_walk_kernel(
    p_emitted,  # [rows + nodes]
    p_tokens,  # [nodes]
    p_parents,  # [nodes]
    p_starts,  # [rows + 1]
    p_paths,  # [rows, max_depth]
    p_lengths,  # [rows]
    p_next_tokens,  # [rows]
    max_depth,  # run-time: the deepest tree of the step
    BLOCK: tl.constexpr,  # nodes, the shape of the registers
    BLOCK_DEPTH: tl.constexpr,  # the shape of the registers of a path
):
    i_row = tl.program_id(0).to(tl.int64)
    start = tl.load(p_starts + i_row)
    # Every row before this one has a root, which is no node.
    num_nodes = tl.load(p_starts + i_row + 1) - start - 1
    p_emitted += start
    p_tokens += start - i_row
    p_parents += start - i_row
    # [BLOCK]
    o_node = tl.arange(0, BLOCK)
    m_node = o_node < num_nodes
    b_tokens = tl.load(p_tokens + o_node, mask=m_node, other=0)
    b_parents = tl.load(p_parents + o_node, mask=m_node, other=ROOT)
    # The token that its parent emits: with it at hand, all nodes are compared at once, and a step down the tree
    # waits for no memory.
    b_emitted = tl.load(p_emitted + 1 + b_parents, mask=m_node, other=-1)
    # The parent of a node that may be stepped to; no node's own index for the others.
    b_from = tl.where(m_node & (b_emitted == b_tokens) & (b_emitted >= 0), b_parents, BLOCK)
    # [BLOCK_DEPTH]
    o_depth = tl.arange(0, BLOCK_DEPTH)
    b_path = tl.full([BLOCK_DEPTH], -1, tl.int64)
    node = tl.full([], -1, tl.int32)
    length = tl.full([], 0, tl.int32)
    child = tl.min(tl.where(b_from == node, o_node, BLOCK), 0)
    while (child < BLOCK) & (length < max_depth):
        node = child
        b_path = tl.where(o_depth == length, node, b_path)
        length += 1
        child = tl.min(tl.where(b_from == node, o_node, BLOCK), 0)
    tl.store(p_paths + i_row * max_depth + o_depth, b_path, mask=o_depth < max_depth)
    tl.store(p_lengths + i_row, length.to(tl.int64))
    tl.store(p_next_tokens + i_row, tl.load(p_emitted + 1 + node))
