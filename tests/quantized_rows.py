"""Random quantised weights of every form, and blocks of GGUF files, with numbers of the sizes that weights have."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.types.quantized_tensor import NESTED_INPUTS, Nested, NumberKind, OffsetKind, QuantizedRows

# Bytes of a block of each GGUF format, its inputs, and where its float16 lie.
GGUF_BLOCKS = {
    "Q8_0": (34, 32, (0,)),
    "Q4_0": (18, 32, (0,)),
    "Q4_1": (20, 32, (0, 2)),
    "Q4_K": (144, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
}
# The largest numbers of each format, so that weights are about as large as the float16 says times `size`.
LARGEST = {"Q8_0": 127, "Q4_0": 8, "Q4_1": 15, "Q4_K": 63 * 15, "Q6_K": 127 * 32}


def gguf_blocks(kind: str, rows: int, inputs: int, size: float = 1.0, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random blocks, uint8 `[rows, bytes]`, of weights up to `size` or a few times that."""
    rng = np.random.default_rng(seed)
    length, own, halves = GGUF_BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows, inputs // own, length), dtype=np.uint8)
    for place in halves:
        floats = rng.normal(size=(rows, inputs // own, 1)) * size / LARGEST[kind]
        blocks[..., place : place + 2] = floats.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def random_rows(
    kind: NumberKind,
    rows: int,
    inputs: int,
    group: int,
    offset_kind: OffsetKind | None = None,
    scale_dtype: torch.dtype = torch.float16,
    nested: bool = False,
    seed: int = 0,
) -> QuantizedRows:
    """Return a random weight of a form."""
    generator = torch.Generator().manual_seed(seed)

    def whole(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most + 1, shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "uint4":
        numbers = whole(0, 255, rows, -(-inputs // 2)).to(torch.uint8)
    elif kind == "int8":
        numbers = whole(-128, 127, rows, inputs).to(torch.int8)
    else:
        numbers = (normal(rows, inputs) * 3).to(torch.float8_e4m3fn)
    groups = -(-inputs // group)
    scales, offsets, factors = normal(rows, groups).to(scale_dtype), None, None
    if offset_kind == "minima":
        offsets = normal(rows, groups).to(scale_dtype)
    elif offset_kind == "zeros":
        offsets = whole(-16, 16, rows, groups).to(torch.int8)
    if nested:
        supers = -(-inputs // NESTED_INPUTS)
        scales = whole(-100, 100, rows, groups).to(torch.int8)
        factors = Nested(normal(rows, supers).half(), None)
        if offset_kind == "minima":
            offsets = whole(0, 63, rows, groups).to(torch.int8)
            factors = Nested(factors.scales, normal(rows, supers).half())
    return QuantizedRows(kind, inputs, numbers, group, scales, offsets, offset_kind or "zeros", factors)


@st.composite
def quantized_rows(draw: st.DrawFn, rows: int | None = None, inputs: int | None = None) -> QuantizedRows:
    """Weights of every form that a checkpoint may have."""
    nested = draw(st.booleans())
    kind: NumberKind = draw(st.sampled_from(["int8", "uint4"] if nested else ["int8", "uint4", "fp8"]))
    offsets: list[OffsetKind | None] = [None, "minima"] if nested else [None, "minima", "zeros"]
    inputs = inputs or draw(st.integers(1, 300))
    return random_rows(
        kind,
        rows or draw(st.integers(1, 60)),
        inputs,
        draw(st.sampled_from([16, 32, 64, 128] if nested else [8, 16, 24, 32, 128, 400])),
        None if kind == "fp8" else draw(st.sampled_from(offsets)),
        draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        nested,
        draw(st.integers(0, 100)),
    )
