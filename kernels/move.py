# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Copies of cache entries and of whole blocks, in all layers at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Moves that are read before any of them is written, and numbers of each that a program copies.
MOVES_AT_ONCE = 32
CHUNK_SIZE = 128


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots `source` to slots `target` in all layers, in order; the two may overlap.

    No slot may be a source after it has been a target, but among `MOVES_AT_ONCE` moves that stand together from a
    multiple of it on. An accepted path moves down only: its nodes rise, and node `path[i] >= i` goes to place i,
    so what place i held is read by move i at the latest. Paths of different requests share no slots.

    Args:
        kv: `[layers, slots, …]`, contiguous within each layer.
        source: int64 `[moves]`.
        target: int64 `[moves]`, distinct.

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
    """Copy units of so many slots."""
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
    size,  # run-time: numbers of an entry; a multiple of 16 in all real models, which Triton finds out
    MOVES: tl.constexpr,  # the shape of the registers
    CHUNK: tl.constexpr,  # likewise
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
        # [MOVES, CHUNK]
        m_x = m_move[:, None] & (o_x < size)
        b_x = tl.load(p_kv + source[:, None] * size + o_x, mask=m_x)
        # All are read before one is written, and all are written before the next are read.
        tl.debug_barrier()
        tl.store(p_kv + target[:, None] * size + o_x, b_x, mask=m_x)
        tl.debug_barrier()
