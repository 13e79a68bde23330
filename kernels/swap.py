# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Copies of whole blocks between the device's cache and the host's pinned memory, all layers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a block's layer that a program copies.
CHUNK_SIZE = 2048
# The second and third axis of a grid end here.
MAX_GRID = 65535


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
    chunks = triton.cdiv(size, CHUNK_SIZE)
    if max(layers, chunks) > MAX_GRID:
        raise ValueError(f"{layers} layers of {size} numbers are more than one launch can copy")
    copy_kernel[(copies, layers, chunks)](
        source,
        target,
        source_blocks,
        target_blocks,
        *source.stride()[:2],
        *target.stride()[:2],
        size,
        CHUNK=CHUNK_SIZE,
        num_warps=4,
    )


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
