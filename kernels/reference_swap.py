"""Copies of whole blocks between two tensors in plain torch: the reference of the Triton kernel."""

from torch import Tensor


def copy_between(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """See `specdec.kernels.swap`; the blocks may be on any device."""
    blocks = source.index_select(0, source_blocks.to(source.device)).to(target.device)
    target.index_copy_(0, target_blocks.to(target.device), blocks)
