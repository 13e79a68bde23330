"""Cache entries in 8 bits: a slot holds the codes of its keys and values, and behind them a scale for each head.

A number is its code times its head's scale. Moves and copies handle a slot's bytes, so codes and scales stay together.
"""

import torch
from torch import Tensor

from specdec.kernels.integers import ceil_div

# By dtype of the codes: the largest number that a code stands for.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# As users name them.
KV_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Of scales: as many exponents as float32. Its rounding errors do not add to those of codes, which are made with the
# rounded scale.
SCALE_DTYPE = torch.bfloat16
# A slot begins at a multiple of it, so that a GPU reads 16 bytes at a time.
SLOT_ALIGNMENT = 16
# Heads of smaller scales are stored as zeros: the reciprocal would overflow.
LEAST_SCALE = 1e-30


def slot_bytes(heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a slot in one layer.

    Args:
        heads: of keys and values together.
        dtype: of the entries; one of `LARGEST`, or a dtype that arithmetic is done in.
    """
    if dtype not in LARGEST:
        return heads * head_dim * dtype.itemsize
    return ceil_div(heads * (head_dim + SCALE_DTYPE.itemsize), SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def kv_view(memory: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """View slots `[…, slots, slot_bytes]` of uint8 as their numbers or codes, `[…, slots, heads, head_dim]` of `dtype`.

    Codes do not fill their slot; the scales behind them are found through the strides (`scales_of`).
    """
    numbers = memory.narrow(-1, 0, heads * head_dim * dtype.itemsize).view(dtype)
    return numbers.as_strided((*numbers.shape[:-1], heads, head_dim), (*numbers.stride()[:-1], head_dim, 1))


def slots_of(kv: Tensor) -> Tensor:
    """Return the whole slots, `[slots, slot_bytes]` of uint8, of one layer's codes `[slots, heads, head_dim]`."""
    return kv.view(torch.uint8).as_strided((kv.shape[0], kv.stride(0)), (kv.stride(0), 1))


def scales_of(kv: Tensor) -> Tensor:
    """Return the scales `[slots, heads]` beside one layer's codes `[slots, heads, head_dim]`."""
    return _scales_in(slots_of(kv), kv)


def _scales_in(slots: Tensor, kv: Tensor) -> Tensor:
    heads, dim = kv.shape[1:]
    return slots.narrow(1, heads * dim, heads * SCALE_DTYPE.itemsize).view(SCALE_DTYPE)


def quantize(x: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of keys and values, rounded to nearest, ties to even, and the scales of their heads.

    A head with a number that is not finite gets the scale NaN, so that what reads it shows it.

    Args:
        x: `[…, heads, head_dim]`.
        dtype: of the codes.
        scales: `[heads]` from the checkpoint; larger numbers than a code can hold become the largest. None to measure
            each head: its largest magnitude becomes the largest code.

    Returns:
        Codes `[…, heads, head_dim]` and scales `[…, heads]` of `SCALE_DTYPE`.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    most, largest = exact.abs().amax(-1), LARGEST[dtype]
    measured = most / largest if scales is None else scales.to(exact.dtype).expand(most.shape)
    # Zero, or NaN.
    stored = (measured + most * 0).to(SCALE_DTYPE)
    stored = stored.masked_fill(stored < LEAST_SCALE, 0)
    numbers = exact / stored.to(exact.dtype).masked_fill(stored == 0, float("inf")).unsqueeze(-1)
    numbers = numbers.nan_to_num(0.0).clamp_(-largest, largest)
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype), stored


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
    codes, measured = quantize(numbers, kv.dtype, scales)
    kv.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    scales_of(kv).index_copy_(0, slots, measured)


def read(gathered: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of whole slots `[entries, slot_bytes]` of a cache of codes like `kv`."""
    heads, dim = kv.shape[1:]
    return dequantize(kv_view(gathered, heads, dim, kv.dtype), _scales_in(gathered, kv), dtype)
