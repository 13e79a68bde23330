"""Tensors of the paged cache: keys and values of all layers, and features, allocated once."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.cache.block_moves import BlockMove
from specdec.draft_heads.heads.draft_head import CachedHead
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types import kv_entries
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.types import DraftedEntries, TokenTargets, Walk
from specdec.kernels.types.upload import Packet


class KVDtypes(NamedTuple):
    """Dtypes of keys and values: of the cache's numbers, or of its codes."""

    target: torch.dtype
    draft: torch.dtype


class _Entries(NamedTuple):
    """Keys and values of all layers.

    Attributes:
        memory: what moves and copies handle, `[layers, slots, …]`; whole slots where they hold codes.
        kv: what attention reads, `[layers, slots, 2 * kv_heads, head_dim]`.
    """

    memory: Tensor
    kv: Tensor


class KVCache:
    """One tensor for the target's layers, one for the draft head's, and one for the features that the head reads.

    All are indexed by the same slots. The null block lies behind the last block. Rows that belong to no request write
    there, and no request reads it.

    Attributes:
        target: `[layers, slots, 2 * kv_heads, head_dim]`, keys first; numbers, or codes as in
            `kernels/types/kv_entries.py`.
        draft: the same for the head's own layers and sizes; None without a head.
        features: `[slots, feature_size]`, what the head reads of each cached token; None if it reads nothing.
        target_layers: `target`, layer by layer.
        target_scales: float32 `[layers, 2 * kv_heads]`, of codes, from the checkpoint; None: see `kv_entries.quantize`.
        null_block: index of the null block.
        parts: the three by name ("target", "head", "features"), each as `[blocks, ...]`; of codes, whole slots.
        load: copies a connector's blocks (sources) to the device's (targets), for moves that load; None without a
            connector.

    Args:
        dtype: of features, and of keys and values that are not quantised.
        kv_dtypes: of the entries of target and head.
        target_scales: see above.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        target: LlamaConfig,
        head: CachedHead | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: KernelSet,
        kv_dtypes: KVDtypes | None = None,
        target_scales: Tensor | None = None,
    ) -> None:
        self.kernels = kernels
        self.num_blocks, self.block_size = num_blocks, block_size
        self.null_block = num_blocks
        slots = (num_blocks + 1) * block_size

        def allocate(config: LlamaConfig, kv_dtype: torch.dtype, scales: Tensor | None = None) -> _Entries:
            heads, dim = 2 * config.num_kv_heads, config.head_dim
            if kv_dtype not in kv_entries.LARGEST:
                kv = torch.empty(config.num_layers, slots, heads, dim, dtype=kv_dtype, device=device)
                return _Entries(kv, kv)
            size = kv_entries.slot_bytes(heads, dim, kv_dtype, scales)
            memory = torch.empty(config.num_layers, slots, size, dtype=torch.uint8, device=device)
            return _Entries(memory, kv_entries.kv_view(memory, heads, dim, kv_dtype))

        kv_dtypes = kv_dtypes or KVDtypes(dtype, dtype)
        self._target = allocate(target, kv_dtypes.target, target_scales)
        self._draft = allocate(head.llama, kv_dtypes.draft) if head else None
        self.target, self.draft = self._target.kv, None if self._draft is None else self._draft.kv
        width = head.feature_size if head else 0
        self.features = torch.empty(slots, width, dtype=dtype, device=device) if width else None
        self.target_layers = self.target.unbind(0)
        self.target_scales = None if target_scales is None else target_scales.to(device)
        self.parts = {"target": _by_block(self._target.memory, 1, block_size)}
        if self._draft is not None:
            self.parts["head"] = _by_block(self._draft.memory, 1, block_size)
        if self.features is not None:
            self.parts["features"] = _by_block(self.features, 0, block_size)
        moved = [self._target.memory] if self.features is None else [self._target.memory, self.features[None]]
        self._moves = kernels.entry_moves(moved)
        self.load: Callable[[Sequence[int], Sequence[int]], None] | None = None

    def null_block_table(self, num_tokens: int) -> list[int]:
        """Return a block table for `num_tokens` tokens that consists of the null block."""
        return [self.null_block] * ceil_div(num_tokens, self.block_size)

    def clear_null_block(self) -> None:
        """Fill the null block with zeros, so that reading it is defined."""
        for part in self.parts.values():
            part[self.null_block] = 0

    def store_features(self, slots: Tensor, features: Tensor) -> None:
        """Store `features` (`[rows, feature_size]`) at `slots` (int64 `[rows]`) for the head."""
        assert self.features is not None
        self.features.index_copy_(0, slots, features)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the target's entries and features from slots `source` to slots `target`, which may overlap."""
        self._moves(source, target)

    def commit(self, walk: Walk, slots: Tensor, targets: Sequence[TokenTargets]) -> None:
        """Do the same with the accepted nodes of a walk on the device, and write the new tokens.

        Args:
            slots: int64 `[rows, most]`, of the nodes of each row's tree.
            targets: where the next step reads new tokens.
        """
        commit = self.kernels.walks.commit
        assert commit is not None, f"the {self.kernels.name} kernels leave no walk on the device"
        commit(walk, DraftedEntries(self._target.memory, self.features, slots), targets)

    def apply_moves(self, moves: Sequence[BlockMove]) -> None:
        """Copy whole blocks of target, head and features in the order given."""
        for run in runs_of(moves):
            if run[0].is_load:
                assert self.load is not None
                self.load([move.source for move in run], [move.target for move in run])
                continue
            packet = Packet(self.target.device)
            sources, targets = packet.add_lists([move.source for move in run], [move.target for move in run])
            packet.send()
            features = None if self.features is None else self.features[None]
            draft = None if self._draft is None else self._draft.memory
            for layers in (self._target.memory, draft, features):
                if layers is not None:
                    self.kernels.copy_blocks(layers, sources, targets, self.block_size)


def _by_block(tensor: Tensor, dim: int, block_size: int) -> Tensor:
    """View the tensor as `[blocks, ...]`."""
    shape = (*tensor.shape[:dim], -1, block_size, *tensor.shape[dim + 1 :])
    return tensor.view(shape).movedim(dim, 0)


def runs_of(moves: Sequence[BlockMove]) -> Iterator[list[BlockMove]]:
    """Split moves into runs that are done at once: all of them load, or none; and none touches a block that an earlier
    one wrote.
    """
    run: list[BlockMove] = []
    written: set[int] = set()
    for move in moves:
        if run and (move.is_load != run[0].is_load or move.source in written or move.target in written):
            yield run
            run, written = [], set()
        run.append(move)
        written.add(move.target)
    if run:
        yield run


def entry_bytes(
    target: LlamaConfig,
    head: CachedHead | None,
    dtype: torch.dtype,
    kv_dtypes: KVDtypes | None = None,
    target_scales: Tensor | None = None,
) -> int:
    """Return how many bytes the cache holds of one token; see `KVCache`."""
    kv_dtypes = kv_dtypes or KVDtypes(dtype, dtype)

    def layers(config: LlamaConfig, kv_dtype: torch.dtype, scales: Tensor | None = None) -> int:
        return config.num_layers * kv_entries.slot_bytes(2 * config.num_kv_heads, config.head_dim, kv_dtype, scales)

    entries = layers(target, kv_dtypes.target, target_scales)
    entries += layers(head.llama, kv_dtypes.draft) if head else 0
    return entries + (head.feature_size if head else 0) * dtype.itemsize
