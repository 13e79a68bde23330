"""Layout of adapters in a target or a draft model: the products of its layers, their parts, and their bank."""

from collections.abc import Mapping, Sequence

from torch import nn

from specdec.draft_heads.heads.block_head import BlockHead
from specdec.draft_heads.heads.draft_head import CachedHead
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import DecoderLayer, fused_layers
from specdec.draft_heads.llama.mlp import mlp_kind
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdaptableProduct, AdapterBank, LayerAdapter, StackedAdapters, adaptable
from specdec.kernels.types.product import Product
from specdec.models.llama import LlamaModel
from specdec.models.llama_draft import LlamaDraftHead
from specdec.models.sharded_llama import ShardedLlama
from specdec.models.tp_plan import Shard

# The products of each layer that adapters may change, by their names in `LayerWeights`.
AdapterLayout = Sequence[Mapping[str, AdaptableProduct]]


def adapted_products(config: LlamaConfig, inputs: int | None = None) -> dict[str, AdaptableProduct]:
    """Return the products of a layer by their names in `LayerWeights`.

    Args:
        inputs: of queries, keys and values, where they are others than the hidden state.
    """
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    qkv = {f"self_attn.{name}_proj": size for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    return {
        "qkv": adaptable("qkv_proj", inputs or hidden, qkv),
        "output": adaptable("o_proj", heads, {"self_attn.o_proj": hidden}),
        **mlp_kind(config).products(config),
    }


def target_layout(config: LlamaConfig) -> AdapterLayout:
    """Return the products of a whole target."""
    return [adapted_products(config)] * config.num_layers


def target_part(model: LlamaModel, adapter: Sequence[LayerAdapter]) -> Sequence[LayerAdapter]:
    """Return what this rank has of an adapter of the whole target: its layers, split as the weights beside them."""
    if not isinstance(model, ShardedLlama):
        return adapter
    return _part_of(adapter, target_layout(model.shard.whole), model.shard)


def _part_of(adapter: Sequence[LayerAdapter], layout: AdapterLayout, shard: Shard) -> Sequence[LayerAdapter]:
    """Return a rank's part of an adapter of a whole model."""
    return [
        {
            name: [
                shard.cut_low_rank(f"layers.{layer}.{part.module}", low)
                for part, low in zip(product.parts, adapter[layer][name], strict=True)
            ]
            for name, product in layout[layer].items()
        }
        for layer in range(shard.layers.start, shard.layers.stop)
    ]


def draft_layout(head: CachedHead, shard: Shard | None = None) -> AdapterLayout:
    """Return the products of a draft model's layers.

    Args:
        shard: the part of the draft model that `head` is, for the products of the whole; None for those of `head`.
    """
    config = head.llama if shard is None else shard.whole
    return [adapted_products(config, layer.input_size) for layer in _draft_layers(head)]


def draft_part(head: CachedHead, adapter: Sequence[LayerAdapter], shard: Shard | None = None) -> Sequence[LayerAdapter]:
    """Return what this rank has of an adapter of a draft model's layers, as its bank takes it.

    A block head makes keys and values of known tokens by one product for all layers, which comes behind them.

    Args:
        shard: the rank's part of the draft model; None where it has all of it.
    """
    if shard is not None:
        adapter = _part_of(adapter, draft_layout(head, shard), shard)
    if not isinstance(head, BlockHead):
        return adapter
    return [*adapter, {"qkv": [low for layer in adapter for low in layer["qkv"][1:]]}]


def _draft_layers(head: CachedHead) -> list[DecoderLayer]:
    model = head.model if isinstance(head, LlamaDraftHead) else head
    assert isinstance(model, nn.Module)
    return [layer for layer in model.get_submodule("layers").children() if isinstance(layer, DecoderLayer)]


def attach_draft_adapters(head: CachedHead, kernels: KernelSet, places: int, rank: int) -> AdapterBank:
    """Have a prepared draft model carry adapters, and return their bank, which is empty; see `attach_adapters`."""
    carriers: list[nn.Module] = [*_draft_layers(head)]
    layout = list(draft_layout(head))
    if isinstance(head, BlockHead):
        parts = tuple(part for products in layout for part in products["qkv"].parts[1:])
        carriers.append(head)
        layout.append({"qkv": AdaptableProduct("_project", head.llama.hidden_size, parts)})
    return _bank(carriers, layout, kernels, places, rank)


def attach_adapters(model: LlamaModel, kernels: KernelSet, places: int, rank: int) -> AdapterBank:
    """Have the layers of a prepared target carry adapters, and return their bank, which is empty.

    Args:
        places: most adapters.
        rank: their largest rank.
    """
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    model.adapters = _bank(layers, [adapted_products(model.config)] * len(layers), kernels, places, rank)
    return model.adapters


def _bank(
    carriers: Sequence[nn.Module], layout: AdapterLayout, kernels: KernelSet, places: int, rank: int
) -> AdapterBank:
    """Return the bank of the adapters of layers, and perhaps of one module behind them."""
    layers = [carrier for carrier in carriers if isinstance(carrier, DecoderLayer)]
    if kernels.fused_adapters is not None and (fused := fused_layers(layers)) is not None:
        beside: Product | None = None
        if len(layers) < len(carriers):
            beside = carriers[-1].__dict__[layout[-1]["qkv"].attribute]
        return kernels.fused_adapters(fused, beside)
    bank = StackedAdapters(kernels.grouped_lora, places, rank)
    for carrier, products in zip(carriers, layout, strict=True):
        places_of = {name: _place(carrier, product.attribute) for name, product in products.items()}
        given = {name: (part.__dict__[own], products[name].sizes) for name, (part, own) in places_of.items()}
        for name, adapted in bank.adapt(given, layers[0].post_attention_layernorm.weight).items():
            part, own = places_of[name]
            part.__dict__[own] = adapted
    return bank


def _place(carrier: nn.Module, attribute: str) -> tuple[nn.Module, str]:
    """Return the module that has a product, and the product's name in it."""
    part, _, own = attribute.rpartition(".")
    return carrier.get_submodule(part), own
