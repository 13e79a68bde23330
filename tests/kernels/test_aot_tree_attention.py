"""Registers and shared memory of the attention kernels, compiled for an H100 and an A100 without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.kernels.attention_plan import CONFIGS, HOPPER_CONFIGS, STAGES, Config
from specdec.kernels.kv_codes import CODE_UNITS, CODES
from specdec.kernels.kv_entries import LARGEST, stores_scales
from specdec.kernels.tree_attention import JOINED_PARTS, join_parts_kernel, tree_attention_kernel
from tests.kernels.aot import SHARED_LIMIT, Specialisation, compile_all, table

# Name, Triton's name of the dtype, bytes of a number, query heads per KV head, head_dim, words of ancestor bits. The
# demo model's shape is also its head's. With the second word, kernels take the most; the first is all that trees of
# 64 nodes need.
MODELS = [
    ("llama-3.1-8b", "bf16", 2, 4, 128, 1),
    ("llama-3.1-8b", "bf16", 2, 4, 128, 2),
    ("baichuan-13b", "bf16", 2, 1, 128, 2),
    ("llama-3.2-1b", "bf16", 2, 4, 64, 2),
    ("demo", "bf16", 2, 2, 64, 2),
    ("demo", "fp32", 4, 2, 64, 2),
]
# The model and words that are compiled with one KV head per rank too: Triton makes a constant of an integer of 1.
MULTI_QUERY = ("llama-3.1-8b", 1)
# Model and words whose kernels for layers with a window, and for entries in 8 bits, are compiled too.
WINDOWED = ("llama-3.1-8b", 2)
# The model with ALiBi, whose low tiles are not compiled: they have registers left.
SLOPED, LOW = "baichuan-13b", 16
# Bytes that they may spill: a window and slopes add two numbers of each row, and int8 the scales that slots store.
ROW_SPILLS = 8
SCALE_SPILLS = 56
TABLES = {"p_item": "*i32:16", "p_tables": "*i64:16", "p_visible": "*i64:16", "p_ancestors": "*i64:16"}
STRIDES = {"q_row": "i32:16", "q_head": "i32:16", "kv_slot": "i32:16", "kv_head": "i32:16", "table_row": "i32"}
PARTS = {"p_part": "*fp32:16", "p_log_sum": "*fp32:16", "kv_heads": "i32"}


def specialisations(configs: dict[tuple[int, int], dict[int, Config]]) -> list[Specialisation]:
    found = []
    for model, dtype, size, group, dim, words in MODELS:
        pointer = f"*{dtype}:16"
        for height, config in configs[size, dim].items():
            if model == SLOPED and height == LOW:
                continue
            shape = {"GROUP": group, "HEAD_DIM": dim, "BLOCK_M": height, "BLOCK_D": dim}
            numbers = {"p_query": pointer, "p_kv": pointer, "p_output": pointer, "scale": "fp32", "window": "i32"}
            kinds: list[tuple[bool, torch.dtype | None, bool]] = [(False, None, False)]
            if (model, words) == WINDOWED:
                kinds += [(True, None, False), *((False, code, False) for code in LARGEST)]
                # A checkpoint's scales are outside the loops, but where each slot stores its own without them.
                kinds += [(False, torch.int8, True), (False, torch.float8_e4m3fn, True)]
            for windowed, code, given in kinds:
                entries: dict[str, Any] = {"CODES": CODES.get(code, 0), "UNIT": CODE_UNITS.get(code, 1.0)}
                scales = {"p_given": "*fp32:16"} if given else {}
                if code is not None:
                    numbers = {**numbers, "p_kv": "*u8:16"}
                    if stores_scales(code, None) and not given:
                        scales = {"p_scale": "*bf16:16"}
                entries |= {name: None for name in ("p_scale", "p_given") if name not in scales}
                entries |= {"SLOPED": model == SLOPED} | ({} if model == SLOPED else {"p_slope": None})
                slopes = {"p_slope": "*fp32:16"} if model == SLOPED else {}
                attention = Specialisation(
                    f"{model} {dtype}, {height} rows, {words} words{', window' if windowed else ''}"
                    f"{', slopes' if model == SLOPED else ''}{f', {code}' if code else ''}{', its scales' * given}",
                    tree_attention_kernel,
                    numbers | scales | slopes | PARTS | TABLES | STRIDES,
                    {
                        **shape,
                        **entries,
                        "WINDOWED": windowed,
                        "WORDS": words,
                        "BLOCK_SIZE": 16,
                        "BLOCK_N": config.keys,
                    },
                    config.warps,
                    STAGES,
                )
                found.append(attention)
                if (model, words) == MULTI_QUERY:
                    found.append(with_one_kv_head(attention))
        if words == 2 and model != SLOPED:
            join = Specialisation(
                f"{model} {dtype}, join",
                join_parts_kernel,
                {"p_output": pointer, "p_join": "*i32:16"} | PARTS,
                {**shape, "BLOCK_P": JOINED_PARTS},
            )
            found += [join, with_one_kv_head(join)]
    return found


def with_one_kv_head(spec: Specialisation) -> Specialisation:
    signature = {name: kind for name, kind in spec.signature.items() if name != "kv_heads"}
    name, constexprs = f"{spec.name}, one KV head", {**spec.constexprs, "kv_heads": 1}
    return replace(spec, name=name, signature=signature, constexprs=constexprs)


def hopper() -> list[Specialisation]:
    return specialisations(HOPPER_CONFIGS)


def ampere() -> list[Specialisation]:
    return specialisations(CONFIGS)


@pytest.mark.parametrize(("arch", "which"), [(90, "hopper"), (80, "ampere")])
def test_nothing_spills_and_blocks_fit(arch: int, which: str) -> None:
    compiled = compile_all(f"tests.kernels.test_aot_tree_attention:{which}", arch)
    print(f"\n{table(compiled, arch)}")
    spills = {name: found.spills for name, found in compiled.items() if found.spills}
    allowed = {
        name: ("window" in name or SLOPED in name) * ROW_SPILLS + name.endswith("torch.int8") * SCALE_SPILLS
        for name in spills
    }
    assert not {name: count for name, count in spills.items() if count > allowed[name]}
    assert max(found.shared for found in compiled.values()) <= SHARED_LIMIT[arch]
