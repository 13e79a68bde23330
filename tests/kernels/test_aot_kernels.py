"""Every kernel but attention, compiled for the models that we name in figures, without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import triton

from specdec.kernels import (
    elementwise,
    gumbel_argmax,
    kv_codes,
    kv_copy,
    kv_entries,
    logit_filters,
    perturbed_top_k,
    quantized_linear,
    rotary_store,
    tree_walk,
)
from tests.kernels.aot import SHARED_LIMIT, Specialisation, compile_all
from tests.kernels.aot_shapes import Shape, shapes, typed

# Keys and values that are stored as they are.
PLAIN_ENTRIES = {"p_scale": None, "p_given": None, "CODES": 0, "LARGEST": 0.0, "LEAST_SCALE": kv_entries.LEAST_SCALE}


def layer(shape: Shape) -> Iterator[Specialisation]:
    """Yield the launches of a decoder layer, and the moves after a step."""
    label, dtype, warps = f"{shape.name} {shape.dtype}", shape.dtype, elementwise.num_warps
    norm = typed("p_x p_residual p_weight p_normed p_sum x_stride:i32 residual_stride:i32 eps:fp32", dtype)
    block = min(triton.next_power_of_2(shape.hidden), elementwise.MAX_BLOCK)
    for add in (False, True):
        sizes: dict[str, Any] = {"HIDDEN": shape.hidden, "BLOCK": block, "ADD": add}
        name = f"{'add_' * add}rms_norm {label}"
        yield Specialisation(name, elementwise.rms_norm_kernel, norm, sizes, warps(block))
    block = min(triton.next_power_of_2(shape.intermediate), elementwise.BLOCK_SIZE)
    yield Specialisation(
        f"silu_and_mul {label}",
        elementwise.silu_and_mul_kernel,
        typed("p_gate_up p_output stride:i32", dtype),
        {"SIZE": shape.intermediate, "BLOCK": block},
    )
    heads = shape.heads + 2 * shape.kv_heads
    block = min(triton.next_power_of_2(heads), rotary_store.BLOCK_SIZE // shape.dim)
    tensors = "p_qkv p_cos p_sin p_slots:*i64 p_query qkv_stride:i32 cos_stride:i32 sin_stride:i32 kv_slot:i32"
    sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.dim, "BLOCK": block, "BLOCK_DIM": shape.dim}
    kernel = rotary_store.rotary_store_kernel
    yield Specialisation(f"rotary_store {label}", kernel, typed(f"{tensors} p_kv", dtype), {**sizes, **PLAIN_ENTRIES})
    if shape.name != "8B":
        return
    for code, largest in kv_entries.LARGEST.items():
        kind = {**sizes, **PLAIN_ENTRIES, "CODES": kv_codes.CODES[code], "LARGEST": largest}
        signature = typed(f"{tensors} p_kv:*u8", dtype)
        stored = {"p_scale": "*bf16:16"} if kv_entries.stores_scales(code, None) else {}
        for source, scales in (("", stored), (", checkpoint's scales", {"p_given": "*fp32:16"})):
            left = {name: value for name, value in kind.items() if name not in scales}
            yield Specialisation(f"rotary_store {label}, {code}{source}", kernel, signature | scales, left)


def block_head(shape: Shape) -> Iterator[Specialisation]:
    """Yield the launches that block heads add: context rows have no queries, and keys are normed apart from a layer."""
    label, dtype = f"{shape.name} {shape.dtype}", shape.dtype
    block = min(triton.next_power_of_2(2 * shape.kv_heads), rotary_store.BLOCK_SIZE // shape.dim)
    tensors = "p_qkv p_cos p_sin p_kv p_slots:*i64 p_query qkv_stride:i32 cos_stride:i32 sin_stride:i32 kv_slot:i32"
    yield Specialisation(
        f"rotary_store of context rows {label}",
        rotary_store.rotary_store_kernel,
        typed(tensors, dtype),
        {
            **PLAIN_ENTRIES,
            "HEADS": 0,
            "KV_HEADS": shape.kv_heads,
            "DIM": shape.dim,
            "BLOCK": block,
            "BLOCK_DIM": shape.dim,
        },
    )
    yield Specialisation(
        f"rms_norm of keys {label}",
        elementwise.rms_norm_kernel,
        typed("p_x p_residual p_weight p_normed p_sum x_stride:i32 residual_stride:i32 eps:fp32", dtype),
        {"HIDDEN": shape.dim, "BLOCK": shape.dim, "ADD": False},
        elementwise.num_warps(shape.dim),
    )


def quantized(shape: Shape, name: str, group: int, scales: str, offsets: str | None) -> Iterator[Specialisation]:
    """Yield the products of a model whose weights are stored in a form."""
    weight = {"int8": 0, "uint4": 1, "fp8": 2}[name]
    signature = typed(f"p_x p_numbers:*u8 p_scales:*{scales} p_product rows:i32 x_stride:i32", shape.dtype)
    signature["rows"] = "i32"
    constexprs = {"p_bias": None, "HAS_BIAS": False, "KIND": weight, "OFFSETS": 0, "GROUP": group}
    if offsets is None:
        constexprs["p_offsets"] = None
    else:
        signature["p_offsets"] = f"*{offsets}:16"
        constexprs["OFFSETS"] = quantized_linear.ZEROS if offsets == "i8" else quantized_linear.MINIMA
    constexprs |= {"BLOCK_ROWS": quantized_linear.BLOCK_ROWS, "BLOCK_COLUMNS": quantized_linear.BLOCK_COLUMNS}
    constexprs["BLOCK_INPUTS"] = min(group, quantized_linear.MAX_BLOCK_BYTES // (4 if shape.dtype == "fp32" else 2))
    for outputs, inputs in {(2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)}:
        yield Specialisation(
            f"quantized_linear {name} {group} {shape.name} {shape.dtype} {outputs}",
            quantized_linear.quantized_linear_kernel,
            signature,
            {**constexprs, "OUTPUTS": outputs, "INPUTS": inputs},
        )


def moves(dtype: str, stride: str) -> Specialisation:
    """The same for all models, but for the cache's size."""
    signature = typed(f"p_kv p_source:*i64 p_target:*i64 layer_stride:{stride} size:i32", dtype)
    constexprs = {"MOVES": kv_copy.MOVES_AT_ONCE, "CHUNK": kv_copy.CHUNK_SIZE}
    return Specialisation(f"move {dtype} {stride}", kv_copy.move_kernel, {**signature, "num_moves": "i32"}, constexprs)


def sampling(vocab: int, dtype: str) -> Iterator[Specialisation]:
    """Processed scores are float32; a batch that is greedy altogether has the model's own."""
    label = f"{vocab} {dtype}"
    rows = typed("p_scores p_seeds:*i64 p_sample_indices:*i64 p_positions:*i64 p_best:*i64 stride:i32", dtype)
    # Flags are bytes, and every row has one.
    rows["p_sampled"] = "*i1:16"
    block = gumbel_argmax.BLOCK_SIZE
    sizes = {"VOCAB": vocab, "BLOCK": block}
    yield Specialisation(f"gumbel_argmax {label}", gumbel_argmax.best_of_part_kernel, rows, sizes)
    block = perturbed_top_k.BLOCK_SIZE
    rows = {**rows, "p_sums": "*fp32:16", "token_stride": "i32:16", "k": "i32", "stream": "i32", "lane": "i32"}
    sizes = {"COLUMNS": vocab, "BLOCK": block, "p_tokens": None}
    kernel = perturbed_top_k.top_k_of_part_kernel
    yield Specialisation(f"perturbed_top_k {label}", kernel, rows, sizes)
    # A trimmed vocabulary, and candidates of each row's own.
    for columns in (32000, 256):
        sizes = {"COLUMNS": columns, "BLOCK": min(perturbed_top_k.OWN_BLOCK_SIZE, columns)}
        own = {**rows, "p_tokens": "*i64:16"}
        yield Specialisation(f"perturbed_top_k of {columns} tokens {dtype}", kernel, own, sizes)


def second_passes(vocab: int) -> Iterator[Specialisation]:
    parts = triton.cdiv(vocab, gumbel_argmax.BLOCK_SIZE)
    signature = typed("p_best:*i64 p_tokens:*i64", "")
    sizes = {"PARTS": parts, "BLOCK": triton.next_power_of_2(parts)}
    yield Specialisation(
        f"gumbel_argmax, second pass {vocab}", gumbel_argmax.best_of_parts_kernel, signature, sizes, num_warps=1
    )
    parts = triton.cdiv(vocab, perturbed_top_k.BLOCK_SIZE)
    signature = typed("p_best:*i64 p_sums:*fp32 p_tokens:*i64 p_scores:*fp32 p_log_sum_exp:*fp32", "")
    for k in (8, perturbed_top_k.MAX_K):
        block = triton.next_power_of_2(parts * k)
        yield Specialisation(
            f"perturbed_top_k, second pass {vocab} k={k}",
            perturbed_top_k.top_k_of_parts_kernel,
            {**signature, "k": "i32"},
            {"PARTS": parts, "BLOCK": block, "BLOCK_PARTS": triton.next_power_of_2(parts)},
            min(8, max(1, block // 256)),
        )


def filters(vocab: int) -> Specialisation:
    """Return the filters of a target's vocabulary, a trimmed one, or each row's own candidates."""
    signature = {**typed("p_scores p_limits", "fp32"), "stride": "i32:16"}
    block = min(logit_filters.BLOCK_SIZE, triton.next_power_of_2(vocab))
    sizes = {"VOCAB": vocab, "BLOCK": block, "PIVOTS": logit_filters.PIVOTS}
    name, warps = f"filter_logits {vocab}", logit_filters.num_warps(block)
    return Specialisation(name, logit_filters.filter_logits_kernel, signature, sizes, warps)


def walks() -> Iterator[Specialisation]:
    names = "p_emitted p_tokens p_parents p_starts p_paths p_lengths p_next_tokens"
    signature = {**typed(names, "i64"), "max_depth": "i32"}
    for nodes in (64, 1024):
        sizes = {"BLOCK": nodes, "BLOCK_DEPTH": 8}
        yield Specialisation(f"tree_walk {nodes} nodes", tree_walk.tree_walk_kernel, signature, sizes, num_warps=1)


def specialisations() -> list[Specialisation]:
    """Return all specialisations, the first of equal ones."""
    specs = [spec for shape in shapes() for spec in layer(shape)]
    specs += [spec for shape in shapes() if shape.name in ("8B", "demo") for spec in block_head(shape)]
    for shape in (shape for shape in shapes() if shape.name == "8B" or shape.dtype == "fp32"):
        specs += quantized(shape, "uint4", 128, "fp16", "i8")
        specs += quantized(shape, "uint4", 32, "fp32", "fp32")
        specs += quantized(shape, "int8", 32, "fp16", None)
        specs += quantized(shape, "fp8", 128, "fp32", None)
    specs += [moves("bf16", "i64"), moves("bf16", "i32"), moves("fp32", "i32"), moves("u8", "i64")]
    specs += [spec for vocab, dtype in ((128256, "fp32"), (128256, "bf16")) for spec in sampling(vocab, dtype)]
    return [
        *specs,
        *second_passes(128256),
        *second_passes(shapes()[-1].vocab),
        *walks(),
        *map(filters, (128256, 32000, shapes()[-1].vocab, 256)),
    ]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_kernels_fit_a_block_without_spilling(arch: int) -> None:
    compiled = compile_all(f"{__name__}:specialisations", arch)
    assert len(compiled) > 20
    assert {name: found.spills for name, found in compiled.items() if found.spills} == {}
    assert all(found.shared <= SHARED_LIMIT[arch] for found in compiled.values())
