"""Copies of cache entries and blocks in plain torch: what a CPU runs, and the reference of the Triton kernels."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.kernels.types.types import EntryMoves
from specdec.kernels.types.upload import Packet


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """See `specdec.kernels.triton.kv_copy`; all sources are read first."""
    kv.index_copy_(1, target, kv.index_select(1, source))


def entry_moves(parts: Sequence[Tensor], move: Callable[[Tensor, Tensor, Tensor], None] = move_kv) -> EntryMoves:
    """Return what moves entries of all tensors; see `KernelSet.entry_moves`.

    Args:
        move: moves those of one.
    """

    def moves(source: Sequence[int], target: Sequence[int]) -> None:
        packet = Packet(parts[0].device)
        sources, targets = packet.add_lists(source, target)
        packet.send()
        for part in parts:
            move(part, sources, targets)

    return moves


def copy_blocks(kv: Tensor, source_blocks: Tensor, target_blocks: Tensor, block_size: int) -> None:
    """See `specdec.kernels.triton.kv_copy`; all sources are read first."""
    move_kv(kv.view(kv.shape[0], -1, block_size, *kv.shape[2:]), source_blocks, target_blocks)


def copy_between(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """See `specdec.kernels.triton.kv_copy`; the blocks may be on any device."""
    blocks = source.index_select(0, source_blocks.to(source.device)).to(target.device)
    target.index_copy_(0, target_blocks.to(target.device), blocks)
