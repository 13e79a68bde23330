# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Copies of cache entries and blocks: within the cache, and between it and pinned host memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Moves that are read before any of them is written, and numbers of each that a program copies.
MOVES_AT_ONCE = 32
CHUNK_SIZE = 128
# Numbers of a block's layer that a program copies between two tensors.
COPY_CHUNK_SIZE = 2048
# The second and third axis of a grid end here.
MAX_GRID = 65535


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots `source` to slots `target` in all layers, in order; the two may overlap.

    No slot may be a source after it has been a target, but among `MOVES_AT_ONCE` moves that stand together from a
    multiple of it on. An accepted path moves down only: its nodes rise, and node `path[i] >= i` goes to place i,
    so what place i held is read by move i at the latest. Paths of different requests share no slots.

    Args:
        kv: `[layers, slots, …]`, contiguous within each layer.
        source: int64 `[moves]`.
        target: int64 `[moves]`, distinct but where it is the source: such a move does nothing.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    _launch(kv, source, target, 1)


def copy_blocks(kv: Tensor, source_blocks: Tensor, target_blocks: Tensor, block_size: int) -> None:
    """Copy whole blocks in all layers, in order. What `move_kv` says of slots holds here of blocks.

    Args:
        kv: `[layers, blocks * block_size, …]`, contiguous within each layer.
        source_blocks: int64 `[copies]`.
        target_blocks: int64 `[copies]`, distinct.
        block_size: slots a block.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    if kv.shape[1] % block_size:
        raise ValueError(f"{kv.shape[1]} slots are no whole number of blocks of {block_size}")
    _launch(kv, source_blocks, target_blocks, block_size)


def _launch(kv: Tensor, source: Tensor, target: Tensor, slots: int) -> None:
    """Copy units of `slots` slots."""
    if source.ndim != 1 or source.shape != target.shape or {source.dtype, target.dtype} != {torch.int64}:
        raise ValueError(
            f"source {tuple(source.shape)} {source.dtype} and target {tuple(target.shape)} {target.dtype}: "
            "both must be int64 [moves]"
        )
    if kv.ndim < 2 or not (kv[0].is_contiguous() and source.is_contiguous() and target.is_contiguous()):
        strides = [part.stride() for part in (kv, source, target)]
        raise ValueError(f"cache, source and target have strides {strides}: they, or a layer, are not in one piece")
    size = slots * kv.shape[2:].numel()
    if source.numel():
        # One program alone reads and writes its chunk of a layer's entries, so that order within it is all.
        grid = (triton.cdiv(size, CHUNK_SIZE), kv.shape[0])
        move_kernel[grid](
            kv, source, target, source.numel(), kv.stride(0), size, MOVES=MOVES_AT_ONCE, CHUNK=CHUNK_SIZE, num_warps=4
        )


@triton.jit(do_not_specialize=["num_moves"])
def move_kernel(
    p_kv,  # [layers, entries, size]
    p_source,  # [num_moves]
    p_target,  # [num_moves]
    num_moves,  # run-time: differs from step to step, and no address depends on it
    layer_stride,  # run-time: grows with the cache
    size,  # run-time: numbers of an entry; a multiple of 16 in all real models, which Triton detects
    MOVES: tl.constexpr,  # the shape of the registers
    CHUNK: tl.constexpr,  # as above
):
    # [1, CHUNK]
    o_x = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK))[None, :]
    p_kv += tl.program_id(1).to(tl.int64) * layer_stride
    for start in range(0, num_moves, MOVES):
        # [MOVES]
        o_move = start + tl.arange(0, MOVES)
        m_move = o_move < num_moves
        source = tl.load(p_source + o_move, mask=m_move, other=0)
        target = tl.load(p_target + o_move, mask=m_move, other=0)
        move_entries(p_kv, source, target, source != target, o_x, size)


@triton.jit
def move_entries(p_kv, source, target, m_move, o_x, size):
    """Move some entries of a layer. All are read before one is written, and all are written before the next are read.

    Args:
        p_kv: `[entries, size]`.
        source, target, m_move: `[moves]`, and which of them are made.
        o_x: `[1, numbers]`, those that are moved.
    """
    m_x = m_move[:, None] & (o_x < size)
    b_x = tl.load(p_kv + source[:, None] * size + o_x, mask=m_x)
    tl.debug_barrier()
    tl.store(p_kv + target[:, None] * size + o_x, b_x, mask=m_x)
    tl.debug_barrier()


def copy_between(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """`target[target_blocks] = source[source_blocks]` between two tensors that share no memory.

    Either may be pinned host memory, which the device reads and writes at its own address; the host may look at it
    once the stream has come past this. Blocks are not compared with the number there is.

    Args:
        source: `[blocks, layers, …]`, with any strides of the first two dimensions and the others in one piece;
            of features, which have no layers, `[blocks, block_size, hidden]` serves as well. `[blocks, size]` is
            one layer.
        target: the same with any number of blocks and with strides of its own.
        source_blocks: int64 `[copies]`, on the device.
        target_blocks: int64 `[copies]`, on the device, distinct.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    if source_blocks.ndim != 1 or source_blocks.shape != target_blocks.shape:
        raise ValueError(
            f"source blocks {tuple(source_blocks.shape)}, target blocks {tuple(target_blocks.shape)}: not both [copies]"
        )
    for blocks in (source_blocks, target_blocks):
        if blocks.dtype != torch.int64 or not blocks.is_contiguous():
            raise ValueError(f"blocks are {blocks.dtype}, stride {blocks.stride()}: they must be int64 in one piece")
    if source.ndim < 2 or source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"source {tuple(source.shape)} {source.dtype} and target {tuple(target.shape)} {target.dtype}: "
            "blocks of both must be alike, [blocks, layers, …]"
        )
    if source.ndim == 2:
        source, target = source[:, None], target[:, None]
    copies, layers, size = source_blocks.numel(), source.shape[1], source.shape[2:].numel()
    if not (copies and layers and size):
        return
    if not (source[0, 0].is_contiguous() and target[0, 0].is_contiguous()):
        raise ValueError(f"source and target have strides {source.stride()}, {target.stride()}: a layer's is in pieces")
    chunks = triton.cdiv(size, COPY_CHUNK_SIZE)
    if max(layers, chunks) > MAX_GRID:
        raise ValueError(f"{layers} layers of {size} numbers are more than one launch can copy")
    copy_kernel[(copies, layers, chunks)](
        source, target, source_blocks, target_blocks, *source.stride()[:2], *target.stride()[:2], size,
        CHUNK=COPY_CHUNK_SIZE, num_warps=4,
    )  # fmt: skip


@triton.jit
def copy_kernel(
    p_source,  # [blocks, layers, size]
    p_target,  # [blocks, layers, size]
    p_source_blocks,  # [copies]
    p_target_blocks,  # [copies]
    source_block,  # run-time, as are all strides: one of each pair grows with the cache
    source_layer,
    target_block,
    target_layer,
    size,  # run-time: numbers of a block's layer; like the strides a multiple of 16 in all real models, and so
    # found by Triton, which then moves 16 bytes at a time
    CHUNK: tl.constexpr,  # the shape of the registers
):
    i_copy = tl.program_id(0)
    i_layer = tl.program_id(1).to(tl.int64)
    source = tl.load(p_source_blocks + i_copy)
    target = tl.load(p_target_blocks + i_copy)
    # [CHUNK]
    o_x = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    m_x = o_x < size
    b_x = tl.load(p_source + source * source_block + i_layer * source_layer + o_x, mask=m_x)
    tl.store(p_target + target * target_block + i_layer * target_layer + o_x, b_x, mask=m_x)
