# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Moves accepted cache entries, and writes new tokens to the inputs of the next drafting."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.kernels.triton import kv_copy
from specdec.kernels.triton.kv_copy import move_entries
from specdec.kernels.types.types import DraftedEntries, TokenTargets, Walk

# Longer paths and wider positions are compiled for.
LEAST_TOKENS, LEAST_WIDTH = 8, 8


def commit(walk: Walk, entries: DraftedEntries, targets: Sequence[TokenTargets] = ()) -> None:
    """Move the entries of accepted nodes behind their chains, and write new tokens where the next step reads them.

    Entries move in order of the rows; see `kv_copy.move_kv`. One launch does both, and one more each further target.

    Args:
        walk: of the rows.
        entries: of the nodes of each row's tree.
        targets: of some rows each.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    kv, features, slots = entries
    (rows, depth), most = walk.paths.shape, slots.shape[1]
    if slots.dtype != torch.int64 or len(slots) != rows or most < depth or not slots.is_contiguous():
        raise ValueError(f"slots {tuple(slots.shape)} {slots.dtype}: not int64 {(rows, depth)} or wider, in one piece")
    if not kv[0].is_contiguous() or not (features is None or features.is_contiguous()):
        raise ValueError("a layer of the cache, or the features, are in pieces")
    for own in targets:
        _check(walk, own)
    layers, size = kv.shape[0], kv.shape[2:].numel()
    of_features = 0 if features is None else features.shape[1]
    chunks = triton.cdiv(max(size, of_features), kv_copy.CHUNK_SIZE)
    moves = rows * depth and chunks * (layers + (features is not None))
    no_row = walk.lengths[:0]
    none = TokenTargets(no_row, no_row, no_row, no_row[:, None], no_row, None, no_row[:, None], no_row)
    for own in targets or (none,):
        (count, length), width = own.tokens.shape, own.positions.shape[1]
        if count + moves:
            # One form, with sources or without.
            pointers = own._replace(sources=own.tokens if own.sources is None else own.sources)
            commit_kernel[(count + moves,)](
                kv, features, *walk, slots, *pointers, count, int(own.sources is not None), length, width, rows * depth,
                depth, most, chunks, kv.stride(0), layers, size, of_features, MOVES=kv_copy.MOVES_AT_ONCE,
                CHUNK=kv_copy.CHUNK_SIZE, BLOCK=max(triton.next_power_of_2(length), LEAST_TOKENS),
                BLOCK_WIDTH=max(triton.next_power_of_2(width), LEAST_WIDTH), num_warps=4,
            )  # fmt: skip
        moves = 0


def _check(walk: Walk, own: TokenTargets) -> None:
    count, most = own.tokens.shape
    given = (*(part for part in own if part is not None), *walk)
    if {part.dtype for part in given} != {torch.int64} or not all(part.is_contiguous() for part in given):
        kinds = [(part.dtype, part.stride()) for part in given]
        raise ValueError(f"targets and walk are {kinds}: all must be int64 in one piece")
    shapes = [tuple(part.shape[:1]) for name, part in own._asdict().items() if part is not None and name != "nodes"]
    if set(shapes) != {(count,)} or (own.sources is not None and own.sources.shape[1] != most):
        raise ValueError(f"targets are of {shapes} rows and {most} tokens: not all the same")


@triton.jit(
    do_not_specialize=["count", "has_sources", "length", "width", "num_moves", "depth", "most", "chunks"],
    # Rows of a table may begin anywhere.
    do_not_specialize_on_alignment=[
        "p_nodes",
        "p_rows",
        "p_firsts",
        "p_tokens",
        "p_accepted",
        "p_sources",
        "p_positions",
        "p_noise",
    ],
)
def commit_kernel(
    p_kv,  # [layers, entries, size]
    p_features,  # [entries, of_features], or None
    p_paths,  # [walked, depth]
    p_lengths,  # [walked]
    p_next_tokens,  # [walked]
    p_slots,  # [walked, most]
    p_nodes,  # [nodes]
    p_rows,  # [count]
    p_firsts,  # [count]
    p_tokens,  # [count, length]
    p_accepted,  # [count]
    p_sources,  # [count, length]
    p_positions,  # [count, width]
    p_noise,  # [count]
    count,  # run-time: rows that are written for
    has_sources,  # run-time
    length,  # run-time
    width,  # run-time
    num_moves,  # run-time: walked * depth
    depth,  # run-time: of the deepest tree of the step
    most,  # run-time: nodes of the largest one
    chunks,  # run-time: programs of a layer
    layer_stride,  # run-time: grows with the cache
    layers,  # run-time
    size,  # run-time: numbers of an entry
    of_features,  # run-time: numbers of a feature
    MOVES: tl.constexpr,  # the shape of the registers
    CHUNK: tl.constexpr,  # as above
    BLOCK: tl.constexpr,  # tokens, as above
    BLOCK_WIDTH: tl.constexpr,  # positions, as above
):
    i_row = tl.program_id(0).to(tl.int64)
    if i_row < count:
        _place(
            p_paths, p_lengths, p_next_tokens, p_nodes, p_rows, p_firsts, p_tokens, p_accepted, p_sources, p_positions,
            p_noise, i_row, depth, has_sources, length, width, BLOCK, BLOCK_WIDTH,
        )  # fmt: skip
    else:
        i_layer = (i_row - count) // chunks
        # [1, CHUNK]
        o_x = ((i_row - count) % chunks * CHUNK + tl.arange(0, CHUNK))[None, :]
        for start in range(0, num_moves, MOVES):
            # [MOVES]; behind the last move it is repeated, which changes nothing: masked loads do not compile here.
            o_move = tl.minimum(start + tl.arange(0, MOVES), num_moves - 1)
            i_walked, place = o_move // depth, o_move % depth
            # What is not accepted stays where it is.
            is_accepted = place < tl.load(p_lengths + i_walked)
            node = tl.where(is_accepted, tl.load(p_paths + o_move), place)
            p_row = p_slots + i_walked.to(tl.int64) * most
            source, target = tl.load(p_row + node), tl.load(p_row + place)
            if i_layer < layers:
                move_entries(p_kv + i_layer * layer_stride, source, target, source != target, o_x, size)
            elif p_features is not None:
                move_entries(p_features, source, target, source != target, o_x, of_features)


@triton.jit
def _place(
    p_paths, p_lengths, p_next_tokens, p_nodes, p_rows, p_firsts, p_tokens, p_accepted, p_sources, p_positions,
    p_noise, i_row, depth, has_sources, length, width, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a row's new tokens, and add their number to its positions."""
    walked = tl.load(p_rows + i_row)
    accepted = tl.load(p_lengths + walked)
    # [BLOCK]
    o_token = tl.arange(0, BLOCK)
    m_token, m_accepted = o_token < length, o_token < accepted
    b_node = tl.load(p_paths + walked * depth + o_token, mask=m_accepted, other=0)
    b_token = tl.load(p_nodes + tl.load(p_firsts + i_row) + b_node, mask=m_accepted, other=0)
    # Where no token can follow, the request ends.
    following = tl.maximum(tl.load(p_next_tokens + walked), 0)
    b_token = tl.where(o_token == accepted, following, b_token)
    tl.store(p_tokens + i_row * length + o_token, b_token, mask=m_token)
    tl.store(p_accepted + i_row, accepted)
    if has_sources:
        p_sources += i_row * length
        b_source = tl.zeros([BLOCK], tl.int64) + tl.load(p_sources)
        tl.store(p_sources + o_token, b_source, mask=m_token & (o_token > accepted))
    # [BLOCK_WIDTH]
    o_position = tl.arange(0, BLOCK_WIDTH)
    p_positions += i_row * width + o_position
    b_position = tl.load(p_positions, mask=o_position < width, other=0)
    tl.store(p_positions, b_position + accepted, mask=o_position < width)
    tl.store(p_noise + i_row, tl.load(p_noise + i_row) + accepted)
