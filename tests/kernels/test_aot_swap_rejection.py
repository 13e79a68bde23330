"""Block swaps and the walks that weigh p against q, compiled for the models that we name in figures, without a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from specdec.kernels import block_walk, kv_copy, rejection_walk
from tests.kernels.aot import SHARED_LIMIT, Specialisation, compile_all

DEMO = Path(__file__).parents[2] / "specdec" / "demo" / "target" / "config.json"
# Dtype of the scores, most nodes of a tree, and whether they were drawn from a q.
KINDS = [("fp32", 64, False), ("fp32", 64, True), ("bf16", 64, True), ("fp32", 256, False), ("fp32", 256, True)]


def vocabularies() -> dict[str, int]:
    """Llama-3.1-8B and Llama-3.2-1B share theirs."""
    return {"Llama-3": 128256, "demo": json.loads(DEMO.read_text(encoding="utf-8"))["vocab_size"]}


def swaps() -> Iterator[Specialisation]:
    """The sizes of a model are run-time numbers: 8B, 1B and demo differ in the dtype, and in where 2**31 is passed."""
    for dtype, strides in (("bf16", "i32"), ("bf16", "i64"), ("fp16", "i32"), ("fp32", "i32"), ("u8", "i32")):
        signature = {
            "p_source": f"*{dtype}:16",
            "p_target": f"*{dtype}:16",
            "p_source_blocks": "*i64:16",
            "p_target_blocks": "*i64:16",
            "source_block": "i32:16",
            "source_layer": f"{strides}:16",
            "target_block": "i32:16",
            "target_layer": "i32:16",
            "size": "i32:16",
        }
        yield Specialisation(
            f"swap {dtype} {strides}", kv_copy.copy_kernel, signature, {"CHUNK": kv_copy.SWAP_CHUNK_SIZE}
        )


def walks() -> Iterator[Specialisation]:
    pointers = "tokens parents starts seeds sample_indices positions paths lengths next_tokens"
    signature = {f"p_{name}": "*i64:16" for name in pointers.split()}
    signature |= {"p_sampled": "*i1:16", "scores_stride": "i32:16", "draft_stride": "i32:16", "max_depth": "i32"}
    for model, vocab in vocabularies().items():
        for dtype, nodes, has_draft in KINDS:
            sizes = {
                "HAS_DRAFT": has_draft,
                "VOCAB": vocab,
                "BLOCK": min(triton.next_power_of_2(vocab), rejection_walk.BLOCK_SIZE),
                "NODES": nodes,
                "BLOCK_DEPTH": 8,
            }
            types = {**signature, "p_scores": f"*{dtype}:16"}
            if has_draft:
                types |= {"p_draft": "*fp32:16", "p_draft_rows": "*i64:16"}
            else:
                sizes |= {"p_draft": None, "p_draft_rows": None}
            yield Specialisation(
                f"rejection_walk {model} {dtype} {nodes} nodes{' q' * has_draft}",
                rejection_walk.rejection_walk_kernel,
                types,
                sizes,
                rejection_walk.NUM_WARPS,
            )


def block_walks() -> Iterator[Specialisation]:
    pointers = "draft_rows tokens starts seeds sample_indices positions paths lengths next_tokens"
    signature = {f"p_{name}": "*i64:16" for name in pointers.split()} | {"p_draft": "*fp32:16"}
    signature |= {"scores_stride": "i32:16", "draft_stride": "i32:16", "max_depth": "i32"}
    for model, vocab in vocabularies().items():
        for dtype, depth in (("fp32", 8), ("bf16", 8), ("fp32", 256)):
            block = min(triton.next_power_of_2(vocab), block_walk.BLOCK_SIZE)
            yield Specialisation(
                f"block_walk {model} {dtype} {depth} prefixes",
                block_walk.block_walk_kernel,
                {**signature, "p_scores": f"*{dtype}:16"},
                {"VOCAB": vocab, "BLOCK": block, "BLOCK_DEPTH": depth},
                block_walk.NUM_WARPS,
            )


def specialisations() -> list[Specialisation]:
    return [*swaps(), *walks(), *block_walks()]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_kernels_fit_a_block_without_spilling(arch: int) -> None:
    compiled = compile_all(f"{__name__}:specialisations", arch)
    assert len(compiled) == 5 + 2 * len(KINDS) + 6
    assert {name: found.spills for name, found in compiled.items() if found.spills} == {}
    assert all(found.shared <= SHARED_LIMIT[arch] for found in compiled.values())
