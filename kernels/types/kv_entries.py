"""Cache entries in 8 bits: a slot holds the codes of its keys and values.

A number is its code times its head's scale. The scales are the checkpoint's, one for each head. Without them, 8-bit
floats have the scale 1, as in vLLM, and whole numbers a scale for each head of a slot, stored behind its codes. Moves
and copies handle a slot's bytes, so codes and scales stay together.
"""

import torch
from torch import Tensor

from specdec.kernels.types.integers import ceil_div

# By dtype of the codes: the largest number that a code stands for.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# As users name them.
KV_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Of stored scales: as many exponents as float32. Its rounding errors do not add to those of codes, which are made with
# the rounded scale.
SCALE_DTYPE = torch.bfloat16
# A slot with scales begins at a multiple of it, so that a GPU reads 16 bytes at a time.
SLOT_ALIGNMENT = 16
# Heads of smaller scales are stored as zeros: the reciprocal would overflow.
LEAST_SCALE = 1e-30


def stores_scales(dtype: torch.dtype, scales: Tensor | None) -> bool:
    """Return whether slots hold scales beside their codes.

    Args:
        dtype: of the entries.
        scales: of the checkpoint; None where it has none for this dtype.
    """
    return dtype == torch.int8 and scales is None


def slot_bytes(heads: int, head_dim: int, dtype: torch.dtype, scales: Tensor | None = None) -> int:
    """Return the bytes of a slot in one layer.

    Args:
        heads: of keys and values together.
        dtype: of the entries; one of `LARGEST`, or a dtype that arithmetic is done in.
        scales: of the checkpoint, or None.
    """
    if not stores_scales(dtype, scales):
        return heads * head_dim * dtype.itemsize
    return ceil_div(heads * (head_dim + SCALE_DTYPE.itemsize), SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def kv_view(memory: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """View slots `[…, slots, slot_bytes]` of uint8 as their numbers or codes, `[…, slots, heads, head_dim]` of `dtype`.

    Where slots store scales, the codes do not fill them; the scales are found through the strides (`scales_of`).
    """
    numbers = memory.narrow(-1, 0, heads * head_dim * dtype.itemsize).view(dtype)
    return numbers.as_strided((*numbers.shape[:-1], heads, head_dim), (*numbers.stride()[:-1], head_dim, 1))


def slots_of(kv: Tensor) -> Tensor:
    """Return the whole slots, `[slots, slot_bytes]` of uint8, of one layer's codes `[slots, heads, head_dim]`."""
    return kv.view(torch.uint8).as_strided((kv.shape[0], kv.stride(0)), (kv.stride(0), 1))


def scales_of(kv: Tensor) -> Tensor:
    """Return the scales `[slots, heads]` stored beside one layer's codes `[slots, heads, head_dim]`."""
    return _scales_in(slots_of(kv), kv)


def _scales_in(slots: Tensor, kv: Tensor) -> Tensor:
    heads, dim = kv.shape[1:]
    return slots.narrow(1, heads * dim, heads * SCALE_DTYPE.itemsize).view(SCALE_DTYPE)


def quantize(x: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of keys and values, rounded to nearest, ties to even, and the scales of their heads.

    Numbers that are too large become the largest code. A head with a number that is not finite gets the scale NaN if
    slots store their scales, so that what reads it shows it; elsewhere NaN becomes 0.

    Args:
        x: `[…, heads, head_dim]`.
        dtype: of the codes.
        scales: `[heads]` from the checkpoint. None for 1, or if slots store their scales, to measure each head: its
            largest magnitude becomes the largest code.

    Returns:
        Codes `[…, heads, head_dim]` and scales `[…, heads]`, which are of `SCALE_DTYPE` if measured.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    most, largest = exact.abs().amax(-1), LARGEST[dtype]
    if stores_scales(dtype, scales):
        # Zero, or NaN.
        used = (most / largest + most * 0).to(SCALE_DTYPE)
        used = used.masked_fill(used < LEAST_SCALE, 0)
    else:
        used = (torch.ones_like(most) if scales is None else scales).expand(most.shape)
    numbers = exact / used.to(exact.dtype).masked_fill(used == 0, float("inf")).unsqueeze(-1)
    numbers = numbers.nan_to_num(0.0).clamp_(-largest, largest)
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype), used


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers `[…, heads, head_dim]` that codes and scales `[…, heads]` stand for."""
    return codes.to(dtype) * scales.to(dtype).unsqueeze(-1)


def store(kv: Tensor, slots: Tensor, numbers: Tensor, scales: Tensor | None = None) -> None:
    """Store keys and values `[rows, heads, head_dim]` at slots (int64 `[rows]`) of one layer's cache.

    Args:
        kv: `[slots, heads, head_dim]`; quantised if its dtype is that of codes.
        scales: see `quantize`.
    """
    if kv.dtype not in LARGEST:
        kv.index_copy_(0, slots, numbers)
        return
    codes, used = quantize(numbers, kv.dtype, scales)
    kv.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    if stores_scales(kv.dtype, scales):
        scales_of(kv).index_copy_(0, slots, used)


def read(gathered: Tensor, kv: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """Return the numbers of whole slots `[entries, slot_bytes]` of a cache of codes like `kv`.

    Args:
        scales: see `quantize`.
    """
    heads, dim = kv.shape[1:]
    codes = kv_view(gathered, heads, dim, kv.dtype)
    if stores_scales(kv.dtype, scales):
        return dequantize(codes, _scales_in(gathered, kv), dtype)
    return codes.to(dtype) if scales is None else dequantize(codes, scales, dtype)
