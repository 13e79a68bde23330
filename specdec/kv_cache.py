"""The keys and values of all layers, in blocks, allocated once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.draft_heads.llama_config import LlamaConfig
from specdec.kernels.reference import move_kv


class KVCache:
    """One tensor for the target's layers and one for the head's, under the same block ids.

    Attributes:
        target: `[layers, num_blocks * block_size, 2 * kv_heads, head_dim]`, keys first.
        draft: the same with the head's own layers and sizes, or None.
        target_layers: `target`, layer by layer.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        target: LlamaConfig,
        draft: LlamaConfig | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

        def allocate(config: LlamaConfig) -> Tensor:
            shape = (config.num_layers, num_blocks * block_size, 2 * config.num_kv_heads, config.head_dim)
            return torch.empty(shape, dtype=dtype, device=device)

        self.target = allocate(target)
        self.draft = None if draft is None else allocate(draft)
        self.target_layers = self.target.unbind(0)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the target's slots `source` to `target` in every layer."""
        device = self.target.device
        move_kv(self.target, torch.tensor(source, device=device), torch.tensor(target, device=device))


def entry_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers of `config`."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
