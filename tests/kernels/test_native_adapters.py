"""Adapters in the compiled layer: against the same weights merged, and the same bits alone and among others."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import LayerForm, LlamaLayer, PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.native.adapters import NativeAdapters
from specdec.kernels.native.library import Library
from specdec.kernels.types.adapters import LayerAdapter, LowRank
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.models.adapter_layout import adapted_products
from tests.kernels.native_forms import CONFIG, FORMS, kernels_of, libraries, library, normal
from tests.strategies import seeds

COUNTS = [5, 1, 3, 2, 4]


def made_layer(config: LlamaConfig) -> LlamaLayer:
    layer = LlamaLayer(config)
    for place, parameter in enumerate(layer.parameters()):
        parameter.data = normal(place, *parameter.shape) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1)
    return layer.requires_grad_(False)


def drawn_adapter(config: LlamaConfig, ranks: list[int], seed: int) -> LayerAdapter:
    """An adapter of a rank for each part of a layer in turn."""
    own = iter(ranks)
    found: dict[str, list[LowRank]] = {}
    for name, product in adapted_products(config).items():
        found[name] = []
        for part in product.parts:
            rank = next(own)
            down, up = normal(seed, rank, product.inputs), normal(seed + 1, part.columns, rank)
            found[name].append(LowRank(down * product.inputs**-0.5, up * 0.3))
            seed += 2
    return found


def with_merged(layer: LlamaLayer, config: LlamaConfig, adapter: LayerAdapter) -> LlamaLayer:
    found = LlamaLayer(config)
    found.load_state_dict(layer.state_dict())
    for name, linear in (found.linears | found.mlp.linears).items():
        linear.weight.data += torch.cat([up @ down for down, up in adapter[name]])
    return found.requires_grad_(False)


def run(
    own: Library, layer: LayerForm, config: LlamaConfig, counts: list[int], adapters: list[int], x: Tensor
) -> Tensor:
    """Run chains of requests from their beginning through a prepared layer."""
    ends = [8 * (place + 1) for place in range(len(counts))]
    slots = torch.cat([torch.arange(end - 8, end - 8 + count) for end, count in zip(ends, counts, strict=True)])
    positions = torch.cat([torch.arange(count) for count in counts])
    rows = RaggedRows(
        query_lens=counts,
        lengths=counts,
        tree_starts=counts,
        block_tables=torch.arange(len(counts))[:, None],
        visible=positions + 1,
        ancestors=torch.zeros(len(x), 1, dtype=torch.int64),
        block_size=8,
        adapters=adapters if any(adapters) else (),
    )
    kv = torch.full((8 * len(counts), 2 * config.num_kv_heads, config.head_dim), float("nan"), dtype=own.dtype)
    rotary = rotary_at(config.rope.table(config.head_dim, 16, own.dtype), positions)
    attention = PagedAttention(kv, slots, rows, kernels_of(own))
    return layer(x, rotary, attention)


configs = st.builds(
    replace,
    st.just(CONFIG),
    # Queries that end within a block of 16 columns, and such as do not.
    head_dim=st.sampled_from([10, 16]),
    intermediate_size=st.sampled_from([16, 40]),
    mlp_bias=st.booleans(),
)
ranks = st.lists(st.sampled_from([0, 0, 1, 4, 7, 18]), min_size=7, max_size=7)


@pytest.mark.long
@given(libraries, configs, ranks, ranks, st.permutations([0, 1, 2, 1, 0]), seeds)
def test_rows_are_those_of_merged_weights_and_of_their_batch_alone(
    own: Library, config: LlamaConfig, first: list[int], second: list[int], adapters: list[int], seed: int
) -> None:
    plain, kernels = made_layer(config), kernels_of(own)
    given = [drawn_adapter(config, first, seed % 1000), drawn_adapter(config, second, seed % 1000 + 50)]
    references = [plain, *(with_merged(plain, config, adapter) for adapter in given)]
    layer = made_layer(config).to(own.dtype).form(kernels)
    assert layer.mixer.fused is not None
    bank = NativeAdapters(own, [layer.mixer.fused])
    for place, adapter in enumerate(given, 1):
        bank.put(
            place, [{name: [LowRank(*(m.to(own.dtype) for m in part)) for part in adapter[name]] for name in adapter}]
        )
    x = normal(seed % 1000 + 99, sum(COUNTS), config.hidden_size).to(own.dtype)
    found = run(own, layer, config, COUNTS, adapters, x)
    exact_library = library("portable", 1, torch.float32)
    exact_layers = [reference.form(kernels_of(exact_library)) for reference in references]
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}[own.dtype]
    start = 0
    for number, count in zip(adapters, COUNTS, strict=True):
        part = x[start : start + count]
        assert run(own, layer, config, [count], [number], part).equal(found[start : start + count])
        exact = run(exact_library, exact_layers[number], config, [count], [0], part.float())
        torch.testing.assert_close(found[start : start + count].float(), exact, rtol=tolerance, atol=tolerance)
        start += count


def test_an_adapter_that_is_replaced_leaves_no_trace() -> None:
    own = library(FORMS[-1], 2, torch.float32)
    layer = made_layer(CONFIG).form(kernels_of(own))
    assert layer.mixer.fused is not None
    bank = NativeAdapters(own, [layer.mixer.fused])
    x = normal(7, 3, CONFIG.hidden_size)
    results = []
    for seed in (0, 1, 0):
        bank.put(1, [drawn_adapter(CONFIG, [4] * 7, seed)])
        results.append(run(own, layer, CONFIG, [3], [1], x))
    assert results[0].equal(results[2])
    assert not results[0].equal(results[1])
