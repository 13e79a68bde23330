"""Launches of every kernel for the models that we name in figures, by the functions that launch them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from specdec.kernels.triton import tree_attention
from specdec.kernels.triton.accepted import commit
from specdec.kernels.triton.attention_plan import AttentionGeometry, Chip
from specdec.kernels.triton.coupled_walk import coupled_walk
from specdec.kernels.triton.elementwise import add_rms_norm, rms_norm, silu_and_mul
from specdec.kernels.triton.grouped_lora import grouped_lora
from specdec.kernels.triton.gumbel_argmax import gumbel_argmax
from specdec.kernels.triton.kv_copy import copy_between, move_kv
from specdec.kernels.triton.logit_filters import filter_logits
from specdec.kernels.triton.perturbed_top_k import MAX_K, perturbed_top_k
from specdec.kernels.triton.quantized_linear import quantized_linear
from specdec.kernels.triton.rejection_walk import rejection_walk
from specdec.kernels.triton.rotary_store import rotary_store
from specdec.kernels.triton.tree_search import best_nodes, next_frontier
from specdec.kernels.types.adapters import AdapterRows, StackedLowRank
from specdec.kernels.types.kv_entries import LARGEST, kv_view, slot_bytes
from specdec.kernels.types.quantized_tensor import NumberKind, OffsetKind, QuantizedRows
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree_search import SearchedLevels
from specdec.kernels.types.types import DraftedEntries, DraftProbs, HeadNorms, NoiseColumns, PackedTrees, TopK, Walk
from tests.triton_launches import Launch, recorded_launches

DEMO = Path(__file__).parents[2] / "specdec" / "demo" / "target" / "config.json"
LLAMA_3_VOCAB = 128256
BLOCK_SIZE = 16
# So long that few rows over it are cut into parts, which are then joined.
CONTEXT = 4096
# Rows of a step: one, any number, and a multiple of 16.
ROWS = (1, 7, 64)
# Slots of a cache: its layers are less than 2**31 numbers apart, and more.
SLOTS = (1 << 10, 1 << 20)


class Model(NamedTuple):
    """Sizes of a model, or of the part that a rank has, and the dtype it is served in."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16


LARGE = Model("405B", 16384, 53248, 128, 8, 128, LLAMA_3_VOCAB)
LLAMA_8B = Model("8B", 4096, 14336, 32, 8, 128, LLAMA_3_VOCAB)
# As of multi-query models.
ONE_KV_HEAD = LLAMA_8B._replace(name="8B on 8 ranks", intermediate=1792, heads=4, kv_heads=1)
LLAMA_1B = Model("1B", 2048, 8192, 32, 8, 64, LLAMA_3_VOCAB)
BAICHUAN = Model("Baichuan-13B", 5120, 13696, 40, 40, 128, 64000)


def demo() -> Model:
    config = json.loads(DEMO.read_text(encoding="utf-8"))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return Model("demo", *(config[name] for name in names))


def models() -> list[Model]:
    return [LLAMA_8B, ONE_KV_HEAD, LLAMA_1B, demo(), demo()._replace(dtype=torch.float32)]


def model_launches(arch: int) -> list[Launch]:
    """Return the distinct launches on GPUs of a compute capability (80, 90). Call it where kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch, recorded_launches(run=False) as found:
        patch.setattr(tree_attention, "chip_of", lambda _: Chip(132, is_hopper=arch == 90))
        for model in models():
            _layer(model)
            _attention(model, words=(1, 2) if model.dim == LLAMA_8B.dim else (2,))
        # The only one whose norms take a loop.
        _norms(LARGE)
        _attention(LLAMA_8B, window=4096)
        _attention(BAICHUAN, slopes=True)
        for code in LARGEST:
            for scales in (None, torch.empty(2 * LLAMA_8B.kv_heads)):
                _attention(LLAMA_8B, code=code, scales=scales)
                _rotary(LLAMA_8B, code, scales)
        for model in (LLAMA_8B, demo()):
            _block_head(model)
        for model in (LLAMA_8B, LLAMA_1B, demo()._replace(dtype=torch.float32)):
            _quantized(model)
        for model in (LLAMA_8B, demo()._replace(dtype=torch.float32)):
            _adapters(model, 16)
        _adapters(LLAMA_8B, 256)
        _moves()
        for vocab in (LLAMA_3_VOCAB, demo().vocab):
            _sampling(vocab)
        for vocab in (LLAMA_3_VOCAB, 151936, 49152, 32000, demo().vocab, 256):
            filter_logits(torch.empty(2, vocab), torch.empty(2, 3))
    return list(found.values())


def _layer(model: Model) -> None:
    _norms(model)
    silu_and_mul(torch.empty(2, 2 * model.intermediate, dtype=model.dtype))
    _rotary(model)
    _rotary(model, normed=True)


def _norms(model: Model) -> None:
    x = torch.empty(2, model.hidden, dtype=model.dtype)
    rms_norm(x, x[0], 1e-5)
    add_rms_norm(x, x, x[0], 1e-5)


def _cache(model: Model, slots: int, code: torch.dtype | None = None, scales: Tensor | None = None) -> Tensor:
    """Return the entries of a layer."""
    heads, dtype = 2 * model.kv_heads, code or model.dtype
    memory = torch.empty(slots, slot_bytes(heads, model.dim, dtype, scales), dtype=torch.uint8)
    return kv_view(memory, heads, model.dim, dtype)


def _rotary(
    model: Model,
    code: torch.dtype | None = None,
    scales: Tensor | None = None,
    *,
    context: bool = False,
    normed: bool = False,
) -> None:
    """Launch it for queries, keys and values, or for keys and values of context rows, which have no queries."""
    heads = 0 if context else model.heads
    qkv = torch.empty(2, heads + 2 * model.kv_heads, model.dim, dtype=model.dtype)
    cos, sin = torch.empty(2, 1, 2 * model.dim, dtype=model.dtype).chunk(2, -1)
    norms = HeadNorms(qkv[0, 0], qkv[0, 0], 1e-6) if normed else None
    rotary_store(qkv, cos, sin, _cache(model, 8, code, scales), torch.arange(2), heads, scales, norms)


def _block_head(model: Model) -> None:
    """Block heads norm keys apart from a layer, and store those of context rows."""
    _rotary(model, context=True)
    keys = torch.empty(2, model.dim, dtype=model.dtype)
    rms_norm(keys, keys[0], 1e-6)


def _attention(
    model: Model,
    *,
    words: Sequence[int] = (2,),
    window: int = 0,
    slopes: bool = False,
    code: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> None:
    """Launch it with tiles of every height, for trees of so many words of nodes."""
    group = model.heads // model.kv_heads
    sizes = model.dtype.itemsize, triton.next_power_of_2(model.dim), group, model.kv_heads
    configs = tree_attention.configs_of(AttentionGeometry(*sizes), tree_attention.chip_of(torch.device("cpu")))
    for height in configs:
        count = height // group
        for size in words:
            rows = RaggedRows(
                query_lens=[count],
                lengths=[CONTEXT],
                tree_starts=[CONTEXT],
                block_tables=torch.empty(1, CONTEXT // BLOCK_SIZE + 1, dtype=torch.int64),
                visible=torch.empty(count, dtype=torch.int64),
                ancestors=torch.empty(count, size, dtype=torch.int64),
                block_size=BLOCK_SIZE,
            )
            query = torch.empty(count, model.heads, model.dim, dtype=model.dtype)
            bias = torch.empty(model.heads) if slopes else None
            tree_attention.tree_attention(query, _cache(model, 8, code, scales), rows, 1.0, window, bias, scales)
            assert [(plan.height, plan.num_parts > 0) for plan in rows.plans.values()] == [(height, True)]


def _quantized(model: Model) -> None:
    """Launch products with weights of checkpoints: GPTQ and AWQ, GGUF's Q4_K and Q8_0, and blocks of fp8."""
    forms: list[tuple[NumberKind, int, torch.dtype, torch.dtype | None, OffsetKind]] = [
        ("uint4", 128, torch.float16, torch.int8, "zeros"),
        ("uint4", 32, torch.float32, torch.float32, "minima"),
        ("int8", 32, torch.float16, None, "zeros"),
        ("fp8", 128, torch.float32, None, "zeros"),
    ]
    for kind, group, scale, offset, meaning in forms:
        for outputs, inputs in ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)):
            numbers = torch.empty(outputs, inputs // 2 if kind == "uint4" else inputs, dtype=torch.uint8)
            scales = torch.empty(outputs, -(-inputs // group), dtype=scale)
            offsets = None if offset is None else torch.empty(scales.shape, dtype=offset)
            weight = QuantizedRows(kind, inputs, numbers, group, scales, offsets, meaning)
            for rows in ROWS if model == LLAMA_1B else ROWS[1:]:
                quantized_linear(torch.empty(rows, inputs, dtype=model.dtype), weight, None)


def _adapters(model: Model, rank: int) -> None:
    """Launch adapters beside a layer's four products."""
    heads, dtype = model.heads * model.dim, model.dtype
    kv_heads = 2 * model.kv_heads * model.dim
    tables = torch.empty(4, 3, dtype=torch.int32)
    for parts, inputs, columns in (
        (3, model.hidden, heads + kv_heads),
        (1, heads, model.hidden),
        (2, model.hidden, 2 * model.intermediate),
        (1, model.intermediate, model.hidden),
    ):
        down, up = torch.empty(2, parts, rank, inputs, dtype=dtype), torch.empty(2, columns, rank, dtype=dtype)
        weights = StackedLowRank(down, up, torch.empty(2, parts, dtype=torch.int32), tables, ())
        x, out = torch.empty(4, inputs, dtype=dtype), torch.empty(4, columns, dtype=dtype)
        grouped_lora(x, out, weights, AdapterRows(torch.empty(4, dtype=torch.int64), tables))


def _moves() -> None:
    """Launch copies within a cache and between caches, whose layers are near and far apart."""
    places = torch.arange(2)
    for slots in SLOTS:
        for dtype in (torch.bfloat16, torch.uint8):
            kv = torch.empty(2, slots, 1 << 12, dtype=dtype, device="meta")
            move_kv(kv, places, places)
            # Features, which only a model with a head that reads them has, are as wide as three states at most.
            walk = Walk(places[None], places[:1], places[:1])
            for features in (None, torch.empty(slots, 3 << 12, dtype=torch.bfloat16, device="meta")):
                commit(walk, DraftedEntries(kv, features, places[None]))
            blocks = kv.unflatten(1, (-1, BLOCK_SIZE)).transpose(0, 1)
            host = torch.empty(2, 2, BLOCK_SIZE, 1 << 12, dtype=dtype)
            copy_between(blocks, host, places, places)
            copy_between(host, blocks, places, places)


def _noise(rows: int) -> NoiseColumns:
    seeds, indices, positions = torch.empty(3, rows, dtype=torch.int64)
    return NoiseColumns(seeds, indices, positions, torch.empty(rows, dtype=torch.bool))


def _sampling(vocab: int) -> None:
    """Launch what samples and drafts: processed scores are float32, those of a greedy batch have the model's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.empty(16, vocab, dtype=dtype)
        gumbel_argmax(scores, _noise(16))
        for k in (8, MAX_K):
            perturbed_top_k(scores, _noise(16), k, None, 1, 0)
        # Of a trimmed vocabulary.
        perturbed_top_k(scores[:, :4096].contiguous(), _noise(16), 8, torch.arange(4096), 1, 0)
        for nodes, depth in ((64, 8), (128, 8)):
            _searches(nodes, depth)
            _walks(vocab, dtype, nodes, depth)


def _searches(nodes: int, depth: int) -> None:
    """Launch a search with the official settings' branching, and with that of a CPU's trees."""
    for width in (3, 10):
        own, numbers = torch.empty(width, 1, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
        first, later = (
            TopK(torch.empty(rows, width, dtype=torch.int64), torch.empty(rows, width), torch.empty(rows))
            for rows in (2, 2 * width)
        )
        roots = next_frontier(first, None, own, 2, width)
        for bits in (own, None):
            next_frontier(later, roots.frontier, bits, 2, width)
        count = width * (1 + (depth - 1) * width)
        values, tokens = torch.empty(2, count), torch.empty(2, count, dtype=torch.int64)
        best = torch.empty(2, depth - 1, width, dtype=torch.int64)
        best_nodes(SearchedLevels(values, tokens, best, numbers, numbers), nodes, width)


def _walks(vocab: int, dtype: torch.dtype, nodes: int, depth: int) -> None:
    scores, numbers = torch.empty(2 + 2 * nodes, vocab, dtype=dtype), torch.empty(2 * nodes, dtype=torch.int64)
    trees = PackedTrees(numbers, numbers, torch.empty(3, dtype=torch.int64), nodes, depth)
    probs = DraftProbs(torch.empty(4, vocab), torch.empty(2 + 2 * nodes, dtype=torch.int64))
    coupled_walk(scores, trees, _noise(len(scores)))
    for draft in (None, probs):
        rejection_walk(scores, draft, trees, _noise(2))
