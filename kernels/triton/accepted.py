# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Kernels behind the acceptance of drafts: move accepted cache entries, and write the new tokens to the next inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton import kv_copy
from specdec.kernels.triton.kv_copy import move_entries
from specdec.kernels.types.types import TokenTargets, Walk


def move_accepted(kv: Tensor, features: Tensor | None, walk: Walk, slots: Tensor) -> None:
    """Move the entries of accepted nodes behind their chains, in order of the rows; see `kv_copy.move_kv`.

    Args:
        kv: `[layers, slots, …]`, contiguous within each layer.
        features: `[slots, size]`, contiguous; moved alike.
        walk: of the rows.
        slots: int64 `[rows, most]`, of the nodes of each row's tree; at least as many as the walk is deep.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    (rows, depth), most = walk.paths.shape, slots.shape[1]
    if slots.dtype != torch.int64 or len(slots) != rows or most < depth or not slots.is_contiguous():
        raise ValueError(f"slots {tuple(slots.shape)} {slots.dtype}: not int64 {(rows, depth)} or wider, in one piece")
    if not kv[0].is_contiguous() or not (features is None or features.is_contiguous()):
        raise ValueError("a layer of the cache, or the features, are in pieces")
    layers, size = kv.shape[0], kv.shape[2:].numel()
    of_features = 0 if features is None else features.shape[1]
    if rows and depth:
        grid = (triton.cdiv(max(size, of_features), kv_copy.CHUNK_SIZE), layers + (features is not None))
        move_accepted_kernel[grid](
            kv, features, walk.paths, walk.lengths, slots, rows * depth, depth, most, kv.stride(0), layers, size,
            of_features, MOVES=kv_copy.MOVES_AT_ONCE, CHUNK=kv_copy.CHUNK_SIZE, num_warps=4,
        )  # fmt: skip


def place_tokens(walk: Walk, nodes: Tensor, places: TokenTargets) -> None:
    """Write the new tokens of some rows, and add their accepted drafts to positions; see `TokenTargets`.

    Args:
        nodes: int64 `[nodes]`, tokens of the nodes of all trees.

    Raises:
        ValueError: shapes or dtypes are others.
    """
    count, most = places.tokens.shape
    given = (nodes, *(part for part in places if part is not None), *walk)
    if {part.dtype for part in given} != {torch.int64} or not all(part.is_contiguous() for part in given):
        kinds = [(part.dtype, part.stride()) for part in given]
        raise ValueError(f"tokens, places and walk are {kinds}: all must be int64 in one piece")
    shapes = [tuple(part.shape[:1]) for part in places if part is not None]
    if set(shapes) != {(count,)} or (places.sources is not None and places.sources.shape[1] != most):
        raise ValueError(f"places are of {shapes} rows and {most} tokens: not all the same")
    if count:
        width = places.positions.shape[1]
        place_tokens_kernel[(count,)](
            *walk, nodes, *places, walk.paths.shape[1], most, width, BLOCK=triton.next_power_of_2(most),
            BLOCK_WIDTH=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_moves", "depth", "most"])
def move_accepted_kernel(
    p_kv,  # [layers, entries, size]
    p_features,  # [entries, of_features]
    p_paths,  # [rows, depth]
    p_lengths,  # [rows]
    p_slots,  # [rows, most]
    num_moves,  # run-time: rows * depth
    depth,  # run-time: of the deepest tree of the step
    most,  # run-time: nodes of the largest one
    layer_stride,  # run-time: grows with the cache
    layers,  # run-time
    size,  # run-time: numbers of an entry
    of_features,  # run-time: numbers of a feature
    MOVES: tl.constexpr,  # the shape of the registers
    CHUNK: tl.constexpr,  # as above
):
    # [1, CHUNK]
    o_x = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK))[None, :]
    i_layer = tl.program_id(1)
    for start in range(0, num_moves, MOVES):
        # [MOVES]; behind the last move it is repeated, which changes nothing: loads with a mask do not compile here.
        o_move = tl.minimum(start + tl.arange(0, MOVES), num_moves - 1)
        i_row, place = o_move // depth, o_move % depth
        # What is not accepted stays where it is.
        is_accepted = place < tl.load(p_lengths + i_row)
        node = tl.where(is_accepted, tl.load(p_paths + o_move), place)
        p_row = p_slots + i_row.to(tl.int64) * most
        source, target = tl.load(p_row + node), tl.load(p_row + place)
        if i_layer < layers:
            move_entries(p_kv + i_layer.to(tl.int64) * layer_stride, source, target, source != target, o_x, size)
        elif p_features is not None:
            move_entries(p_features, source, target, source != target, o_x, of_features)


# Parts of a packet's memory begin anywhere in it.
@triton.jit(
    do_not_specialize=["depth", "most", "width"],
    do_not_specialize_on_alignment=[
        "p_tokens",
        "p_accepted",
        "p_sources",
        "p_positions",
        "p_noise",
        "p_rows",
        "p_firsts",
    ],
)
def place_tokens_kernel(
    p_paths,  # [walked, depth]
    p_lengths,  # [walked]
    p_next_tokens,  # [walked]
    p_nodes,  # [nodes]
    p_rows,  # [rows]
    p_firsts,  # [rows]
    p_tokens,  # [rows, most]
    p_accepted,  # [rows]
    p_sources,  # [rows, most], None where nothing is to be kept from being written
    p_positions,  # [rows, width]
    p_noise,  # [rows]
    depth,  # run-time: of the deepest tree of the step
    most,  # run-time
    width,  # run-time
    BLOCK: tl.constexpr,  # tokens, the shape of the registers
    BLOCK_WIDTH: tl.constexpr,  # as above
):
    i_row = tl.program_id(0).to(tl.int64)
    walked = tl.load(p_rows + i_row)
    length = tl.load(p_lengths + walked)
    # [BLOCK]
    o_token = tl.arange(0, BLOCK)
    m_token, m_accepted = o_token < most, o_token < length
    b_node = tl.load(p_paths + walked * depth + o_token, mask=m_accepted, other=0)
    b_token = tl.load(p_nodes + tl.load(p_firsts + i_row) + b_node, mask=m_accepted, other=0)
    # Where no token can follow, the request ends.
    following = tl.maximum(tl.load(p_next_tokens + walked), 0)
    b_token = tl.where(o_token == length, following, b_token)
    tl.store(p_tokens + i_row * most + o_token, b_token, mask=m_token)
    tl.store(p_accepted + i_row, length)
    if p_sources is not None:
        p_sources += i_row * most
        b_source = tl.zeros([BLOCK], tl.int64) + tl.load(p_sources)
        tl.store(p_sources + o_token, b_source, mask=m_token & (o_token > length))
    # [BLOCK_WIDTH]
    o_position = tl.arange(0, BLOCK_WIDTH)
    p_positions += i_row * width + o_position
    b_position = tl.load(p_positions, mask=o_position < width, other=0)
    tl.store(p_positions, b_position + length, mask=o_position < width)
    tl.store(p_noise + i_row, tl.load(p_noise + i_row) + length)
