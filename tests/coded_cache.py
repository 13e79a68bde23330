"""Caches of keys and values in 8 bits, for tests: made from numbers, and read back in float64."""

import torch
from torch import Tensor

from specdec.kernels.types import kv_entries

# Bytes that nothing has written: as stored scales and as 8-bit floats they are NaN.
UNWRITTEN = 255
CODES = list(kv_entries.LARGEST)
# What users may choose: as the arithmetic, and 8 bits of each kind.
KV_CACHE_DTYPES = ["auto", "int8", "fp8_e4m3", "fp8_e5m2"]


def empty_codes(
    slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, scales: Tensor | None = None
) -> Tensor:
    """Return one layer's cache that nothing has written.

    Args:
        scales: of the checkpoint; see `kv_entries.quantize`.
    """
    size = kv_entries.slot_bytes(heads, head_dim, dtype, scales)
    memory = torch.full((slots, size), UNWRITTEN, dtype=torch.uint8, device=device)
    return kv_entries.kv_view(memory, heads, head_dim, dtype)


def coded(numbers: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """Return a layer's cache `[slots, heads, head_dim]` of these numbers; slots of NaN are left unwritten."""
    kv = empty_codes(*numbers.shape, dtype, numbers.device, scales)
    slots = (~numbers[:, 0, 0].isnan()).nonzero()[:, 0]
    kv_entries.store(kv, slots, numbers[slots], scales)
    return kv


def numbers_of(kv: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return what a layer's cache stands for, float64 `[slots, heads, head_dim]`."""
    return kv_entries.read(kv_entries.slots_of(kv), kv, torch.float64, scales) if kv.dtype in CODES else kv.double()


def scales_in(kv: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return the scales of a layer's codes, float64 `[slots, heads]`, wherever they come from."""
    if kv_entries.stores_scales(kv.dtype, scales):
        return kv_entries.scales_of(kv).double()
    shared = torch.ones(kv.shape[1], device=kv.device) if scales is None else scales
    return shared.double().expand(kv.shape[:2])


def is_unwritten(kv: Tensor) -> bool:
    """Return whether nothing has written these slots of a layer's cache."""
    return bool((kv_entries.slots_of(kv) == UNWRITTEN).all())


def as_stored(numbers: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """Return numbers `[…, heads, head_dim]` as a cache of codes gives them back."""
    return kv_entries.dequantize(*kv_entries.quantize(numbers, dtype, scales), numbers.dtype)
