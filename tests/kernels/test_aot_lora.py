"""Adapters beside products, compiled for the models that we name in figures, without a GPU."""

from collections.abc import Iterator

import pytest

from specdec.kernels import grouped_lora
from specdec.kernels.adapters import TILE_COLUMNS, TILE_ROWS
from tests.kernels.aot import SHARED_LIMIT, Specialisation, compile_all
from tests.kernels.aot_shapes import Shape, shapes, typed


def products(shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, parts, inputs and columns of a layer's products."""
    heads = shape.heads * shape.dim
    yield "qkv", 3, shape.hidden, heads + 2 * shape.kv_heads * shape.dim
    yield "output", 1, heads, shape.hidden
    yield "gate_up", 2, shape.hidden, 2 * shape.intermediate
    yield "down", 1, shape.intermediate, shape.hidden


def specialisations() -> list[Specialisation]:
    found = []
    blocks = {"BLOCK_ROWS": TILE_ROWS, "BLOCK_RANK": grouped_lora.BLOCK_RANK}
    for shape in (shapes()[1], shapes()[-1]):
        for rank in (16, 256) if shape.dtype == "bf16" else (16,):
            for name, parts, inputs, columns in products(shape):
                label = f"{shape.name} {shape.dtype} {name} rank {rank}"
                tensors = "p_x p_down p_low p_ranks:*i32 p_order:*i64 p_tiles:*i32 x_stride:i32"
                sizes = {"PARTS": parts, "RANK": rank, **blocks}
                found.append(
                    Specialisation(
                        f"lora low {label}",
                        grouped_lora.low_kernel,
                        typed(tensors, shape.dtype),
                        {**sizes, "INPUTS": inputs, "BLOCK_INPUTS": grouped_lora.BLOCK_INPUTS},
                    )
                )
                tensors = "p_low p_up p_out p_ranks:*i32 p_columns:*i32 p_order:*i64 p_tiles:*i32 out_stride:i32"
                found.append(
                    Specialisation(
                        f"lora add {label}",
                        grouped_lora.add_kernel,
                        typed(tensors, shape.dtype),
                        {**sizes, "COLUMNS": columns, "BLOCK_COLUMNS": TILE_COLUMNS},
                    )
                )
    return found


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_variant_compiles(arch: int) -> None:
    """For A100 and H100, within their shared memory, without a register in memory."""
    compiled = compile_all("tests.kernels.test_aot_lora:specialisations", arch)
    assert len(compiled) == len(specialisations())
    for name, found in compiled.items():
        assert found.shared <= SHARED_LIMIT[arch], name
        assert found.spills == 0, name
